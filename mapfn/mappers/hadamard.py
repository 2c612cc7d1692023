"""The signed Hadamard map, the default: orthogonal, nothing stored, flat cost in the latents."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mapfn import seeds, transform
from mapfn.types import MapBuffers, Scales


@dataclass(frozen=True)
class hadamard:
    """Blocks of ``S_b H D_b / sqrt(d)``: random signs around a Sylvester-Hadamard matrix.

    Every row has norm exactly 1 and the columns of each full block are orthogonal. The signs are
    made from a 64-bit key when needed, so the map stores 8 bytes whatever its size; a
    number takes little more than 32 products. See :mod:`mapfn.blocks`.

    >>> import torch
    >>> buffers = hadamard().init(0, latent_dim=4, num_numbers=10)
    >>> hadamard().generate(buffers, torch.ones(4), torch.zeros(()), 0, 10).shape
    torch.Size([10])
    """

    linear: ClassVar[bool] = True

    def init(self, seed: int, latent_dim: int, num_numbers: int) -> MapBuffers:
        """Keep the key, ``int64 []``."""
        return {"key": seeds.key(seed)}

    def generate(
        self, buffers: MapBuffers, latent: Tensor, shift: Tensor, start: int, stop: int
    ) -> Tensor:
        """Return rows ``start .. stop`` of ``W latent + shift``."""
        return transform.rows(buffers["key"], latent, shift, start, stop)

    def generate_scaled(
        self, buffers: MapBuffers, latent: Tensor, shift: Tensor, scales: Scales
    ) -> tuple[Tensor, ...]:
        """Return all rows, cut into scaled parts, in one pass."""
        return transform.scaled_rows(buffers["key"], latent, shift, scales)

    def squared_norms(self, buffers: MapBuffers, like: Tensor, start: int, stop: int) -> Tensor:
        """Every row has norm 1."""
        return like.new_ones(stop - start)
