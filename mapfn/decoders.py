"""Decoders: how flat numbers become one leaf."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class full:
    """``theta = base + scale * numbers``: one number a weight.

    >>> import torch
    >>> full().decode(torch.ones(3), base=1.0, scale=0.5)
    tensor([1.5000, 1.5000, 1.5000])
    """

    def num_numbers(self, shape: tuple[int, ...]) -> int:
        """Count one number for every element of the leaf."""
        count = 1
        for size in shape:
            count *= size
        return count

    def decode(self, numbers: Tensor, base: Tensor | float, scale: float) -> Tensor:
        """Scale, then add the base; a scale of 1 and a base of 0 cost nothing."""
        scaled = numbers if scale == 1.0 else numbers * scale
        if isinstance(base, Tensor):
            return base.flatten() + scaled
        return scaled if base == 0.0 else scaled + base
