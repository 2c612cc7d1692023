"""The hashed map: each weight is one latent coordinate with a sign."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from mapfn import seeds
from mapfn.tiling import Kernel, tiled
from mapfn.types import MapBuffers

# Rows made at once, a multiple of the two rows in a word: index and sign are scratch.
_TILE_ROWS = 2**16


@dataclass(frozen=True)
class hashed:
    """``raw_i = s_i z_{h(i)}``: one signed latent coordinate a weight, in ``O(P)``.

    HashedNets (Chen et al. 2015) and Uni-LoRA (Li et al. 2025). Index and sign come from a key
    when needed, so nothing else is stored.

    >>> buffers = hashed().init(0, latent_dim=4, num_numbers=6)
    >>> hashed().generate(buffers, torch.ones(4), torch.zeros(()), 0, 6).abs()
    tensor([1., 1., 1., 1., 1., 1.])
    """

    linear: ClassVar[bool] = True

    def init(self, seed: int, latent_dim: int, num_numbers: int) -> MapBuffers:
        """Keep the key, ``int64 []``."""
        return {"key": seeds.key(seed)}

    def generate(
        self, buffers: MapBuffers, latent: Tensor, shift: Tensor, start: int, stop: int
    ) -> Tensor:
        """Return rows ``start .. stop`` of ``W latent + shift``."""
        if torch.compiler.is_compiling():
            index, sign = _coordinates(buffers["key"], latent.shape[-1], start, stop)
            return latent[index] * sign + shift
        rows, adjoint = partial(_rows, start, stop), partial(_adjoint, latent.shape[-1], start)
        return tiled(Kernel(rows, adjoint, (stop - start,)), buffers["key"], latent, shift)[0]

    def squared_norms(self, buffers: MapBuffers, like: Tensor, start: int, stop: int) -> Tensor:
        """Every row has norm 1."""
        return like.new_ones(stop - start)


def _coordinates(key: Tensor, latent_dim: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return the index ``int64`` and the sign ``int32`` of rows ``start .. stop``."""
    first, last = start // 2, -(-stop // 2)
    lanes = seeds.words(key, first, last - first).view(torch.int32)
    lanes = lanes[start - 2 * first : stop - 2 * first]
    # Multiply and shift maps 31 random bits onto 0 .. latent_dim without a modulo's bias.
    index = ((lanes & 0x7FFFFFFF).to(torch.int64) * latent_dim) >> 31
    return index, (lanes >> 31) | 1


def _tiles(start: int, stop: int) -> list[tuple[int, int]]:
    return [(low, min(low + _TILE_ROWS, stop)) for low in range(start, stop, _TILE_ROWS)]


def _rows(start: int, stop: int, key: Tensor, latent: Tensor, shift: Tensor, out: Tensor) -> None:
    for low, high in _tiles(start, stop):
        index, sign = _coordinates(key, latent.shape[-1], low, high)
        torch.addcmul(
            shift, latent[index], sign.to(latent.dtype), out=out[low - start : high - start]
        )


def _adjoint(
    latent_dim: int, start: int, key: Tensor, gradients: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    (gradient,) = gradients
    total = gradient.new_zeros(latent_dim)
    for low, high in _tiles(start, start + len(gradient)):
        index, sign = _coordinates(key, latent_dim, low, high)
        total.index_add_(0, index, gradient[low - start : high - start] * sign)
    return total, gradient.sum()
