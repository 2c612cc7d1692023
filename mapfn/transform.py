"""The product with a signed Hadamard map: in plain operations, or tile by tile in cache.

:mod:`mapfn.blocks` says what the map is. Both ways multiply by ``H_b`` once a unit and by ``H_a``
once a weight; the tiled one reads every sign and writes every number exactly once.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mapfn.blocks import (
    Blocks,
    Draw,
    cover,
    draw_units,
    laid_out,
    mix,
    read_signs,
    shared_columns,
    small_matrix,
)
from mapfn.tiling import Kernel, tiled
from mapfn.types import Scales

# Rows made at once: 1 MiB of float32, so that a tile and its scratch stay in a core's L2 cache.
_TILE_ROWS = 2**18
# Rows up to which plain operations are faster than the tiled Function.
_SMALL = 2**19
# Tiles whose random words are drawn at once: few operations, and a few MiB of words.
_TILES_A_DRAW = 16


def rows(key: Tensor, latent: Tensor, shift: Tensor, start: int, stop: int) -> Tensor:
    """Return rows ``start .. stop`` of ``W latent + shift``, each row of ``W`` of norm 1.

    Args:
        key: ``int64 []``, from :func:`mapfn.seeds.key`.
        latent: ``float [d]``, float32 or float64.
        shift: ``float []``, added to every row.
        start: first row.
        stop: one past the last row.

    Returns:
        ``float [stop - start]`` in the latent's dtype.

    >>> from mapfn import seeds
    >>> key, z = seeds.key(0), torch.ones(4)
    >>> whole = rows(key, z, torch.zeros(()), 0, 20)
    >>> bool((rows(key, z, torch.zeros(()), 5, 9) == whole[5:9]).all())
    True
    """
    if start == stop:
        return shift.expand(0)
    blocks = cover(latent.shape[-1], start, stop, ((stop - start, 1.0),))
    if prefers_plain(stop - start):
        return _plain(blocks, key, latent, shift)
    return tiled(_kernel(blocks), key, latent, shift)[0]


def scaled_rows(key: Tensor, latent: Tensor, shift: Tensor, scales: Scales) -> tuple[Tensor, ...]:
    """Return all rows of ``W latent + shift``, cut into parts and scaled, in one pass.

    Args:
        key: ``int64 []``.
        latent: ``float [d]``.
        shift: ``float []``.
        scales: ``(rows, scale)`` of each part in turn.

    Returns:
        ``float [rows]`` for each part; views of one tensor.

    >>> from mapfn import seeds
    >>> key, z = seeds.key(0), torch.ones(4)
    >>> first, second = scaled_rows(key, z, torch.zeros(()), ((3, 2.0), (4, 1.0)))
    >>> whole = rows(key, z, torch.zeros(()), 0, 7)
    >>> torch.allclose(first, 2 * whole[:3]), torch.allclose(second, whole[3:])
    (True, True)
    """
    blocks = cover(latent.shape[-1], 0, sum(count for count, _ in scales), scales)
    return tiled(_kernel(blocks), key, latent, shift)


def prefers_plain(num_rows: int) -> bool:
    """Say whether plain operations serve better: traced code, or a small map.

    >>> prefers_plain(10)
    True
    """
    return torch.compiler.is_compiling() or num_rows <= _SMALL


def _plain(blocks: Blocks, key: Tensor, latent: Tensor, shift: Tensor) -> Tensor:
    (first, last), made, order = blocks.units, blocks.inside, blocks.order
    matrix, a = small_matrix(blocks, latent), blocks.factors[1]
    draw = draw_units(blocks, key, first, last)
    columns = shared_columns(blocks, draw, laid_out(blocks, latent), matrix)
    # From here on it is work by the weight: only the blocks that hold wanted rows.
    offset = first * blocks.unit + made.start * order
    wanted = slice((blocks.start - offset) // order, -(-(blocks.stop - offset) // order))
    mixed = (columns * draw.own).flatten(0, 1)[wanted] @ matrix[:a, :a]
    signs = read_signs(draw.words).view(last - first, -1, order)[:, made].flatten(0, 1)[wanted]
    flat = torch.addcmul(shift, mixed.reshape(-1), signs.reshape(-1).to(latent.dtype))
    offset += wanted.start * order
    return flat[blocks.start - offset : blocks.stop - offset]


def _kernel(blocks: Blocks) -> Kernel:
    return Kernel(
        rows=lambda key, latent, shift, out: _tiled_rows(blocks, key, latent, shift, out),
        adjoint=lambda key, gradients: _tiled_adjoint(blocks, key, gradients),
        sizes=tuple(size for size, _ in blocks.scales),
    )


class _Stretch(NamedTuple):
    """The wanted rows of one part inside one tile."""

    inside: slice
    """The rows among the tile's."""
    outside: slice
    """The rows among all wanted ones."""
    within: slice
    """The rows among the part's."""
    part: int
    """Which part they belong to."""
    scale: float


class _Tile(NamedTuple):
    """A few units: a slice of their draw, with cache-sized scratch that all tiles use in turn."""

    units: slice
    """The units among the draw's."""
    row_signs: Tensor
    """``int8 [units, blocks, order]``."""
    x: Tensor
    """Scratch, ``float [units, blocks, b, a]``."""
    y: Tensor
    stretches: list[_Stretch]


def _tile_units(blocks: Blocks) -> int:
    return max(1, _TILE_ROWS // blocks.unit)


def _draws(blocks: Blocks, key: Tensor) -> Iterator[Draw]:
    begin, end = blocks.units
    for first in range(begin, end, _tile_units(blocks) * _TILES_A_DRAW):
        yield draw_units(blocks, key, first, min(first + _tile_units(blocks) * _TILES_A_DRAW, end))


def _tiles(blocks: Blocks, like: Tensor) -> Callable[[Draw], Iterator[_Tile]]:
    """Return what takes the draws apart, in turn, into tiles."""
    made, stretches = blocks.inside, _stretches(blocks)
    size, (begin, end) = _tile_units(blocks), blocks.units
    units = min(size, end - begin)
    x, y = like.new_empty(2, units, made.stop - made.start, *blocks.factors)
    runs = blocks.factors[0]
    shape = units * runs, 8, blocks.unit // runs // 64
    bits = torch.empty(shape, dtype=torch.int64, device=like.device)

    def tiles(draw: Draw) -> Iterator[_Tile]:
        for first in range(0, len(draw.words), size):
            words = draw.words[first : first + size]
            count = len(words)
            signs = read_signs(words, out=bits[: count * runs])
            signs = signs.view(count, -1, blocks.order)[:, made]
            yield _Tile(slice(first, first + count), signs, x[:count], y[:count], next(stretches))

    return tiles


def _stretches(blocks: Blocks) -> Iterator[list[_Stretch]]:
    """Cut the parts at the borders of the tiles, in one walk over both."""
    offset = blocks.units[0] * blocks.unit + blocks.inside.start * blocks.order
    rows = _tile_units(blocks) * blocks.unit
    edge, start, found = offset + rows, blocks.start, list[_Stretch]()
    for part, (count, scale) in enumerate(blocks.scales):
        begin, stop = start, start + count
        while begin < stop:
            if begin == edge:
                yield found
                offset, edge, found = edge, edge + rows, []
            end = min(stop, edge)
            spans = [slice(begin - base, end - base) for base in (offset, blocks.start, start)]
            found.append(_Stretch(spans[0], spans[1], spans[2], part, scale))
            begin = end
        start = stop
    yield found


def _tiled_rows(blocks: Blocks, key: Tensor, latent: Tensor, shift: Tensor, out: Tensor) -> None:
    a, columns, tiles = blocks.factors[1], laid_out(blocks, latent), _tiles(blocks, latent)
    matrix = small_matrix(blocks, latent)
    shifts = (shift * latent.new_tensor([scale for _, scale in blocks.scales])).unbind()
    for draw in _draws(blocks, key):
        shared = shared_columns(blocks, draw, columns, matrix)
        shared = shared.expand(len(draw.own), *shared.shape[1:])
        for tile in tiles(draw):
            torch.mul(shared[tile.units], draw.own[tile.units].to(latent.dtype), out=tile.x)
            torch.mm(tile.x.view(-1, a), matrix[:a, :a], out=tile.y.view(-1, a))
            tile.x.view(tile.row_signs.shape).copy_(tile.row_signs)
            x, y = tile.x.view(-1), tile.y.view(-1)
            for inside, outside, _, part, scale in tile.stretches:
                torch.addcmul(shifts[part], x[inside], y[inside], value=scale, out=out[outside])


def _tiled_adjoint(
    blocks: Blocks, key: Tensor, gradients: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    (b, a), total = blocks.factors, gradients[0].new_zeros(blocks.factors)
    matrix, tiles = small_matrix(blocks, total), _tiles(blocks, total)
    shift = total.new_zeros(())
    for draw in _draws(blocks, key):
        columns = total.new_empty(len(draw.own), b, a)
        for tile in tiles(draw):
            flat = tile.y.view(-1)
            flat[: tile.stretches[0].inside.start] = 0
            flat[tile.stretches[-1].inside.stop :] = 0
            for inside, _, within, part, scale in tile.stretches:
                torch.mul(gradients[part][within], scale, out=flat[inside])
            shift += flat.sum()
            tile.x.view(tile.row_signs.shape).copy_(tile.row_signs)
            tile.x.mul_(tile.y)
            torch.mm(tile.x.view(-1, a), matrix[:a, :a], out=tile.y.view(-1, a))
            tile.y.mul_(draw.own[tile.units].to(total.dtype))
            torch.sum(tile.y, 1, out=columns[tile.units])
        if b > 1:
            columns = mix(columns, matrix) * draw.shared
        total += columns.sum(0)
    return total.view(-1)[: blocks.latent_dim] * blocks.latent_dim**-0.5, shift
