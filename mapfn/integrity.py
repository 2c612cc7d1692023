"""Integrity: whether the data of a spec fit together, as those of ``make_spec`` do.

A spec that was read from a file may be anything: what is wrong there must be said there, and not
come out as wrong weights.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch

from mapfn import trees
from mapfn.errors import listing, message
from mapfn.layout import Layout
from mapfn.mappers.frozen import frozen
from mapfn.mappers.identity import identity
from mapfn.spec import ACTIVATIONS, Spec
from mapfn.types import Decoder, Mapper, Modulation

_FIX = "pass what spec_to_json returned, undamaged"


def check_spec(spec: Spec) -> Spec:
    """Return the spec, if its data fit together.

    Raises:
        ValueError: the first thing that does not, by its place.

    >>> from mapfn import make_spec
    >>> spec = make_spec(torch.nn.Linear(3, 2), latent_dim=4)
    >>> check_spec(spec) is spec
    True
    """
    for leaf in spec.layout.leaves:
        _refuse(f"spec, leaf {leaf.name!r}", _leaf_faults(leaf))
    _refuse("spec", _spec_faults(spec))
    for group in spec.groups:
        _refuse(f"spec, group {group.name!r}", _group_faults(group))
    return spec


def _refuse(where: str, faults: Iterator[tuple[str, Any]]) -> None:
    for expected, got in faults:
        raise ValueError(message(where, expected=expected, got=repr(got), fix=_FIX))


def _leaf_faults(leaf: Any) -> Iterator[tuple[str, Any]]:
    strings = (leaf.name, leaf.dtype, leaf.owner, *leaf.aliases)
    if not all(type(text) is str for text in strings):
        yield "names that are strings", strings
    if not all(_is_count(size) for size in leaf.shape):
        yield "a shape of ints >= 0", leaf.shape
    dtype = getattr(torch, leaf.dtype, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        yield "a floating-point dtype", leaf.dtype
    std, mean, fan_in = leaf.initial
    if not (_is_number(std) and std >= 0 and _is_number(mean) and _is_count(fan_in)):
        yield "an initial spread >= 0, a centre and a fan-in", leaf.initial


def _spec_faults(spec: Spec) -> Iterator[tuple[str, Any]]:
    """Find leaves that are not where they belong: each in one group, in the layout's order."""
    names = [leaf.name for leaf in spec.layout.leaves]
    if not _stands(spec.layout):
        yield f"a structure of the leaves {listing(names)}", spec.layout.structure
    labels = [group.name for group in spec.groups]
    if len(set(labels)) < len(labels) or not all(type(label) is str for label in labels):
        yield "groups of different names, strings", labels
    grouped = [leaf.name for group in spec.groups for leaf in group.leaves]
    if sorted(grouped) != sorted(names):
        yield f"each leaf in one group: {listing(names)}", grouped
    order = {name: place for place, name in enumerate(names)}
    for group in spec.groups:
        own = [leaf.name for leaf in group.leaves]
        if own != sorted(own, key=order.__getitem__):
            yield "the leaves of each group in the target's order", own


def _stands(layout: Layout) -> bool:
    """Say whether the structure is that of the tree which is built by it."""
    if layout.structure is None:
        return True
    names = [name for leaf in layout.leaves for name in leaf.names]
    tree = trees.build(layout.structure, {name: torch.empty(0) for name in names})
    structure, placed = trees.describe(tree)
    return structure == layout.structure and sorted(placed) == sorted(names)


def _group_faults(group: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(group.mapper, Mapper):
        yield "a mapper", group.mapper
    if not isinstance(group.decoder, Decoder):
        yield "a decoder", group.decoder
    if not isinstance(group.modulation, Modulation | None):
        yield "a modulation or null", group.modulation
    if group.activation not in ACTIVATIONS:
        yield f"an activation among {listing(ACTIVATIONS)}", group.activation
    dims, numbers = (group.latent_dim, group.requested_dim), group.num_numbers
    if not all(map(_is_count, dims)) or dims[0] != min(dims[1], numbers):
        yield f"latent_dim = min(requested_dim, {numbers} numbers)", dims
    if (dims[0] == 0) != isinstance(group.mapper, frozen):
        yield "the mapper frozen where there is no latent, and only there", group.mapper
    if isinstance(group.mapper, identity) and dims[0] != numbers:
        yield f"a latent for each of {numbers} numbers", dims
    if not all(_is_number(scale) and scale >= 0 for scale in group.scales):
        yield "scales >= 0", group.scales
    if not all(base in ("init", "target") or _is_number(base) for base in group.bases):
        yield 'bases that are numbers, "init" or "target"', group.bases


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)
