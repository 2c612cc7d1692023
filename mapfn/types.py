"""The library's language: aliases and protocols. No behaviour lives here."""

from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

Latents: TypeAlias = dict[str, Tensor]
"""The trained vectors by group: ``{group name: [latent_dim]}``."""

MapBuffers: TypeAlias = dict[str, Tensor]
"""The fixed numbers of one map."""

Buffers: TypeAlias = dict[str, MapBuffers]
"""The fixed numbers of every group: ``{group name: {buffer name: Tensor}}``."""

State: TypeAlias = dict[str, Tensor]
"""The target's own buffers by name."""


@runtime_checkable
class Mapper(Protocol):
    """A fixed map from a latent vector to flat numbers; a frozen dataclass with these two.

    A mapper may also have ``linear = True``, which promises that ``generate`` is exactly linear
    in ``(latent, shift)`` together, so that a leaf's scale can be applied to the latent instead of
    to the weights. See also :class:`ScalingMapper` and :class:`DeepMapper`.
    """

    def init(self, seed: int, latent_dim: int, num_numbers: int) -> MapBuffers:
        """Make the fixed numbers on the CPU; ``seed`` is a 64-bit int of this map alone."""
        ...

    def generate(
        self, buffers: MapBuffers, latent: Tensor, shift: Tensor, start: int, stop: int
    ) -> Tensor:
        """Return ``W[start:stop] @ latent + shift`` for ``latent [latent_dim]``, ``shift []``."""
        ...


Scales: TypeAlias = tuple[tuple[int, float], ...]
"""``(rows, scale)`` of the parts of some flat numbers, in turn."""


@runtime_checkable
class ScalingMapper(Protocol):
    """A mapper that can make all rows in one pass, cut into parts and scaled."""

    def generate_scaled(
        self, buffers: MapBuffers, latent: Tensor, shift: Tensor, scales: Scales
    ) -> tuple[Tensor, ...]:
        """Return ``scale * (W latent + shift)`` of each part, ``[rows]``, in turn."""
        ...


@runtime_checkable
class DeepMapper(Protocol):
    """A mapper of several layers; ``init`` and ``generate`` are those of one layer."""

    @property
    def hidden_dims(self) -> tuple[int, ...]:
        """Width of each hidden layer."""
        ...

    def activate(self, hidden: Tensor, raw: Tensor) -> Tensor:
        """Return the next hidden vector from a layer's input and its raw numbers."""
        ...


class Drive(NamedTuple):
    """What goes through a map: its numbers are ``W latent + shift + U inner``."""

    latent: Tensor
    """``float [latent_dim]``."""
    shift: Tensor
    """``float []``."""
    inner: Tensor
    """``float [rank]``; ``[0]`` where the modulation has no low-rank part."""
    left: Tensor
    """The key of ``U``, ``int64 []``, read only where ``inner`` is not empty."""

    def scaled(self, scale: float) -> "Drive":
        """Scale what comes out by scaling what goes in."""
        return Drive(self.latent * scale, self.shift * scale, self.inner * scale, self.left)


@runtime_checkable
class Modulation(Protocol):
    """How the latent changes its own map, in closed form: the matrix is never built."""

    def init(self, seed: int, latent_dim: int, num_numbers: int) -> MapBuffers:
        """Make the modulation's fixed numbers on the CPU."""
        ...

    def modulate(self, buffers: MapBuffers, latent: Tensor) -> Drive:
        """Return what to put through the unmodulated map."""
        ...


@runtime_checkable
class Decoder(Protocol):
    """How flat numbers become one leaf."""

    def num_numbers(self, shape: tuple[int, ...]) -> int:
        """Count the flat numbers that a leaf of this shape consumes."""
        ...

    def decode(self, numbers: Tensor, base: Tensor | float, scale: float) -> Tensor:
        """Return the leaf, flat, from its ``numbers [num_numbers]``."""
        ...
