"""Scales and bases: the spread and the centre of torch's own initialisation, by module type.

With these a mapped network starts where the same network with its standard initialisation starts,
so that its first loss is the standard one.
"""

import math
from typing import NamedTuple

from torch import nn

_EMBEDDING_STD = 0.02
_NORM_STD = 0.1


class Initial(NamedTuple):
    """How torch itself would fill a leaf: standard deviation, mean, and the fan-in behind it."""

    std: float
    mean: float
    fan_in: int


def initial(owner: nn.Module | None, name: str, shape: tuple[int, ...]) -> Initial:
    """Look up how torch initialises the leaf ``name`` of ``owner``; by shape where unknown.

    Args:
        owner: the module that holds the leaf, None for a plain tree of tensors.
        name: the leaf's own name in its owner, ``weight`` for example.
        shape: the leaf's shape.

    >>> initial(nn.Linear(12, 3), "weight", (3, 12))
    Initial(std=0.16666666666666666, mean=0.0, fan_in=12)
    >>> initial(nn.LayerNorm(5), "weight", (5,))
    Initial(std=0.1, mean=1.0, fan_in=5)
    >>> initial(None, "scalar", ())
    Initial(std=0.5773502691896258, mean=0.0, fan_in=1)
    """
    fan_in = _fan_in(owner, name, shape)
    if _is_norm(owner, name, shape):
        return Initial(_NORM_STD, 0.0 if "bias" in name else 1.0, fan_in)
    if isinstance(owner, nn.PReLU):
        return Initial(_NORM_STD, owner.init if hasattr(owner, "init") else 0.25, fan_in)
    if isinstance(owner, nn.Embedding | nn.EmbeddingBag) or _is_transformers_linear(owner):
        return Initial(_EMBEDDING_STD, 0.0, fan_in)
    if isinstance(owner, nn.RNNBase | nn.RNNCellBase):
        return Initial(_uniform_std(owner.hidden_size), 0.0, fan_in)
    if isinstance(owner, nn.MultiheadAttention) and name.endswith("proj_weight"):
        return Initial(math.sqrt(2 / (shape[0] + shape[1])), 0.0, fan_in)
    return Initial(_uniform_std(fan_in), 0.0, fan_in)


def he(fan_in: int) -> float:
    """Return the standard deviation of He et al. (2015), ``sqrt(2 / fan_in)``.

    >>> he(8)
    0.5
    """
    return math.sqrt(2 / fan_in)


def _uniform_std(fan_in: int) -> float:
    """Return the spread of torch's default, uniform on ``±1 / sqrt(fan_in)``."""
    return 1 / math.sqrt(3 * fan_in)


def _is_norm(owner: nn.Module | None, name: str, shape: tuple[int, ...]) -> bool:
    """Recognise norm layers by class name, and the magnitude of weight_norm, old and new."""
    if name.endswith(("_g", "original0")):
        return True
    return len(shape) <= 1 and any("Norm" in cls.__name__ for cls in type(owner).__mro__)


def _is_transformers_linear(owner: nn.Module | None) -> bool:
    """Recognise HuggingFace's Conv1D, a transposed linear layer, without importing transformers."""
    return type(owner).__name__ == "Conv1D" and hasattr(owner, "nf")


def _fan_in(owner: nn.Module | None, name: str, shape: tuple[int, ...]) -> int:
    """Count the inputs of one output; a bias has the fan-in of the weight beside it."""
    if "bias" in name or isinstance(owner, nn.Bilinear):
        size = _input_size(owner)
        if size:
            return size
    return max(1, math.prod(shape[1:]) if len(shape) > 1 else math.prod(shape))


def _input_size(owner: nn.Module | None) -> int:
    """Count the inputs of one output of a layer with a bias, 0 where that is not known."""
    if isinstance(owner, nn.Linear):
        return int(owner.in_features)
    if isinstance(owner, nn.Bilinear):
        return int(owner.in1_features)
    if isinstance(owner, nn.modules.conv._ConvNd):
        channels = owner.out_channels if owner.transposed else owner.in_channels
        return int(channels // owner.groups * math.prod(owner.kernel_size))
    if isinstance(owner, nn.MultiheadAttention):
        return int(owner.embed_dim)
    return 0
