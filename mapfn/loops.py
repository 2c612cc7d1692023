"""Loops over batches and epochs, for those who do not want to write theirs.

Nothing here knows how a step works: ``step(state, batch) -> (state, info)`` is all it takes, made
by ``make_step`` or ``make_ensemble``, compiled or not, or written by hand.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from mapfn.errors import NonFiniteError, listing, message
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
    returned."""
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
        NonFiniteError: a loss or gradient that is NaN or infinite, in every member of an ensemble;
            its ``state`` is the last good one, from before that step.
        ValueError: no batches.

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
    for after, info in _steps(step, state, loader):
        state = after
        infos.append(info)
    return state, _means(infos)


def _steps(
    step: Step, state: TrainState, loader: Iterable[Any]
) -> Iterator[tuple[TrainState, StepInfo]]:
    for batch in loader:
        after, info = step(state, batch)
        _check_finite(state, info)
        state = after
        yield state, info


def _check_finite(before: TrainState, info: StepInfo) -> None:
    if bool((info.loss.isfinite() & info.gradient_norm.isfinite()).any()):
        return
    at = int(before.step.flatten()[0])
    got = f"loss {_number(info.loss)} and gradient norm {_number(info.gradient_norm)}"
    fix = "lower the learning rate, clip the gradient, or look at this batch; the last good state"
    fix += " is in the error's state"
    text = message(f"step {at}", expected="a finite loss and gradient", got=got, fix=fix)
    raise NonFiniteError(text, before)


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
    named = {name: value for name, value in info.aux.items() if value.shape == info.loss.shape}
    others = info._asdict()
    del others["loss"], others["aux"]
    return {"loss": info.loss} | named | others


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
        validate: ``state -> {name: number}``, after each epoch, for the history.
        callbacks: functions of an :class:`Event`, called after each step and each epoch; a context
            manager is entered first, and what it yields is called.

    Returns:
        :class:`Fit`, with the reason in ``stopped`` where a callback stopped it, the loss was not
        finite, or KeyboardInterrupt came.

    Raises:
        ValueError: latents that are NaN or infinite before the first step; no batches.

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
            stopped = f"interrupted after step {int(state.step.flatten()[0])}"
    return Fit(state, history, stopped)


def _check_latents(state: TrainState) -> None:
    wrong = [name for name, latent in state.latents.items() if not bool(latent.isfinite().all())]
    if wrong:
        fix = "start from init(seed) or a good checkpoint"
        got = f"NaN or infinity in {listing(wrong)}"
        raise ValueError(message("fit(state)", expected="finite latents", got=got, fix=fix))


def _entered(stack: ExitStack, callback: Any) -> Callback:
    entered = isinstance(callback, AbstractContextManager)
    call: Callback = stack.enter_context(callback) if entered else callback
    return call


def _epochs(epochs: int | Iterable[int]) -> Iterable[int]:
    return range(epochs) if isinstance(epochs, int) else epochs


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
        row = {"epoch": epoch} | _means(infos) | (validate(state) if validate else {})
        history.append(row | {"seconds": time.perf_counter() - start})
        yield Event(epoch, len(infos) - 1, state, infos[-1], history, epoch_over=True)


def _batches(loader: Loader, epoch: int) -> Iterable[Any]:
    if callable(loader):
        return loader(epoch)
    set_epoch = getattr(getattr(loader, "sampler", None), "set_epoch", None)
    if set_epoch is not None:
        set_epoch(epoch)
    return loader
