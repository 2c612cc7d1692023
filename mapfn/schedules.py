"""Schedules: learning rates that follow the step, in tensor arithmetic that recompiles nothing."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mapfn.errors import message


class Schedule(NamedTuple):
    """A learning rate that follows the step: ``peak * factor(step)``."""

    peak: float
    factor: Callable[[Tensor], Tensor]
    """From the number of steps done, ``int64 []``, to ``float64 []``."""


def constant(value: float) -> Schedule:
    """Hold the learning rate.

    >>> constant(0.1).factor(torch.tensor(7))
    tensor(1., dtype=torch.float64)
    """
    return Schedule(
        check_number("constant(value)", value), lambda step: torch.ones_like(step).double()
    )


def one_cycle(
    peak: float,
    num_steps: int,
    *,
    warmup: float = 0.3,
    start_divisor: float = 25.0,
    end_divisor: float = 1e4,
) -> Schedule:
    """Rise to the peak along a cosine, then fall to almost nothing (Smith and Topin 2018).

    Equal to ``torch.optim.lr_scheduler.OneCycleLR`` with its defaults; stays at its end after
    ``num_steps``.

    Args:
        peak: the largest rate.
        num_steps: updates in all.
        warmup: the part of them that rises.
        start_divisor: peak over the first rate.
        end_divisor: first rate over the last.

    Raises:
        ValueError: a peak or divisor that is not positive, fewer than 2 steps, a warmup that leaves
            no step on one side of the peak.

    >>> rates = one_cycle(1.0, 100).factor(torch.tensor([0, 29, 99]))
    >>> [round(float(rate), 4) for rate in rates]
    [0.04, 1.0, 0.0]
    """
    check_number("one_cycle(peak)", peak)
    _check_steps("one_cycle(num_steps)", num_steps)
    check_number("one_cycle(start_divisor=)", start_divisor)
    check_number("one_cycle(end_divisor=)", end_divisor)
    top = warmup * num_steps - 1
    if not 0 < top < num_steps - 1:
        fix, where = "pass 0.3, say, or more steps", "one_cycle(warmup=)"
        expected = "a peak between the first and the last step"
        raise ValueError(message(where, expected=expected, got=repr(warmup), fix=fix))
    first, last = 1 / start_divisor, 1 / (start_divisor * end_divisor)

    def factor(step: Tensor) -> Tensor:
        at = step.double()
        rising = _cosine(first, 1.0, at / top)
        falling = _cosine(1.0, last, (at - top) / (num_steps - 1 - top))
        return torch.where(at <= top, rising, falling)

    return Schedule(peak, factor)


def cosine(peak: float, num_steps: int, *, floor: float = 0.0) -> Schedule:
    """Fall from the peak to the floor along half a cosine (Loshchilov and Hutter 2017).

    Equal to ``torch.optim.lr_scheduler.CosineAnnealingLR``; stays at the floor after
    ``num_steps``.

    Args:
        peak: the first rate.
        num_steps: updates in all.
        floor: the last rate.

    Raises:
        ValueError: a peak that is not positive, fewer than 2 steps, a floor above the peak.

    >>> cosine(2.0, 10).factor(torch.tensor(5))
    tensor(0.5000, dtype=torch.float64)
    """
    check_number("cosine(peak)", peak)
    _check_steps("cosine(num_steps)", num_steps)
    if not 0 <= floor <= peak:
        expected, fix = f"a rate from 0 to the peak, {peak!r}", "pass a smaller floor"
        raise ValueError(message("cosine(floor=)", expected=expected, got=repr(floor), fix=fix))
    return Schedule(peak, lambda step: _cosine(1.0, floor / peak, step.double() / num_steps))


def _cosine(start: float, end: float, part: Tensor) -> Tensor:
    return end + (start - end) / 2 * (1 + torch.cos(math.pi * part.clamp(0, 1)))


def check_number(where: str, value: object, *, least: float | None = None) -> float:
    """Return a number that is finite and above 0, or from ``least`` on.

    Raises:
        ValueError: it is not.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        enough = value > 0 or (least is not None and value >= least)
        if enough and math.isfinite(value):
            return value
    expected = "a number above 0" if least is None else f"a number of at least {least}"
    raise ValueError(message(where, expected=expected, got=repr(value), fix="pass a float"))


def _check_steps(where: str, num_steps: object) -> None:
    if type(num_steps) is not int or num_steps < 2:
        fix = "pass the number of updates of the whole training"
        raise ValueError(message(where, expected="an int >= 2", got=repr(num_steps), fix=fix))
