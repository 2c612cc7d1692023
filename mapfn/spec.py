"""Specs: everything about a map that is known before any number exists.

A spec is plain, hashable data: which leaves there are, which latent vector makes each, and through
which mapper, modulation, activation and decoder. It holds no tensor and no randomness.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mapfn import strategies
from mapfn.decoders import full
from mapfn.errors import differing, listing, message
from mapfn.groups import Group
from mapfn.layout import Layout, Leaf, layout, tensors_by_name
from mapfn.mappers.frozen import frozen
from mapfn.mappers.hadamard import hadamard
from mapfn.mappers.identity import identity
from mapfn.modulation import additive
from mapfn.scales import he
from mapfn.strategies import Strategy, budget
from mapfn.types import Decoder, Mapper, Modulation

ACTIVATIONS = ("identity", "tanh", "sin")
SCALES = ("auto", "he", "target")
BASES = ("auto", "init", "target")


@dataclass(frozen=True)
class Spec:
    """A target's layout and the groups that make it; made by :func:`make_spec`."""

    layout: Layout
    groups: tuple[Group, ...]

    @property
    def trained_groups(self) -> tuple[Group, ...]:
        """List the groups that have latents; the others are frozen."""
        return tuple(group for group in self.groups if group.latent_dim)


@dataclass(frozen=True)
class _Arguments:
    """The arguments of ``make_spec`` that a group may have for itself."""

    latent_dim: Any
    mapper: Any
    modulation: Any
    activation: Any
    decoder: Any
    scale: Any
    base: Any


def make_spec(
    target: Any,
    *,
    strategy: str | Strategy = "layerwise",
    latent_dim: int | Mapping[str, int] | budget = 256,
    mapper: Mapper = hadamard(),
    modulation: Modulation | None = additive(0.01),
    activation: str = "identity",
    decoder: Decoder = full(),
    scale: str | Mapping[str, float] = "auto",
    base: str = "auto",
) -> Spec:
    """Describe how latents make the target's weights; allocates nothing.

    ``raw = W z + alpha z.z / d`` and ``theta = base + scale * activation(raw)``
    (arXiv 2602.19134), with ``W`` of unit-norm rows and ``z ~ N(0, 1)``.

    Args:
        target: an ``nn.Module``, on ``meta`` too, or a tree of tensors.
        strategy: ``"slvt"`` (one latent vector), ``"layerwise"`` (one a module), or
            :class:`~mapfn.slvt`, :class:`~mapfn.layerwise`, :class:`~mapfn.grouped`.
        latent_dim: trained numbers of each group; a dict by group; or
            :class:`~mapfn.budget`, a total. A group gets at most as many as it has numbers.
        mapper: the fixed map ``W``.
        modulation: how the latent changes the map, None for not at all.
        activation: ``"identity"``, ``"tanh"`` or ``"sin"``, applied to ``raw``.
        decoder: how flat numbers become a leaf.
        scale: ``"auto"``, torch's own initial spread by module type; ``"he"``,
            ``sqrt(2 / fan_in)``; ``"target"``, the spread of the target's own tensors; or
            ``{leaf name or glob: number}`` over auto.
        base: ``"auto"``, 0, and 1 for norm weights; ``"init"``, a seeded random
            initialisation; ``"target"``, the target's own tensors (fine-tuning).

    Raises:
        TypeError: an argument or a leaf of the wrong kind.
        ValueError: an argument out of range, a leaf in no group or in two.

    >>> spec = make_spec(torch.nn.Linear(30, 10), latent_dim=16)
    >>> [(group.name, group.latent_dim) for group in spec.groups]
    [('(root)', 16)]
    """
    found = layout(target)
    shared = _Arguments(latent_dim, mapper, modulation, activation, decoder, scale, base)
    assigned = strategies.assign(strategies.named(strategy), found)
    arguments = {each.name: _overridden(shared, each) for each in assigned}
    for name, own in arguments.items():
        _check_arguments(name, own)
    dims = _latent_dims(assigned, arguments, latent_dim)
    groups = (_group(each, arguments[each.name], dims[each.name], target) for each in assigned)
    return Spec(found, tuple(groups))


def _overridden(shared: _Arguments, assigned: strategies.Assigned) -> _Arguments:
    known = vars(shared)
    unknown = [name for name in assigned.overrides if name not in known]
    if unknown:
        where, fix = f"overrides of group {assigned.name!r}", "correct the name"
        expected = f"arguments among {listing(known)}"
        raise ValueError(message(where, expected=expected, got=listing(unknown), fix=fix))
    return _Arguments(**(known | dict(assigned.overrides)))


def _check_arguments(group: str, own: _Arguments) -> None:
    where = f"make_spec, group {group!r}: "
    _check_part(where + "mapper=", own.mapper, Mapper, "mapfn.hadamard()")
    _check_part(where + "decoder=", own.decoder, Decoder, "mapfn.full()")
    if own.modulation is not None:
        _check_part(where + "modulation=", own.modulation, Modulation, "mapfn.additive(0.01)")
    choices = [("activation=", own.activation, ACTIVATIONS), ("base=", own.base, BASES)]
    if not isinstance(own.scale, Mapping):
        choices.append(("scale=", own.scale, SCALES))
    for name, value, allowed in choices:
        if value not in allowed:
            expected, got = f"one of {listing(allowed)}", repr(value)
            raise ValueError(
                message(where + name, expected=expected, got=got, fix="use one of those")
            )


def _check_part(where: str, value: Any, protocol: type, example: str) -> None:
    if isinstance(value, type) or not isinstance(value, protocol):
        got = f"the class {value.__name__}" if isinstance(value, type) else repr(value)
        expected = f"a {protocol.__name__.lower()}"
        raise TypeError(message(where, expected=expected, got=got, fix=f"pass {example}, say"))
    try:
        hash(value)
    except TypeError:
        fix = "make it a frozen dataclass of hashable fields"
        raise TypeError(
            message(where, expected="a hashable value", got=repr(value), fix=fix)
        ) from None


def _latent_dims(
    assigned: list[strategies.Assigned], arguments: Mapping[str, _Arguments], shared: Any
) -> dict[str, int]:
    """Decide the trained numbers that each group asks for."""
    sizes = {each.name: _num_numbers(each.leaves, arguments[each.name]) for each in assigned}
    mapped = {
        name: size
        for name, size in sizes.items()
        if size and not isinstance(arguments[name].mapper, frozen | identity)
    }
    dims = {
        name: 0 if isinstance(arguments[name].mapper, frozen) else n for name, n in sizes.items()
    }
    own = {name: arguments[name].latent_dim for name in mapped}
    pooled = [name for name in mapped if own[name] is shared]
    if isinstance(shared, budget):
        _check_int("budget(total=)", shared.total)
        own |= strategies.split(shared, {name: mapped[name] for name in pooled}) if pooled else {}
    elif isinstance(shared, Mapping):
        if wrong := differing(pooled, shared):
            fix = "give one number for each of those groups"
            where = "make_spec(latent_dim=)"
            raise ValueError(
                message(where, expected=f"groups {listing(pooled)}", got=wrong, fix=fix)
            )
        own |= {name: shared[name] for name in pooled}
    for name, dim in own.items():
        _check_int(f"make_spec(latent_dim=), group {name!r}", dim)
    return dims | own


def _check_int(where: str, value: Any) -> None:
    fix = "pass a positive int, or mapfn.budget(total) for all groups together"
    if type(value) is not int:
        raise TypeError(message(where, expected="an int >= 1", got=repr(value), fix=fix))
    if value < 1:
        raise ValueError(message(where, expected="an int >= 1", got=repr(value), fix=fix))


def _num_numbers(leaves: tuple[Leaf, ...], own: _Arguments) -> int:
    return sum(own.decoder.num_numbers(leaf.shape) for leaf in leaves)


def _group(each: strategies.Assigned, own: _Arguments, dim: int, target: Any) -> Group:
    num_numbers = _num_numbers(each.leaves, own)
    mapper = own.mapper if num_numbers else frozen()
    direct = isinstance(mapper, identity | frozen)
    return Group(
        name=each.name,
        leaves=each.leaves,
        latent_dim=min(dim, num_numbers),
        requested_dim=dim,
        mapper=mapper,
        modulation=None if direct else own.modulation,
        activation="identity" if direct else own.activation,
        decoder=own.decoder,
        scales=_scales(each.leaves, own.scale, target),
        bases=tuple(
            _base(leaf, own, frozen_leaf=isinstance(mapper, frozen)) for leaf in each.leaves
        ),
    )


def _base(leaf: Leaf, own: _Arguments, *, frozen_leaf: bool) -> float | str:
    if own.base != "auto":
        return str(own.base)
    return "target" if frozen_leaf and leaf.numel else leaf.initial.mean


def _scales(leaves: tuple[Leaf, ...], scale: Any, target: Any) -> tuple[float, ...]:
    if isinstance(scale, Mapping):
        _check_scale_names(leaves, scale, layout(target))
        return tuple(_own_scale(leaf, scale) for leaf in leaves)
    if scale == "he":
        return tuple(_he(leaf) for leaf in leaves)
    if scale == "target":
        tensors = tensors_by_name(target)
        return tuple(_spread(tensors[leaf.name], leaf) for leaf in leaves)
    return tuple(leaf.initial.std for leaf in leaves)


def _he(leaf: Leaf) -> float:
    """Leave norm layers, which have no fan-in to speak of, at their own spread."""
    return he(leaf.initial.fan_in) if leaf.initial.mean == 0.0 else leaf.initial.std


def _own_scale(leaf: Leaf, scale: Mapping[str, float]) -> float:
    fitting = [number for pattern, number in scale.items() if strategies.matches(leaf, pattern)]
    return float(fitting[-1]) if fitting else leaf.initial.std


def _check_scale_names(leaves: tuple[Leaf, ...], scale: Mapping[str, float], whole: Layout) -> None:
    strategies.select(whole, list(scale), where="make_spec(scale=)")
    for pattern, number in scale.items():
        if (
            isinstance(number, bool)
            or not isinstance(number, int | float)
            or not 0 < number < math.inf
        ):
            where, fix = f"make_spec(scale=), {pattern!r}", "pass a positive number"
            raise ValueError(message(where, expected="a number > 0", got=repr(number), fix=fix))


def _spread(tensor: torch.Tensor, leaf: Leaf) -> float:
    if tensor.is_meta:
        fix = 'build the target on a real device, or use scale="auto"'
        where, got = "make_spec(scale='target')", f"leaf {leaf.name!r} on meta"
        raise ValueError(message(where, expected="tensors with values", got=got, fix=fix))
    spread = float(tensor.detach().double().std(correction=0)) if tensor.numel() else 0.0
    if not math.isfinite(spread):
        fix = 'mend the weights that are not finite, or use scale="auto"'
        where, got = "make_spec(scale='target')", f"leaf {leaf.name!r} with a spread of {spread}"
        raise ValueError(message(where, expected="finite weights", got=got, fix=fix))
    return spread or leaf.initial.std
