"""The fixed multilayer map: latent to hidden to weights."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mapfn import seeds, transform
from mapfn.types import MapBuffers, Scales

# 1 / std of tanh(x) for x ~ N(0, 1): hidden values keep unit variance from layer to layer.
_TANH_GAIN = 1.5925374


@dataclass(frozen=True)
class mlp:
    """``h_{k+1} = g tanh(W_k h_k)``, then ``raw = W_L h_L``; every layer a signed Hadamard map.

    Each layer is modulated by its own input (arXiv 2602.19134, section on deep maps), and ``g``
    keeps unit variance, so that the leaf scales hold as they do for one layer.

    >>> mlp((8, 16)).hidden_dims
    (8, 16)
    """

    linear: ClassVar[bool] = True

    hidden_dims: tuple[int, ...] = (256,)
    """Width of each hidden layer, at least one, each at least 1."""

    def __post_init__(self) -> None:
        """Refuse widths that are no positive ints; accept a list."""
        given = self.hidden_dims
        widths = tuple(given) if isinstance(given, list | tuple) else ()
        if not widths or any(type(width) is not int or width < 1 for width in widths):
            raise ValueError(f"mlp(hidden_dims=): expected a tuple of ints >= 1, got {given!r}")
        object.__setattr__(self, "hidden_dims", widths)

    def init(self, seed: int, latent_dim: int, num_numbers: int) -> MapBuffers:
        """Keep the key of one layer, ``int64 []``."""
        return {"key": seeds.key(seed)}

    def activate(self, hidden: Tensor, raw: Tensor) -> Tensor:
        """Return the next hidden vector from this layer's input and its raw numbers."""
        return _TANH_GAIN * raw.tanh()

    def generate(
        self, buffers: MapBuffers, latent: Tensor, shift: Tensor, start: int, stop: int
    ) -> Tensor:
        """Return rows ``start .. stop`` of one layer's ``W latent + shift``."""
        return transform.rows(buffers["key"], latent, shift, start, stop)

    def generate_scaled(
        self, buffers: MapBuffers, latent: Tensor, shift: Tensor, scales: Scales
    ) -> tuple[Tensor, ...]:
        """Return all rows, cut into scaled parts, in one pass."""
        return transform.scaled_rows(buffers["key"], latent, shift, scales)
