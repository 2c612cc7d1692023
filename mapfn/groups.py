"""Groups: leaves that share one latent vector, and what is fixed about their map."""

import itertools
from dataclasses import dataclass, field
from functools import cached_property

import torch

from mapfn import plan, seeds
from mapfn.decoders import full
from mapfn.layout import Leaf
from mapfn.types import (
    Decoder,
    DeepMapper,
    MapBuffers,
    Mapper,
    Modulation,
    NormedMapper,
    Scales,
    ScalingMapper,
)

# Prefixes of names in a group's buffers.
BASE = "base."
LAYER = "layer"
MODULATION = "modulation."


@dataclass(frozen=True)
class Group:
    """Leaves that share one latent vector, and the map that makes them.

    >>> from mapfn import make_spec
    >>> group = make_spec(torch.nn.Linear(4, 2), latent_dim=3).groups[0]
    >>> group.name, group.latent_dim, group.num_numbers
    ('(root)', 3, 10)
    """

    name: str
    leaves: tuple[Leaf, ...]
    latent_dim: int
    """Trained numbers: what was asked for, and never more than the group has numbers."""
    requested_dim: int
    """Trained numbers that were asked for."""
    mapper: Mapper
    modulation: Modulation | None
    activation: str
    decoder: Decoder
    scales: tuple[float, ...]
    """Spread of each leaf around its base."""
    bases: tuple[float | str, ...]
    """Centre of each leaf: a number, or ``"init"`` or ``"target"`` for a tensor."""
    num_numbers: int = field(init=False, repr=False, compare=False)
    """Flat numbers of all leaves."""
    segments: tuple[plan.Segment, ...] = field(init=False, repr=False, compare=False)
    """The stretches of the flat numbers that are made together."""
    deep: DeepMapper | None = field(init=False, repr=False, compare=False)
    """The mapper, where it has hidden layers."""
    scaling: ScalingMapper | None = field(init=False, repr=False, compare=False)
    """The mapper, where it can make and scale all numbers in one pass."""
    normed: NormedMapper | None = field(init=False, repr=False, compare=False)
    """The mapper, where it has one layer and knows the norms of its rows."""

    def __post_init__(self) -> None:
        """Derive the plan once, eagerly: traced code only reads it."""
        counts = [self.decoder.num_numbers(leaf.shape) for leaf in self.leaves]
        columns = zip(self.leaves, counts, self.scales, self.bases, strict=True)
        pieces = [plan.Piece(*column) for column in columns]
        found = plan.segments(pieces, mergeable=isinstance(self.decoder, full))
        object.__setattr__(self, "num_numbers", sum(counts))
        object.__setattr__(self, "segments", found)
        deep = self.mapper if isinstance(self.mapper, DeepMapper) else None
        object.__setattr__(self, "deep", deep)
        normed = isinstance(self.mapper, NormedMapper) and deep is None
        object.__setattr__(self, "normed", self.mapper if normed else None)
        scales = self.foldable and isinstance(self.mapper, ScalingMapper)
        object.__setattr__(self, "scaling", self.mapper if scales else None)

    @property
    def foldable(self) -> bool:
        """Say whether a leaf's scale may be applied to the latent instead."""
        linear = getattr(self.mapper, "linear", False) and self.activation == "identity"
        return linear and isinstance(self.decoder, full)

    @property
    def leaf_scales(self) -> Scales:
        """List (numbers, scale) of each leaf, in turn."""
        return tuple(zip((leaf.numel for leaf in self.leaves), self.scales, strict=True))

    @property
    def layer_dims(self) -> tuple[tuple[int, int], ...]:
        """List (inputs, outputs) of each layer of the map; one layer unless it is a deep map."""
        hidden = self.deep.hidden_dims if self.deep else ()
        widths = (self.latent_dim, *hidden, self.num_numbers)
        return tuple(itertools.pairwise(widths))

    @cached_property
    def buffer_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name the buffers of the group, with their shapes."""
        bases = zip(self.leaves, self.bases, strict=True)
        tensors = {BASE + leaf.name: leaf.shape for leaf, base in bases if isinstance(base, str)}
        return {name: tuple(blank.shape) for name, blank in self._fixed.items()} | tensors

    @cached_property
    def integer_buffers(self) -> frozenset[str]:
        """Name the buffers that hold bits, not numbers: a cast would destroy them."""
        return frozenset(
            name for name, blank in self._fixed.items() if not blank.is_floating_point()
        )

    @cached_property
    def stored_bytes(self) -> int:
        """Count the bytes of the map's fixed numbers; bases are not the map's."""
        return sum(blank.numel() * blank.element_size() for blank in self._fixed.values())

    @cached_property
    def _fixed(self) -> MapBuffers:
        """Know shapes and dtypes of the fixed numbers, by making them on ``meta``."""
        with torch.device("meta"):
            return fixed_numbers(self, 0)


def fixed_numbers(group: Group, seed: int) -> MapBuffers:
    """Make the fixed numbers of a group's map, without its bases."""
    numbers: MapBuffers = {}
    for layer, (inputs, outputs) in enumerate(group.layer_dims):
        layer_seed = seeds.derive(seed, group.name, f"layer{layer}")
        own = group.mapper.init(layer_seed, inputs, outputs)
        numbers |= {f"{LAYER}{layer}.{name}": tensor for name, tensor in own.items()}
        if group.modulation is not None:
            fixed = group.modulation.init(seeds.derive(layer_seed, "modulation"), inputs, outputs)
            prefix = f"{LAYER}{layer}.{MODULATION}"
            numbers |= {prefix + name: tensor for name, tensor in fixed.items()}
    return numbers
