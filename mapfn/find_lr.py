"""The learning-rate range test: one short training with a rate that grows at every step."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mapfn import optim
from mapfn.errors import message
from mapfn.loops import Loader
from mapfn.optim import Optimizer
from mapfn.spec import Spec
from mapfn.steps import make_step
from mapfn.types import TrainState

# Weight of the past in the smoothed loss, as usual for this test (Smith 2017).
_SMOOTHING = 0.9
# A smoothed loss of so many times the least ends the test: it has diverged.
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
    spec: Spec,
    target: Any,
    loss_fn: Any,
    loader: Loader,
    *,
    optimizer: Callable[[float], Optimizer] = optim.adam,
    rates: tuple[float, float, int] = (1e-4, 3.0, 100),
) -> RateCurve:
    """Find a learning rate: train for a while with a rate that grows at every step.

    Nothing that exists is touched: the test trains latents of its own, from seed 0, and leaves
    torch's random generators and that of the loader as they were.

    Args:
        spec: from :func:`~mapfn.make_spec`.
        target: as :func:`~mapfn.train.make_step` takes it.
        loss_fn: as :func:`~mapfn.train.make_step` takes it.
        loader: the batches, used again from the start when they end; or a function of the epoch.
        optimizer: makes the optimizer from a learning rate.
        rates: the lowest, the highest, and the number of steps between them, evenly in the log.

    Returns:
        :class:`RateCurve`; shorter than asked for where the loss diverged.

    Raises:
        ValueError: rates that do not grow, or fewer than 3 steps; no batches.

    >>> from mapfn import make_spec
    >>> target = torch.nn.Linear(3, 1)
    >>> spec = make_spec(target, latent_dim=2)
    >>> batches = [(torch.ones(4, 3), torch.ones(4, 1))]
    >>> curve = find_lr(spec, target, torch.nn.functional.mse_loss, batches, rates=(1e-3, 1.0, 20))
    >>> 1e-3 <= curve.suggestion <= 1.0
    True
    """
    low, high, num_steps = rates
    if not (0 < low < high and num_steps >= 3):
        expected, fix = "0 < lowest < highest and at least 3 steps", "pass (1e-4, 3.0, 100), say"
        got = repr(rates)
        raise ValueError(message("find_lr(rates=)", expected=expected, got=got, fix=fix))
    init, step = make_step(spec, target, loss_fn, optimizer(low))
    wanted = [low * (high / low) ** (index / (num_steps - 1)) for index in range(num_steps)]
    with _restored(loader), torch.random.fork_rng():
        pairs = zip(wanted, _endless(loader), strict=False)
        smoothed = _smooth(_losses(init(seed=0), step, pairs))
    if len(smoothed) < 3:
        got, fix = f"{len(smoothed)} before it diverged", "begin with a lower rate"
        raise ValueError(message("find_lr", expected="3 finite losses", got=got, fix=fix))
    return RateCurve(wanted[: len(smoothed)], smoothed, _steepest(wanted, smoothed))


def _losses(state: TrainState, step: Any, pairs: Iterable[tuple[float, Any]]) -> Iterator[float]:
    for rate, batch in pairs:
        at_rate = optim.with_learning_rate(state.optimizer_state, rate)
        state, info = step(state._replace(optimizer_state=at_rate), batch)
        yield float(info.loss)


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
    """Leave the generator of a loader, or of its sampler, as it was."""
    holders = loader, getattr(loader, "sampler", None)
    found = [getattr(holder, "generator", None) for holder in holders]
    generators = [own for own in found if isinstance(own, torch.Generator)]
    before = [own.get_state() for own in generators]
    try:
        yield
    finally:
        for own, state in zip(generators, before, strict=True):
            own.set_state(state)


def _smooth(losses: Iterable[float]) -> list[float]:
    """Average the losses exponentially, up to where they diverge."""
    smoothed: list[float] = []
    average = 0.0
    for index, loss in enumerate(losses, start=1):
        average = _SMOOTHING * average + (1 - _SMOOTHING) * loss
        value = average / (1 - _SMOOTHING**index)
        diverged = index > _MEMORY and value > _DIVERGED * min(smoothed)
        if diverged or not math.isfinite(value):
            break
        smoothed.append(value)
    return smoothed


def _steepest(rates: list[float], losses: list[float]) -> float:
    """Return the rate at which the loss falls fastest over the logarithm of the rate."""
    begin = min(_MEMORY, len(losses) - 3)
    (slope,) = torch.gradient(torch.tensor(losses[begin:], dtype=torch.float64))
    return rates[begin + int(slope.argmin())]
