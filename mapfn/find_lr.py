"""The learning-rate range test: one short training with a rate that grows at every step."""

import itertools
import math
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mapfn import optim
from mapfn.errors import message
from mapfn.loops import Loader, Step
from mapfn.types import TrainState

# Weight of the past in the smoothed loss, as usual for this test (Smith 2017).
_SMOOTHING = 0.9
# A smoothed loss so many times the least, whatever its sign, ends the test: it has diverged.
_DIVERGED = 4.0
# Before so many steps the average says more of single batches than of the rate: an easy batch
# followed by a hard one is no divergence, and the other way about no fast descent.
_MEMORY = 10


class RateCurve(NamedTuple):
    """What :func:`find_lr` returns."""

    rates: list[float]
    """The learning rate of each step."""
    losses: list[float]
    """The smoothed loss at each, before the step."""
    suggestion: float
    """The rate at which the loss falls fastest: a good peak for a one-cycle schedule."""

    def plot(self, path: str | Path) -> None:
        """Draw the curve to a file; needs ``matplotlib``."""
        from matplotlib.figure import Figure

        figure = Figure(layout="constrained")
        axes = figure.subplots()
        axes.semilogx(self.rates, self.losses)
        axes.axvline(self.suggestion, linestyle="--", label=f"suggestion {self.suggestion:.3g}")
        axes.set(xlabel="learning rate", ylabel="smoothed loss")
        axes.legend()
        figure.savefig(path)


def find_lr(
    step: Step,
    state: TrainState,
    loader: Loader,
    *,
    rates: tuple[float, float, int] = (1e-4, 3.0, 100),
) -> RateCurve:
    """Find a learning rate: train for a while with a rate that grows at every step.

    Nothing that exists is touched: a step is pure, and the random generators of Python, NumPy,
    torch and the loader are put back.

    Args:
        step: from :func:`~mapfn.train.make_step`, compiled or not, with whatever options it has;
            its optimizer is one of :mod:`mapfn.optim`. A schedule of its own multiplies the rate.
        state: where the test begins, ``init(seed=0)`` for one; it stays as it is.
        loader: the batches, used again from the start when they end; or a function of the epoch.
        rates: the lowest, the highest, and the number of steps between them, evenly in the log.

    Returns:
        :class:`RateCurve`; shorter than asked for where the loss diverged.

    Raises:
        ValueError: rates that do not grow, or fewer than 3 steps; no batches; an optimizer state
            without a learning rate.

    >>> from mapfn import make_spec
    >>> from mapfn.steps import make_step
    >>> target = torch.nn.Linear(3, 1)
    >>> spec = make_spec(target, latent_dim=2)
    >>> init, step = make_step(spec, target, torch.nn.functional.mse_loss, optim.adam(0.05))
    >>> batches = [(torch.ones(4, 3), torch.ones(4, 1))]
    >>> curve = find_lr(step, init(seed=0), batches, rates=(1e-3, 1.0, 20))
    >>> 1e-3 <= curve.suggestion <= 1.0
    True
    """
    low, high, num_steps = rates
    if not (0 < low < high and num_steps >= 3):
        expected, fix = "0 < lowest < highest and at least 3 steps", "pass (1e-4, 3.0, 100), say"
        got = repr(rates)
        raise ValueError(message("find_lr(rates=)", expected=expected, got=got, fix=fix))
    wanted = [low * (high / low) ** (index / (num_steps - 1)) for index in range(num_steps)]
    with _restored(loader):
        pairs = zip(wanted, _endless(loader), strict=False)
        smoothed = _smooth(_losses(state, step, pairs))
    if len(smoothed) < 3:
        got, fix = f"{len(smoothed)} before it diverged", "begin with a lower rate"
        raise ValueError(message("find_lr", expected="3 finite losses", got=got, fix=fix))
    return RateCurve(wanted[: len(smoothed)], smoothed, _steepest(wanted, smoothed))


def _losses(state: TrainState, step: Any, pairs: Iterable[tuple[float, Any]]) -> Iterator[float]:
    for rate, batch in pairs:
        at_rate = optim.with_learning_rate(state.optimizer_state, rate)
        state, info = step(state._replace(optimizer_state=at_rate), batch)
        yield float(info.loss.mean())


def _endless(loader: Loader) -> Iterator[Any]:
    for epoch in itertools.count():
        empty = True
        for batch in loader(epoch) if callable(loader) else loader:
            empty = False
            yield batch
        if empty:
            fix = "pass a list, a DataLoader or a function of the epoch"
            raise ValueError(message("find_lr(loader)", expected="batches", got="none", fix=fix))


@contextmanager
def _restored(loader: Any) -> Iterator[None]:
    """Put back the global random generators, and those of a loader and of its samplers."""
    holders = [loader, *(getattr(loader, name, None) for name in ("sampler", "batch_sampler"))]
    holders += [getattr(holder, "sampler", None) for holder in holders[1:]]
    found = {id(own): own for own in (getattr(holder, "generator", None) for holder in holders)}
    generators = [own for own in found.values() if isinstance(own, torch.Generator)]
    before = [own.get_state() for own in generators]
    python, numpy = random.getstate(), sys.modules.get("numpy")
    drawn = numpy.random.get_state() if numpy else None
    try:
        with torch.random.fork_rng():
            yield
    finally:
        for own, state in zip(generators, before, strict=True):
            own.set_state(state)
        random.setstate(python)
        if numpy:
            numpy.random.set_state(drawn)


def _smooth(losses: Iterable[float]) -> list[float]:
    """Average the losses exponentially, up to where they diverge."""
    smoothed: list[float] = []
    average = 0.0
    for index, loss in enumerate(losses, start=1):
        average = _SMOOTHING * average + (1 - _SMOOTHING) * loss
        value = average / (1 - _SMOOTHING**index)
        least = min(smoothed, default=value)
        diverged = index > _MEMORY and value - least > (_DIVERGED - 1) * abs(least)
        if diverged or not math.isfinite(value):
            break
        smoothed.append(value)
    return smoothed


def _steepest(rates: list[float], losses: list[float]) -> float:
    """Return the rate at which the loss falls fastest over the logarithm of the rate."""
    begin = min(_MEMORY, len(losses) - 3)
    (slope,) = torch.gradient(torch.tensor(losses[begin:], dtype=torch.float64))
    return rates[begin + int(slope.argmin())]
