"""The signed Hadamard transform: orthogonal rows for next to no memory.

Blocks of ``S_b H D_b / sqrt(d)``: ``H`` is the Sylvester-Hadamard matrix of order ``n``, the power
of two at or above ``d``, ``S_b`` and ``D_b`` are the random row and column signs of block ``b``.
The signs are two bits a row of a 64-bit word made from ``(key, index)`` when they are needed, so
nothing is stored but the key. ``H = H_a (x) H_b`` makes the product two small matrix products.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mapfn import seeds
from mapfn.tiling import Kernel, tiled
from mapfn.types import Scales

_PAIRS = 32  # (column, row) sign pairs in one 64-bit word
_PAIRS_A_BYTE = 4
# Rows made at once: 1 MiB of float32, so that a tile and its scratch stay in a core's L2 cache.
_TILE_ROWS = 2**18
# Rows up to which plain operations are faster than the tiled Function.
_SMALL = 2**14
# Tiles whose random words are drawn at once: few operations, and at most 1 MiB of words.
_TILES_A_DRAW = 16


class _Blocks(NamedTuple):
    """Which blocks cover the rows ``start .. stop`` of a map with ``latent_dim`` columns."""

    latent_dim: int
    start: int
    stop: int
    scales: Scales = ()
    """``(rows, scale)`` of stretches that cover the rows in turn; none for a scale of 1."""

    @property
    def order(self) -> int:
        return 1 << (self.latent_dim - 1).bit_length()

    @property
    def first(self) -> int:
        return self.start // self.order

    @property
    def last(self) -> int:
        return -(-self.stop // self.order)


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

    >>> key, z = seeds.key(0), torch.ones(4)
    >>> whole = rows(key, z, torch.zeros(()), 0, 20)
    >>> bool((rows(key, z, torch.zeros(()), 5, 9) == whole[5:9]).all())
    True
    """
    blocks = _Blocks(latent.shape[-1], start, stop)
    if start == stop:
        return shift.expand(0)
    if prefers_plain(stop - start):
        return _plain(blocks, key, latent, shift)
    return tiled(_kernel(blocks), key, latent, shift)


def scaled_rows(key: Tensor, latent: Tensor, shift: Tensor, scales: Scales) -> Tensor:
    """Return all rows of ``W latent + shift``, scaled stretch by stretch in the same pass.

    Args:
        key: ``int64 []``.
        latent: ``float [d]``.
        shift: ``float []``.
        scales: ``(rows, scale)`` of each stretch in turn.

    >>> key, z = seeds.key(0), torch.ones(4)
    >>> scaled = scaled_rows(key, z, torch.zeros(()), ((3, 2.0), (4, 1.0)))
    >>> whole = rows(key, z, torch.zeros(()), 0, 7)
    >>> torch.allclose(scaled, torch.cat([2 * whole[:3], whole[3:]]))
    True
    """
    blocks = _Blocks(latent.shape[-1], 0, sum(count for count, _ in scales), scales)
    return tiled(_kernel(blocks), key, latent, shift)


def prefers_plain(num_rows: int) -> bool:
    """Say whether plain operations serve better: traced code, or a small map.

    >>> prefers_plain(10)
    True
    """
    return torch.compiler.is_compiling() or num_rows <= _SMALL


def hadamard_matrix(order: int, like: Tensor) -> Tensor:
    """Build the Sylvester-Hadamard matrix ``[order, order]``: -1 where popcount(i & j) is odd."""
    index = torch.arange(order, dtype=torch.int16, device=like.device)
    parity = index[:, None] & index
    for power in range((order.bit_length() - 1).bit_length()):
        parity = parity ^ (parity >> 2**power)
    return (1 - 2 * (parity & 1)).to(like.dtype)


def _factors(order: int) -> tuple[int, int]:
    """Split the order into ``a * b``, both near its root; small orders stay whole."""
    if order <= 32:
        return 1, order
    a = 1 << (order.bit_length() - 1) // 2
    return a, order // a


def _sign_bytes(key: Tensor, blocks: _Blocks, first: int, last: int) -> Tensor:
    """Return the random bytes of blocks ``first .. last``, ``int8 [blocks, 1, bytes a block]``."""
    width = max(blocks.order, _PAIRS)
    per_block = width // _PAIRS
    words = seeds.words(key, first * per_block, (last - first) * per_block)
    return words.view(torch.int8).view(last - first, 1, width // _PAIRS_A_BYTE)


def _bit_shifts(like: Tensor) -> Tensor:
    """Left shifts that bring a pair's column bit to the top; one more brings its row bit."""
    return torch.arange(0, 8, 2, dtype=torch.int8, device=like.device).view(_PAIRS_A_BYTE, 1)


def _plain(blocks: _Blocks, key: Tensor, latent: Tensor, shift: Tensor) -> Tensor:
    order, (a, b) = blocks.order, _factors(blocks.order)
    packed = _sign_bytes(key, blocks, blocks.first, blocks.last)
    shifts = _bit_shifts(key)
    column_signs = _signs(packed << shifts)[:, : blocks.latent_dim]
    row_signs = _signs(packed << (shifts + 1))[:, :order]
    matrix = hadamard_matrix(max(a, b), latent)
    columns = latent * column_signs * blocks.latent_dim**-0.5
    columns = torch.nn.functional.pad(columns, (0, order - blocks.latent_dim))
    mixed = columns.view(-1, a, b) @ matrix[:b, :b]
    mixed = matrix[:a, :a] @ mixed
    flat = (mixed.reshape(-1, order) * row_signs + shift).view(-1)
    offset = blocks.first * order
    return flat[blocks.start - offset : blocks.stop - offset]


def _signs(shifted: Tensor) -> Tensor:
    """Read the top bit of every byte as a sign: ``int8 [blocks, width]`` of -1 and 1."""
    return ((shifted >> 7) | 1).flatten(1)


def _kernel(blocks: _Blocks) -> Kernel:
    return Kernel(
        rows=lambda key, latent, shift, out: _tiled_rows(blocks, key, latent, shift, out),
        adjoint=lambda key, gradient: _tiled_adjoint(blocks, key, gradient),
        num_rows=blocks.stop - blocks.start,
    )


class _Scratch(NamedTuple):
    """The few cache-sized tensors that one pass over the tiles reuses."""

    x: Tensor  # [tile, order]
    y: Tensor  # [tile, order]
    bits: Tensor  # int8 [tile, pairs a byte, bytes]
    signs: Tensor  # int8 [tile, order], the bits as rows
    shifts: tuple[Tensor, Tensor]  # int8 [pairs a byte, 1], for the column and the row signs
    matrix: Tensor  # [larger factor, larger factor]


class _Stretch(NamedTuple):
    """Neighbouring wanted rows of one scale inside one tile."""

    inside: slice
    """The rows among the tile's."""
    outside: slice
    """The rows among the wanted."""
    scale: float


class _Tile(NamedTuple):
    """Some neighbouring blocks of the map."""

    packed: Tensor
    """Their random bytes, ``int8 [tile, 1, bytes]``."""
    stretches: list[_Stretch]
    """Their wanted rows."""


def _scratch(tile: int, order: int, like: Tensor) -> _Scratch:
    x, y = like.new_empty(2, tile, order)
    byte_shape = _PAIRS_A_BYTE, max(order, _PAIRS) // _PAIRS_A_BYTE
    bits = torch.empty(tile, *byte_shape, dtype=torch.int8, device=like.device)
    columns = _bit_shifts(like)
    matrix = hadamard_matrix(max(_factors(order)), like)
    return _Scratch(x, y, bits, bits.flatten(1)[:, :order], (columns, columns + 1), matrix)


def _tile_size(blocks: _Blocks) -> int:
    return min(max(1, _TILE_ROWS // blocks.order), blocks.last - blocks.first)


def _tiles(blocks: _Blocks, key: Tensor, like: Tensor) -> Iterator[tuple[_Tile, _Scratch]]:
    """Yield every tile of the map, with scratch of its size."""
    size = _tile_size(blocks)
    scratch = _scratch(size, blocks.order, like)
    for start in range(blocks.first, blocks.last, size * _TILES_A_DRAW):
        stop = min(start + size * _TILES_A_DRAW, blocks.last)
        for index, packed in enumerate(_sign_bytes(key, blocks, start, stop).split(size)):
            if len(packed) < size:
                scratch = _scratch(len(packed), blocks.order, like)
            yield _tile(blocks, start + index * size, packed), scratch


def _tile(blocks: _Blocks, first: int, packed: Tensor) -> _Tile:
    offset = first * blocks.order
    low, high = max(blocks.start, offset), min(blocks.stop, offset + len(packed) * blocks.order)
    stretches, start = [], blocks.start
    for count, scale in blocks.scales or ((blocks.stop - blocks.start, 1.0),):
        begin, end = max(low, start), min(high, start + count)
        start += count
        if begin < end:
            inside = slice(begin - offset, end - offset)
            outside = slice(begin - blocks.start, end - blocks.start)
            stretches.append(_Stretch(inside, outside, scale))
    return _Tile(packed, stretches)


def _tiled_rows(blocks: _Blocks, key: Tensor, latent: Tensor, shift: Tensor, out: Tensor) -> None:
    columns = latent.new_zeros(blocks.order)
    columns[: blocks.latent_dim] = latent * blocks.latent_dim**-0.5
    for tile, scratch in _tiles(blocks, key, latent):
        scratch.x.copy_(_read_signs(scratch, tile, 0)).mul_(columns)
        _mix(scratch)
        scratch.y.copy_(_read_signs(scratch, tile, 1))
        x, y = scratch.x.view(-1), scratch.y.view(-1)
        for inside, outside, scale in tile.stretches:
            added = shift if scale == 1.0 else shift * scale
            torch.addcmul(added, x[inside], y[inside], value=scale, out=out[outside])


def _tiled_adjoint(blocks: _Blocks, key: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    shift, zero = gradient.new_zeros(2)
    total = gradient.new_zeros(_tile_size(blocks), blocks.order)
    for tile, scratch in _tiles(blocks, key, gradient):
        scratch.x.copy_(_read_signs(scratch, tile, 1))
        flat = scratch.x.view(-1)
        flat[: tile.stretches[0].inside.start] = 0
        flat[tile.stretches[-1].inside.stop :] = 0
        for inside, outside, scale in tile.stretches:
            part, signs = gradient[outside], flat[inside]
            torch.addcmul(zero, signs, part, value=scale, out=signs)
            shift.add_(part.sum(), alpha=scale)
        _mix(scratch)
        scratch.y.copy_(_read_signs(scratch, tile, 0))
        total[: len(scratch.x)].addcmul_(scratch.x, scratch.y)
    return total.sum(0)[: blocks.latent_dim] * blocks.latent_dim**-0.5, shift


def _read_signs(scratch: _Scratch, tile: _Tile, which: int) -> Tensor:
    """Read the column (0) or row (1) signs of a tile into the scratch: ``int8 [tile, order]``."""
    torch.bitwise_left_shift(tile.packed, scratch.shifts[which], out=scratch.bits)
    scratch.bits.bitwise_right_shift_(7).bitwise_or_(1)
    return scratch.signs


def _mix(scratch: _Scratch) -> None:
    """Multiply every block of ``x`` by ``H`` in place."""
    x, y, matrix = scratch.x, scratch.y, scratch.matrix
    a, b = _factors(x.shape[1])
    if a == 1:
        torch.mm(x, matrix, out=y)
        x.copy_(y)
        return
    torch.mm(x.view(-1, b), matrix[:b, :b], out=y.view(-1, b))
    left = matrix[:a, :a].expand(len(x), a, a)
    torch.bmm(left, y.view(-1, a, b), out=x.view(-1, a, b))
