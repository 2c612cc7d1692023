"""The identity map: the leaf is trained directly."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mapfn.types import MapBuffers


@dataclass(frozen=True)
class identity:
    """``raw = z``: one latent a number, for leaves that are better trained directly.

    Such a group stands outside budgets and has no modulation. Its leaves are still
    ``base + scale * z``, so the learning rate that suits the mapped groups suits it too.

    >>> import torch
    >>> identity().generate({}, torch.arange(4.0), torch.zeros(()), 1, 3)
    tensor([1., 2.])
    """

    linear: ClassVar[bool] = True

    def init(self, seed: int, latent_dim: int, num_numbers: int) -> MapBuffers:
        """Nothing is fixed."""
        return {}

    def generate(
        self, buffers: MapBuffers, latent: Tensor, shift: Tensor, start: int, stop: int
    ) -> Tensor:
        """Return the latent's own coordinates, shifted."""
        return latent[start:stop] + shift
