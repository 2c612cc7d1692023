"""The fixed residual map: a deep map whose hidden vector is added to at every layer."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from mapfn import seeds, transform
from mapfn.types import MapBuffers, Scales

# 1 / std of tanh(x) for x ~ N(0, 1): hidden values keep unit variance from layer to layer.
_TANH_GAIN = 1.5925374


@dataclass(frozen=True)
class residual_mlp:
    """``h_{k+1} = (h_k + g tanh(W_k h_k)) / sqrt 2``, then ``raw = W_L h_L``.

    A layer that changes the width has no skip connection. Every layer is a signed
    Hadamard map modulated by its own input.

    >>> residual_mlp(hidden_dim=8, depth=2).hidden_dims
    (8, 8, 8)
    """

    linear: ClassVar[bool] = True

    hidden_dim: int = 256
    """Width of the hidden vector."""
    depth: int = 2
    """Residual layers behind the first."""

    def __post_init__(self) -> None:
        """Refuse a width or depth that is no positive int."""
        if any(type(size) is not int or size < 1 for size in (self.hidden_dim, self.depth)):
            raise ValueError(f"residual_mlp: expected ints >= 1, got {self!r}")

    @property
    def hidden_dims(self) -> tuple[int, ...]:
        """Width of each hidden layer."""
        return (self.hidden_dim,) * (self.depth + 1)

    def init(self, seed: int, latent_dim: int, num_numbers: int) -> MapBuffers:
        """Keep the key of one layer, ``int64 []``."""
        return {"key": seeds.key(seed)}

    def activate(self, hidden: Tensor, raw: Tensor) -> Tensor:
        """Return the next hidden vector from this layer's input and its raw numbers."""
        step = _TANH_GAIN * raw.tanh()
        return (hidden + step) * 0.5**0.5 if hidden.shape == raw.shape else step

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
