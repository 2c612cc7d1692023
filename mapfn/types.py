"""The library's language: aliases and protocols. No behaviour lives here."""

from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

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

    def modulate(self, buffers: MapBuffers, latent: Tensor, vector: Tensor) -> Drive:
        """Return what to put through the fixed map, so that ``vector`` goes through the modulated.

        ``latent [latent_dim]`` modulates; the result is linear in ``vector [latent_dim]``, which
        is the same latent when weights are made.
        """
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


@runtime_checkable
class NormedMapper(Protocol):
    """A mapper that knows its rows, so that the smoothness of its weights has a closed form."""

    def squared_norms(self, buffers: MapBuffers, like: Tensor, start: int, stop: int) -> Tensor:
        """Return ``||w||^2`` of the rows ``start .. stop`` of ``W``, in the dtype of ``like``."""
        ...


class Moments(NamedTuple):
    """Sums over the rows of a group's fixed map that mapping losses need at every step."""

    row_mean: Tensor
    """Mean row of the last layer's ``W``, ``float [width]``."""
    left_mean: Tensor
    """Mean row of the low-rank factor ``U``, ``float [rank]``; ``[0]`` without one."""
    pull: Tensor
    """Sum of ``s^2 w`` over the rows, ``float [width]``; ``[0]`` where it is not needed."""
    energy: Tensor
    """Sum of ``s^2 ||w||^2`` over the rows, ``float []``."""
    spread: Tensor
    """Sum of ``s^2`` over the rows, ``float []``."""


class TrainState(NamedTuple):
    """All that a train step needs from the step before; a tree of tensors."""

    latents: Latents
    coefficients: dict[str, Tensor]
    """The trained coefficients of the mapping loss before softplus, by term; often empty."""
    buffers: Buffers
    moments: dict[str, Moments]
    """Fixed sums over the map by group; empty unless the loss needs them."""
    target_state: State
    optimizer_state: Any
    key: Tensor
    """Key of noise and probes, ``int64 []``, from the seed."""
    step: Tensor
    """Steps done, ``int64 []``."""


class StepInfo(NamedTuple):
    """What a human wants to see of a train step; tensors without a gradient, ``[]`` each."""

    loss: Tensor
    """Before the step, and averaged over its parts where a step accumulates."""
    aux: dict[str, Tensor]
    """Named components of the loss and what the loss function returned beside it."""
    gradient_norm: Tensor
    """Of all latents and coefficients together."""
    latent_norm: Tensor
    """Before the step."""
    update_ratio: Tensor
    """Norm of the update over the norm of what it updates."""
