"""No map at all: the leaf stays at its base."""

from dataclasses import dataclass

from torch import Tensor

from mapfn.types import MapBuffers


@dataclass(frozen=True)
class frozen:
    """Leaves that stay at their base: no latents, nothing trained, outside budgets.

    With ``base="auto"`` a frozen leaf keeps the target's own tensor, as ``base="target"`` does.

    >>> frozen()
    frozen()
    """

    def init(self, seed: int, latent_dim: int, num_numbers: int) -> MapBuffers:
        """Nothing is fixed."""
        return {}

    def generate(
        self, buffers: MapBuffers, latent: Tensor, shift: Tensor, start: int, stop: int
    ) -> Tensor:
        """Return zeros: the base alone is the leaf."""
        return shift.expand(stop - start)
