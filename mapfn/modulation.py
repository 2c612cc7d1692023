"""Modulations: how the latent changes its own map, in closed form.

Each turns the latent into a :class:`~mapfn.types.Drive`, what the unmodulated map has to be fed
with to give the modulated one's numbers. The modulated matrix is never built: the additive term of
arXiv 2602.19134, ``(W' + alpha 1 z'^T) z'``, is one dot product.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mapfn import seeds, transform
from mapfn.errors import message
from mapfn.types import Drive, MapBuffers


def plain(latent: Tensor) -> Drive:
    """Drive a map without any modulation."""
    key = torch.zeros((), dtype=torch.int64, device=latent.device)
    return Drive(latent, latent.new_zeros(()), latent.new_zeros(0), key)


def _check_numbers(part: Any, *values: Any) -> None:
    """Refuse, by name of the class, values that are no finite numbers."""
    wrong = [v for v in values if type(v) not in (int, float) or not math.isfinite(v)]
    if wrong:
        where, fix = type(part).__name__, "pass a strength like 0.01"
        raise ValueError(message(where, expected="finite numbers", got=repr(wrong[0]), fix=fix))


@dataclass(frozen=True)
class additive:
    """``W z + alpha z.z / d``: the additive modulation of arXiv 2602.19134.

    >>> float(additive(0.5).modulate({}, torch.ones(4), torch.ones(4)).shift)
    0.5
    """

    alpha: float = 0.01
    """Strength; at ``z ~ N(0, 1)`` every number moves by about ``alpha``."""

    def __post_init__(self) -> None:
        """Refuse what is no finite number."""
        _check_numbers(self, self.alpha)

    def init(self, seed: int, latent_dim: int, num_numbers: int) -> MapBuffers:
        """Nothing is fixed."""
        return {}

    def modulate(self, buffers: MapBuffers, latent: Tensor, vector: Tensor) -> Drive:
        """Shift every number by ``alpha z.z / d``."""
        energy = latent.dot(vector) / latent.shape[-1]
        return plain(vector)._replace(shift=self.alpha * energy)


@dataclass(frozen=True)
class affine:
    """``W ((1 + scale tanh z) * z) + shift z.z / d``: a column-wise gain and a shift.

    >>> float(affine(0.0, 2.0).modulate({}, torch.ones(4), torch.ones(4)).shift)
    2.0
    """

    scale: float = 0.01
    """Strength of the gain on each latent coordinate."""
    shift: float = 0.01
    """Strength of the additive term."""

    def __post_init__(self) -> None:
        """Refuse what is no finite number."""
        _check_numbers(self, self.scale, self.shift)

    def init(self, seed: int, latent_dim: int, num_numbers: int) -> MapBuffers:
        """Nothing is fixed."""
        return {}

    def modulate(self, buffers: MapBuffers, latent: Tensor, vector: Tensor) -> Drive:
        """Gain on the latent, shift on the numbers."""
        energy = latent.dot(vector) / latent.shape[-1]
        gained = vector * (1 + self.scale * latent.tanh())
        return plain(gained)._replace(shift=self.shift * energy)


@dataclass(frozen=True)
class modulate_low_rank:
    """``(W + (alpha / rank) U diag(Q z) V) z`` with fixed signed Hadamard maps U, Q, V.

    >>> buffers = modulate_low_rank(rank=2).init(0, latent_dim=4, num_numbers=10)
    >>> modulate_low_rank(rank=2).modulate(buffers, torch.ones(4), torch.ones(4)).inner.shape
    torch.Size([2])
    """

    rank: int = 4
    """Rows of Q and V, columns of U; at least 1."""
    alpha: float = 0.01
    """Strength of the term."""

    def __post_init__(self) -> None:
        """Refuse a rank that is no positive int, a strength that is no finite number."""
        _check_numbers(self, self.alpha)
        if type(self.rank) is not int or self.rank < 1:
            raise ValueError(f"modulate_low_rank(rank=): expected an int >= 1, got {self.rank!r}")

    def init(self, seed: int, latent_dim: int, num_numbers: int) -> MapBuffers:
        """Make the keys of the three maps."""
        names = ("left", "gate", "right")
        return {name: seeds.key(seeds.derive(seed, name)) for name in names}

    def modulate(self, buffers: MapBuffers, latent: Tensor, vector: Tensor) -> Drive:
        """Compute ``(alpha / rank) Q z * V z``, which U spreads over the numbers."""
        drive = plain(vector)
        gate = transform.rows(buffers["gate"], latent, drive.shift, 0, self.rank)
        right = transform.rows(buffers["right"], vector, drive.shift, 0, self.rank)
        return drive._replace(inner=(self.alpha / self.rank) * gate * right, left=buffers["left"])
