"""Loops over batches and epochs, for those who do not want to write theirs.

Nothing here knows how a step works: ``step(state, batch) -> (state, info)`` is all it takes, made
by ``make_step`` or ``make_ensemble``, compiled or not, or written by hand.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple, SupportsIndex, TypeAlias

import torch
from torch import Tensor

from mapfn.errors import Interrupted, NonFiniteError, listing, message
from mapfn.types import StepInfo, TrainState

Step: TypeAlias = Callable[[TrainState, Any], tuple[TrainState, StepInfo]]
Loader: TypeAlias = Iterable[Any] | Callable[[int], Iterable[Any]]
"""Batches, the same iterable for every epoch; or a function from the epoch to them."""
Metrics: TypeAlias = dict[str, float]


class Event(NamedTuple):
    """What a callback is told, after every step and after every epoch."""

    epoch: int
    position: int
    """Of the step in its epoch, from 0."""
    state: TrainState
    """After the step."""
    info: StepInfo
    """Of the step."""
    history: list[Metrics]
    """One row an epoch that is over."""
    epoch_over: bool
    """Whether the epoch is over and has its row; False after a step."""


Callback: TypeAlias = Callable[[Event], str | None]
"""A plain function; a sentence that it returns ends the training and is its reason."""


class Fit(NamedTuple):
    """What :func:`fit` returns."""

    state: TrainState
    """The last good state."""
    history: list[Metrics]
    """One row an epoch: ``epoch``, ``seconds``, the means over its steps, and what ``validate``
    returned, as ``val_<name>``."""
    stopped: str
    """Why it ended before the last epoch; empty where it did not."""


def fit_epoch(step: Step, state: TrainState, loader: Iterable[Any]) -> tuple[TrainState, Metrics]:
    """Take one step a batch.

    Args:
        step: from :func:`~mapfn.train.make_step`, compiled or not.
        state: where to begin.
        loader: the batches.

    Returns:
        The state after the last batch, and means over the steps: ``loss``, the named parts of the
        loss, ``gradient_norm``, ``latent_norm`` and ``update_ratio``; of an ensemble, over the
        members that are finite too.

    Raises:
        NonFiniteError: a loss, gradient or update that is NaN or infinite, in every member of an
            ensemble; its ``state`` is the last good one, whose loss was still seen to be finite.
        ValueError: no batches.
        Interrupted: the KeyboardInterrupt, whose ``state`` is that after the last whole step.

    >>> from mapfn import make_spec, optim
    >>> from mapfn.steps import make_step
    >>> target = torch.nn.Linear(3, 1)
    >>> spec = make_spec(target, latent_dim=2)
    >>> init, step = make_step(spec, target, torch.nn.functional.mse_loss, optim.adam(0.05))
    >>> batches = [(torch.ones(4, 3), torch.ones(4, 1))] * 10
    >>> state, metrics = fit_epoch(step, init(seed=0), batches)
    >>> int(state.step), list(metrics)
    (10, ['loss', 'gradient_norm', 'latent_norm', 'update_ratio'])
    """
    infos = []
    try:
        for after, info in _steps(step, state, loader):
            state = after
            infos.append(info)
    except KeyboardInterrupt as error:
        raise Interrupted(_interruption(state), state) from error
    return state, _means(infos)


def _interruption(state: TrainState) -> str:
    return f"interrupted after step {int(state.step.flatten()[0])}"


def _steps(
    step: Step, state: TrainState, loader: Iterable[Any]
) -> Iterator[tuple[TrainState, StepInfo]]:
    good = state
    for batch in loader:
        after, info = step(state, batch)
        _check_finite(good, state, info)
        good, state = state, after
        yield state, info


def _check_finite(good: TrainState, before: TrainState, info: StepInfo) -> None:
    # An update that overflows shows in its ratio before it does in a loss.
    finite = info.loss.isfinite() & info.gradient_norm.isfinite() & info.update_ratio.isfinite()
    if bool(finite.any()):
        return
    at = int(before.step.flatten()[0])
    got = f"loss {_number(info.loss)} and gradient norm {_number(info.gradient_norm)}"
    got += f", update ratio {_number(info.update_ratio)}"
    fix = "lower the learning rate, clip the gradient, or look at this batch; the last good state"
    fix += " is in the error's state"
    text = message(f"step {at}", expected="a finite loss and gradient", got=got, fix=fix)
    raise NonFiniteError(text, good)


def _number(value: Tensor) -> str:
    return ", ".join(f"{number:.4g}" for number in value.flatten().tolist())


def _means(infos: list[StepInfo]) -> Metrics:
    if not infos:
        fix = "pass a list, a DataLoader or a function of the epoch; an iterator is used up by one"
        raise ValueError(message("loader", expected="batches", got="none", fix=fix))
    rows = [_numbers(info) for info in infos]
    return {
        name: torch.stack([row[name].double() for row in rows]).nanmean().item() for name in rows[0]
    }


def _numbers(info: StepInfo) -> dict[str, Tensor]:
    """Name the numbers of a step; of aux those that are one a member."""
    own = {name: value for name, value in info._asdict().items() if name != "aux"}
    named = {name: value for name, value in info.aux.items() if value.shape == info.loss.shape}
    if taken := sorted(named.keys() & {*own, "epoch", "seconds"}):
        got, fix = listing(taken), "give those of the loss function's aux other names"
        raise ValueError(message("fit: aux", expected="names of its own", got=got, fix=fix))
    rows = {"loss": own.pop("loss")} | named | own
    # A member that is lost must not hide the others.
    return {name: torch.where(row.isfinite(), row, torch.nan) for name, row in rows.items()}


def fit(
    step: Step,
    state: TrainState,
    loader: Loader,
    *,
    epochs: int | Iterable[int],
    validate: Callable[[TrainState], Metrics] | None = None,
    callbacks: Sequence[Callback | AbstractContextManager[Callback]] = (),
) -> Fit:
    """Train for some epochs; whatever ends it, the last good state comes back.

    Args:
        step: from :func:`~mapfn.train.make_step`, compiled or not.
        state: where to begin.
        loader: the batches of every epoch, a ``DistributedSampler`` told the epoch; or a function
            from the epoch to its batches, :func:`~mapfn.train.batches` for one.
        epochs: how many; or which, ``range(3, 10)``, to go on after the first three with the very
            batches that an uninterrupted run would have.
        validate: ``state -> {name: number}``, after each epoch, for the history, as ``val_name``.
        callbacks: functions of an :class:`Event`, called after each step and each epoch; a context
            manager is entered first, and what it yields is called.

    Returns:
        :class:`Fit`, with the reason in ``stopped`` where a callback stopped it, the loss was not
        finite, or KeyboardInterrupt came.

    Raises:
        ValueError: latents that are NaN or infinite before the first step; no batches; a number of
            epochs below 0; an aux with the name of another column.

    >>> from mapfn import make_spec, optim
    >>> from mapfn.steps import make_step
    >>> target = torch.nn.Linear(3, 1)
    >>> spec = make_spec(target, latent_dim=2)
    >>> init, step = make_step(spec, target, torch.nn.functional.mse_loss, optim.adam(0.05))
    >>> batches = [(torch.ones(4, 3), torch.ones(4, 1))] * 10
    >>> result = fit(step, init(seed=0), batches, epochs=3)
    >>> [row["epoch"] for row in result.history], result.stopped
    ([0, 1, 2], '')
    """
    _check_latents(state)
    history: list[Metrics] = []
    stopped = ""
    with ExitStack() as stack:
        calls = [_entered(stack, callback) for callback in callbacks]
        try:
            for event in _events(step, state, loader, _epochs(epochs), (history, validate)):
                state = event.state
                if reasons := [said for call in calls if (said := call(event))]:
                    stopped = reasons[0]
                    break
        except NonFiniteError as error:
            state, stopped = error.state, str(error)
        except KeyboardInterrupt:
            stopped = _interruption(state)
    return Fit(state, history, stopped)


def _check_latents(state: TrainState) -> None:
    dims = state.step.dim()  # Of an ensemble, whose other members go on.
    wrong = [
        name
        for name, latent in state.latents.items()
        if not bool(latent.flatten(dims).isfinite().all(-1).any())
    ]
    if wrong:
        fix = "start from init(seed) or a good checkpoint"
        got = f"NaN or infinity in {listing(wrong)}"
        raise ValueError(message("fit(state)", expected="finite latents", got=got, fix=fix))


def _entered(stack: ExitStack, callback: Any) -> Callback:
    entered = isinstance(callback, AbstractContextManager)
    call: Callback = stack.enter_context(callback) if entered else callback
    return call


def _epochs(epochs: int | Iterable[int]) -> Iterable[int]:
    if isinstance(epochs, Iterable):
        return epochs
    if not isinstance(epochs, SupportsIndex) or isinstance(epochs, bool) or int(epochs) < 0:
        expected, fix = "a number of epochs, or which", "pass 10, or range(3, 10) to go on"
        raise ValueError(message("fit(epochs=)", expected=expected, got=repr(epochs), fix=fix))
    return range(epochs)


def _events(
    step: Step,
    state: TrainState,
    loader: Loader,
    epochs: Iterable[int],
    record: tuple[list[Metrics], Callable[[TrainState], Metrics] | None],
) -> Iterator[Event]:
    history, validate = record
    for epoch in epochs:
        start, infos = time.perf_counter(), []
        for index, (after, info) in enumerate(_steps(step, state, _batches(loader, epoch))):
            state = after
            infos.append(info)
            yield Event(epoch, index, state, info, history, epoch_over=False)
        found = validate(state) if validate else {}
        row = {"epoch": epoch} | _means(infos) | {f"val_{name}": v for name, v in found.items()}
        history.append(row | {"seconds": time.perf_counter() - start})
        yield Event(epoch, len(infos) - 1, state, infos[-1], history, epoch_over=True)


def _batches(loader: Loader, epoch: int) -> Iterable[Any]:
    if callable(loader):
        return loader(epoch)
    set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
    if set_epoch is not None:
        set_epoch(epoch)
    return loader
