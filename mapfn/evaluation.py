"""Evaluation: means of a loss and its named parts over some batches, nothing trained."""

from collections.abc import Callable, Iterable
from statistics import mode
from typing import Any

import torch
from torch import nn

from mapfn import trees
from mapfn.errors import message
from mapfn.generation import generate
from mapfn.losses import mapping_loss
from mapfn.spec import Spec
from mapfn.target import apply, call
from mapfn.types import TrainState
from mapfn.unpacking import Unpacked, inputs_and_targets, value_and_aux


def evaluate(
    spec: Spec,
    target: Any,
    state: TrainState,
    loader: Iterable[Any],
    loss_fn: Callable[[Any, Any], Any] | mapping_loss,
    unpack: Callable[[Any], Unpacked] = inputs_and_targets,
) -> dict[str, float]:
    """Run the target in eval mode over the batches; weights are made once.

    Args:
        spec: from :func:`~mapfn.make_spec`.
        target: the module, or a function, which has no mode.
        state: of the training; its ``target_state`` is read and stays as it is.
        loader: the batches.
        loss_fn: ``loss_fn(outputs, targets)``: the mean over its batch, a scalar, or a scalar and
            a dict of named means; of a :class:`~mapfn.losses.mapping_loss` its task loss.
        unpack: ``batch -> (args, kwargs, targets)``.

    Returns:
        ``{"loss": ..., name: ...}``: means over all samples, each batch weighed by its size.

    Raises:
        ValueError: no batches.

    >>> from mapfn import make_spec, optim
    >>> from mapfn.steps import make_step
    >>> target = nn.Linear(3, 1)
    >>> spec = make_spec(target, latent_dim=2)
    >>> init, _ = make_step(spec, target, nn.functional.mse_loss, optim.adam(0.05))
    >>> batches = [(torch.zeros(4, 3), torch.zeros(4, 1))]
    >>> list(evaluate(spec, target, init(seed=0), batches, nn.functional.mse_loss))
    ['loss']
    """
    task = loss_fn.task if isinstance(loss_fn, mapping_loss) else loss_fn
    totals: dict[str, float] = {}
    count = 0
    with torch.no_grad():
        params = generate(spec, state.latents, state.buffers)
        for batch in loader:
            args, kwargs, targets = unpack(batch)
            size = _num_samples(args, kwargs, targets)
            if size == 0:
                continue
            outputs = _run(target, params, state, args, kwargs)
            loss, aux = value_and_aux(task(outputs, targets))
            for name, value in ({"loss": loss} | aux).items():
                totals[name] = totals.get(name, 0.0) + size * float(value)
            count += size
    if not count:
        fix = "pass a list or a DataLoader; an iterator is used up by its first use"
        raise ValueError(message("evaluate(loader)", expected="batches", got="none", fix=fix))
    return {name: total / count for name, total in totals.items()}


def _num_samples(*parts: Any) -> int:
    """Return the first dimension that most tensors have: class weights may stand among them."""
    return mode([len(tensor) for tensor in trees.tensors(parts) if tensor.dim()] or [1])


def _run(target: Any, params: Any, state: TrainState, args: Any, kwargs: Any) -> Any:
    if not isinstance(target, nn.Module):
        return apply(target, params, state.target_state, *args, **kwargs)[0]
    return call(target, params, state.target_state, *args, training=False, kwargs=kwargs)[0]
