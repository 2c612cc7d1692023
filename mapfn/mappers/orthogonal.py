"""The dense orthogonal map of arXiv 2602.19134, for small targets."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from mapfn import seeds
from mapfn.types import MapBuffers

# Random numbers drawn at once: scratch of a few per cent of a large matrix, and few operations.
_CHUNK, _MOST_CHUNKS = 2**20, 256


@dataclass(frozen=True)
class orthogonal:
    """A dense ``W [P, d]`` with orthogonal columns and rows of norm 1 on average.

    Stores ``4 P d`` bytes and reads them all at every step: exact, and only for small targets.
    Its last bits follow the machine's QR, unlike the integer-coded maps.

    >>> matrix = orthogonal().init(0, latent_dim=2, num_numbers=8)["matrix"]
    >>> torch.allclose(matrix.T @ matrix, 4 * torch.eye(2), atol=1e-6)
    True
    """

    linear: ClassVar[bool] = True

    def init(self, seed: int, latent_dim: int, num_numbers: int) -> MapBuffers:
        """Orthogonalise a portable random matrix in float64; ``{"matrix": float32 [P, d]}``."""
        key = seeds.key(seed)
        total = num_numbers * latent_dim
        entries = torch.empty(total, dtype=torch.float64)
        chunk = max(_CHUNK, -(-total // _MOST_CHUNKS))
        for start in range(0, total, chunk):
            stop = min(start + chunk, total)
            entries[start:stop] = seeds.uniform(key, stop - start, start)
        columns, _ = torch.linalg.qr(entries.view(num_numbers, latent_dim))
        return {"matrix": (columns * (num_numbers / latent_dim) ** 0.5).float()}

    def generate(
        self, buffers: MapBuffers, latent: Tensor, shift: Tensor, start: int, stop: int
    ) -> Tensor:
        """Return rows ``start .. stop`` of ``W latent + shift``."""
        return buffers["matrix"][start:stop].to(latent.dtype) @ latent + shift

    def squared_norms(self, buffers: MapBuffers, like: Tensor, start: int, stop: int) -> Tensor:
        """Sum the squares of each row."""
        return buffers["matrix"][start:stop].to(like.dtype).square().sum(1)
