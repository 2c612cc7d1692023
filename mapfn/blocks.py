"""The signed Hadamard map: orthogonal rows for next to no memory and time.

Blocks of ``S_b H D_b / sqrt(d)``: ``H`` is the Sylvester-Hadamard matrix of order ``n``, the power
of two at or above ``d``, ``S_b`` and ``D_b`` are the random row and column signs of block ``b``.
All signs are bits of 64-bit words made from ``(key, index)`` when they are needed, so nothing is
stored but the key.

``H = H_b (x) H_a`` with ``a <= 32`` makes the product two small matrix products. Every block has
``a`` column signs of its own, repeated ``b`` times, on top of column signs that the ``512 / a``
blocks of a unit share. So ``H_b`` is applied once a unit, and what is left for a weight is a sum
of ``a`` terms, whatever ``d`` is. The price: rows of two blocks of one unit that agree in their
part of ``H_b`` have inner products of about ``a ** -0.5``, the others 0, where signs all drawn
afresh would spread ``d ** -0.5`` over all of them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mapfn import seeds
from mapfn.types import Scales

# Signs are read from runs of eight words: a run's bytes in turn, top bits first, then the next.
_RUN = 512
_RUN_WORDS = 8
# The lowest bit of each byte of a word; what makes it the byte of -1 once that bit is set again.
_LOWEST_BITS = 0x0101_0101_0101_0101
_SET_BYTE = 0xFE
# Index of the first word of each stream of one key: row signs, own column signs, shared ones.
_STREAMS = (0, 1 << 40, 1 << 41)
# The largest a: the work a weight.
_LARGEST_FACTOR = 32
# The largest matrix that is built: H_b of higher order is applied as a product of such.
_LARGEST_MATRIX = 64


class Blocks(NamedTuple):
    """Which blocks cover some rows of a map; from :func:`cover`."""

    latent_dim: int
    start: int
    """First wanted row."""
    stop: int
    """One past the last wanted row."""
    scales: Scales
    """``(rows, scale)`` of the parts that cover the wanted rows in turn."""
    order: int
    """Rows of a block: the power of two at or above the latent's size."""
    factors: tuple[int, int]
    """``(b, a)``: their product is the order."""
    unit: int
    """Rows of a unit; its blocks' own column signs are one run."""
    units: tuple[int, int]
    """First unit, and one past the last."""
    inside: slice
    """The blocks of a unit that are made: all, unless one unit has all wanted rows."""


def cover(latent_dim: int, start: int, stop: int, scales: Scales) -> Blocks:
    """Find the blocks that cover the rows ``start .. stop`` of a map.

    >>> cover(latent_dim=2048, start=0, stop=5000, scales=((5000, 1.0),)).inside
    slice(0, 3, None)
    """
    order = 1 << (latent_dim - 1).bit_length()
    a = min(order, _LARGEST_FACTOR)
    unit = _RUN * (order // a)
    first, last = start // unit, -(-stop // unit)
    inside = slice(0, unit // order)
    if last - first == 1:
        offset = first * unit
        inside = slice((start - offset) // order, -(-(stop - offset) // order))
    factors = order // a, a
    return Blocks(latent_dim, start, stop, scales, order, factors, unit, (first, last), inside)


class Draw(NamedTuple):
    """The random bits of some neighbouring units, drawn at once so that they take few operations.

    They are bits of three streams of words: row signs, own column signs, shared column signs.
    """

    words: Tensor
    """Of the row signs, ``int64 [units, words a unit]``."""
    own: Tensor
    """The column signs of each block that is made, ``int8 [units, blocks, 1, a]``."""
    shared: Tensor
    """The column signs that a unit's blocks share, ``int8 [units, b, a]``."""


def draw_units(blocks: Blocks, key: Tensor, first: int, last: int) -> Draw:
    """Draw the bits of units ``first .. last`` of the map with this key, ``int64 []``."""
    (b, a), units = blocks.factors, last - first
    runs = b, 1, -(-blocks.order // _RUN) if b > 1 else 0  # of a unit, in each stream
    starts = [
        stream + _RUN_WORDS * each * first for stream, each in zip(_STREAMS, runs, strict=True)
    ]
    counts = [_RUN_WORDS * each * units for each in runs]
    words = seeds.words_at(key, zip(starts, counts, strict=True))
    signs = read_signs(words[counts[0] :])
    shared = signs[units:].view(units, -1)[:, : blocks.order]
    return Draw(
        words=words[: counts[0]].view(units, -1),
        own=signs[:units].view(units, -1, 1, a)[:, blocks.inside],
        shared=shared.reshape(units, b, a) if b > 1 else shared,
    )


def read_signs(words: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the signs in some runs of words, ``int8 [runs, 512]``: a set bit is -1.

    Args:
        words: ``int64``, whole runs.
        out: scratch to make the signs in, ``int64 [runs, 8, words a run]``.
    """
    # Each bit of every byte in turn, top bit first, eight signs an operation. The cast of the
    # result, not of the words, also makes a compiled graph store the signs, where it would
    # otherwise find each one anew by division.
    shifts = torch.arange(7, -1, -1, device=words.device).view(8, 1)
    bits = torch.bitwise_right_shift(words.view(-1, 1, _RUN_WORDS), shifts, out=out)
    signs = bits.bitwise_and_(_LOWEST_BITS).mul_(_SET_BYTE).bitwise_or_(_LOWEST_BITS)
    return signs.view(torch.int8).flatten(1)


def laid_out(blocks: Blocks, latent: Tensor) -> Tensor:
    """Lay the latent out as ``[b, a]``, padded, so that every row of ``W`` gets norm 1."""
    padded = torch.nn.functional.pad(latent, (0, blocks.order - blocks.latent_dim))
    laid: Tensor = padded.view(*padded.shape[:-1], *blocks.factors) * blocks.latent_dim**-0.5
    return laid


def shared_columns(blocks: Blocks, draw: Draw, columns: Tensor, matrix: Tensor) -> Tensor:
    """Return ``H_b`` times a latent with a unit's signs, ``float [units or 1, 1, b, a]``."""
    if blocks.factors[0] == 1:
        return columns[None, None]
    return mix(columns * draw.shared, matrix).unsqueeze(1)


def mix(columns: Tensor, matrix: Tensor) -> Tensor:
    """Multiply ``[..., b, a]`` by ``H_b``, of whatever order, through a small Hadamard matrix.

    >>> columns = torch.eye(4)
    >>> small = hadamard_matrix(2, columns)
    >>> torch.equal(mix(columns, small), hadamard_matrix(4, columns))
    True
    """
    b, size = columns.shape[-2], len(matrix)
    if b <= size:
        return matrix[:b, :b] @ columns
    inner = matrix @ columns.reshape(*columns.shape[:-2], b // size, size, columns.shape[-1])
    return mix(inner.flatten(-2), matrix).reshape(columns.shape)


def small_matrix(blocks: Blocks, like: Tensor) -> Tensor:
    """Build the Hadamard matrix of which all larger ones are products, at most ``[64, 64]``."""
    return hadamard_matrix(min(blocks.order, _LARGEST_MATRIX), like)


def hadamard_matrix(order: int, like: Tensor) -> Tensor:
    """Build the Sylvester-Hadamard matrix ``[order, order]``: -1 where popcount(i & j) is odd."""
    index = torch.arange(order, device=like.device)
    places = torch.arange((order - 1).bit_length(), device=like.device)
    bits = ((index[:, None] >> places) & 1).to(like.dtype)
    return (bits @ bits.T).remainder_(2).mul_(-2).add_(1)
