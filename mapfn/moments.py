"""Fixed sums over the rows of a map, made once, that mapping losses need at every step.

With them the alignment of a group, and its smoothness where that has a closed form without an
activation, cost a few dot products of latents; without them, a pass over all weights each.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from mapfn import raw, transform
from mapfn.decoders import full
from mapfn.groups import Group
from mapfn.mappers.identity import identity
from mapfn.modulation import additive
from mapfn.spec import Spec
from mapfn.types import Buffers, MapBuffers, Moments

# Rows of the map that are made at once: 4 MiB of float32.
_ROWS = 2**20


def mapped_groups(spec: Spec) -> list[Group]:
    """List the groups that a map makes: not the frozen ones, nor those that are trained directly.

    >>> from mapfn import make_spec
    >>> spec = make_spec(torch.nn.Linear(2, 2), mapper=identity())
    >>> mapped_groups(spec)
    []
    """
    return [group for group in spec.trained_groups if not isinstance(group.mapper, identity)]


def has_closed_form(group: Group) -> bool:
    """Say whether the smoothness of a group has a closed form: one layer, additive or unmodulated.

    The mapper must know the norms of its rows, and the decoder must take numbers one by one.
    """
    simple = group.modulation is None or isinstance(group.modulation, additive)
    return simple and group.normed is not None and isinstance(group.decoder, full)


def moments(spec: Spec, buffers: Buffers) -> dict[str, Moments]:
    """Sum over the rows of every group's map; eager, once.

    Args:
        spec: from :func:`~mapfn.make_spec`.
        buffers: from :func:`~mapfn.init` of the same spec.

    Returns:
        ``{group: Moments}`` of the mapped groups, float32.

    >>> from mapfn import init, make_spec
    >>> spec = make_spec(torch.nn.Linear(4, 2), latent_dim=3)
    >>> moments(spec, init(spec)[1])["(root)"].row_mean.shape
    torch.Size([3])
    """
    with torch.no_grad():
        return {group.name: _moments(group, buffers[group.name]) for group in mapped_groups(spec)}


def _moments(group: Group, buffers: MapBuffers) -> Moments:
    device = next((tensor.device for tensor in buffers.values()), None)
    blank = torch.zeros(group.layer_dims[-1][0], dtype=torch.float64, device=device)
    total, pull, energy = torch.zeros_like(blank), torch.zeros_like(blank), blank.new_zeros(())
    own = raw.layer_buffers(group, len(group.layer_dims) - 1, buffers)
    for start, stop, scale in _stretches(group):
        rows = functools.partial(_rows, group, own, start, stop)
        part = _row_sum(rows, blank, stop - start)
        total, pull = total + part, pull + scale**2 * part
        if group.normed is not None:
            energy = energy + scale**2 * group.normed.squared_norms(own, blank, start, stop).sum()
    spread = sum((stop - start) * scale**2 for start, stop, scale in _stretches(group))
    left = _left_mean(group, buffers, blank)
    found = (total / group.num_numbers, left, pull, energy, energy.new_tensor(spread))
    return Moments(*(tensor.float() for tensor in found))


def _rows(group: Group, own: MapBuffers, start: int, stop: int, vector: Tensor) -> Tensor:
    return group.mapper.generate(own, vector, vector.new_zeros(()), start, stop)


def _row_sum(rows: "functools.partial[Tensor]", blank: Tensor, count: int) -> Tensor:
    """Sum some rows of a matrix that is known by its products: ``W^T 1``."""
    adjoint = torch.func.vjp(rows, blank)[1]
    total: Tensor = adjoint(blank.new_ones(count))[0]
    return total


def _left_mean(group: Group, buffers: MapBuffers, blank: Tensor) -> Tensor:
    drive = raw.drive_layer(group, len(group.layer_dims) - 1, blank, buffers)
    total = torch.zeros_like(drive.inner)
    if not len(total):
        return total
    for start, stop, _ in _stretches(group):
        rows = functools.partial(_left_rows, drive.left, start, stop)
        total = total + _row_sum(rows, drive.inner, stop - start)
    return total / group.num_numbers


def _left_rows(key: Tensor, start: int, stop: int, inner: Tensor) -> Tensor:
    return transform.rows(key, inner, inner.new_zeros(()), start, stop)


def _stretches(group: Group) -> Iterator[tuple[int, int, float]]:
    """Cut a group's flat numbers into ``(start, stop, scale)``, none of them large."""
    for segment in group.segments:
        for run in segment.runs:
            for start in range(run.start, run.stop, _ROWS):
                yield start, min(start + _ROWS, run.stop), run.scale
