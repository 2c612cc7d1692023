"""Callbacks for :func:`mapfn.train.fit`: plain functions of an event."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from mapfn.errors import listing, message
from mapfn.loops import Callback, Event, Metrics
from mapfn.types import TrainState

Mode = Literal["min", "max"]


def early_stopping(metric: str, *, patience: int = 5, mode: Mode = "min") -> Callback:
    """Stop when a metric of the history has not improved for some epochs.

    Args:
        metric: its name in the history, ``"val_loss"`` where ``validate`` returns a loss.
        patience: epochs without improvement that are borne.
        mode: whether less or more is better.

    Returns:
        The callback.

    Raises:
        ValueError: patience that is no int of at least 1, an unknown mode; while training, a
            metric that the history does not have.

    >>> stop = early_stopping("loss", patience=1)
    """
    if type(patience) is not int or patience < 1:
        fix, where = "pass the epochs to wait", "early_stopping(patience=)"
        raise ValueError(message(where, expected="an int >= 1", got=repr(patience), fix=fix))
    _check_mode("early_stopping", mode)

    def stop(event: Event) -> str | None:
        if not event.epoch_over:
            return None
        best = _best(event.history, metric, mode)
        waited = len(event.history) - 1 - best
        if waited < patience:
            return None
        value = event.history[best][metric]
        return f"{metric} has not improved for {waited} epochs; the best was {value:.6g}"

    return stop


def keep_best(metric: str, into: Callable[[TrainState], Any], *, mode: Mode = "min") -> Callback:
    """Hand on the state of each epoch that is the best so far.

    Args:
        metric: its name in the history.
        into: takes the state; ``best.append`` of a list, or what saves a file.
        mode: whether less or more is better.

    Raises:
        ValueError: an unknown mode; while training, as :func:`early_stopping`.

    >>> best = []
    >>> keep = keep_best("val_accuracy", best.append, mode="max")
    """
    _check_mode("keep_best", mode)

    def keep(event: Event) -> None:
        history = event.history
        if not event.epoch_over or _best(history, metric, mode) < len(history) - 1:
            return
        if not math.isnan(history[-1][metric]):
            into(event.state)

    return keep


def _check_mode(name: str, mode: str) -> None:
    if mode not in ("min", "max"):
        fix, where = "pass one of them", f"{name}(mode=)"
        raise ValueError(message(where, expected="'min' or 'max'", got=repr(mode), fix=fix))


def _best(history: list[Metrics], metric: str, mode: Mode) -> int:
    """Return the index of the first best row; a NaN is never best."""
    if metric not in history[-1]:
        got, fix = repr(metric), "name one of them, or return it from fit(validate=)"
        expected = f"one of {listing(history[-1])}"
        raise ValueError(message("callback(metric)", expected=expected, got=got, fix=fix))
    sign = 1.0 if mode == "min" else -1.0
    values = [sign * row[metric] for row in history]
    return min(range(len(values)), key=lambda i: math.inf if math.isnan(values[i]) else values[i])


@contextmanager
def progress_bar(num_steps: int | None = None) -> Iterator[Callback]:
    """Show a bar for the running epoch, and the last row of the history; needs ``rich``.

    Args:
        num_steps: steps in an epoch, ``len(loader)``; learnt from the first epoch otherwise.

    Yields:
        The callback; :func:`~mapfn.train.fit` enters it itself: ``callbacks=[progress_bar()]``.

    Raises:
        ModuleNotFoundError: ``rich`` is not installed; ``pip install rich``.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("epoch {task.fields[epoch]}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[shown]}"),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("", total=num_steps, epoch=0, shown="")

        def show(event: Event) -> None:
            if event.epoch_over:
                shown = _row(event.history[-1])
                progress.update(task, total=event.position + 1, shown=shown)
            else:
                progress.update(task, completed=event.position + 1, epoch=event.epoch)

        yield show


def _row(row: Metrics) -> str:
    hidden = ("epoch", "gradient_norm", "latent_norm", "update_ratio")
    return "  ".join(f"{name} {value:.4g}" for name, value in row.items() if name not in hidden)
