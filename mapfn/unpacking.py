"""What a batch and a loss function hand over: taken apart, cut into parts, checked."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mapfn import trees
from mapfn.errors import message

Unpacked = tuple[tuple[Any, ...], Mapping[str, Any], Any]
"""``(args, kwargs, targets)``: what the target is called with, and what the loss compares to."""


def inputs_and_targets(batch: Any) -> Unpacked:
    """Take a batch apart: ``(inputs, targets)``, or a dict of keyword arguments.

    Args:
        batch: ``(inputs, targets)``, where a tuple of inputs are positional arguments and a dict of
            inputs keyword arguments; or one dict, which is both the keyword arguments and the
            targets, as HuggingFace models with ``labels`` have it.

    Returns:
        ``(args, kwargs, targets)``.

    Raises:
        TypeError: anything else.

    >>> inputs_and_targets((1, 2))
    ((1,), {}, 2)
    """
    if isinstance(batch, Mapping):
        return (), dict(batch), batch
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        expected = "(inputs, targets) or a dict of keyword arguments"
        got = type(batch).__name__
        got += f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        fix = "pass make_step(unpack=function), batch -> (args, kwargs, targets)"
        raise TypeError(message("step(batch)", expected=expected, got=got, fix=fix))
    inputs, targets = batch
    if isinstance(inputs, Mapping):
        return (), dict(inputs), targets
    # A NamedTuple, a PackedSequence for one, is one input.
    return (tuple(inputs) if type(inputs) in (tuple, list) else (inputs,)), {}, targets


def parts(batch: Any, count: int) -> list[Any]:
    """Cut every tensor of a batch along its first dimension, into equal parts.

    Raises:
        ValueError: tensors of different lengths, or a length that cannot be cut so.

    >>> [part.tolist() for part in parts(torch.arange(4), 2)]
    [[0, 1], [2, 3]]
    """
    if count == 1:
        return [batch]
    sizes = {tensor.shape[0] for tensor in trees.tensors(batch) if tensor.dim()}
    if len(sizes) > 1 or any(size % count for size in sizes):
        expected = f"tensors of one number of samples that can be cut into {count}"
        fix = "drop the last, smaller batch, and keep what is no sample out of it"
        got = f"{sorted(sizes)} samples"
        raise ValueError(message("step(batch)", expected=expected, got=got, fix=fix))

    def part(index: int) -> Any:
        def cut(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.dim() == 0:
                return value
            size = value.shape[0] // count
            return value[index * size : (index + 1) * size]

        return trees.map_tensors(cut, batch)

    return [part(index) for index in range(count)]


def value_and_aux(returned: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Take apart what a loss function returns.

    Raises:
        ValueError: neither a scalar nor a scalar and a dict.

    >>> value_and_aux((torch.tensor(1.0), {"error": 2.0}))
    (tensor(1.), {'error': tensor(2.)})
    """
    pair = isinstance(returned, tuple) and len(returned) == 2
    value, aux = returned if pair else (returned, {})
    if not isinstance(value, Tensor) or value.dim() or not isinstance(aux, Mapping):
        got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        got += "" if isinstance(aux, Mapping) else f" and {type(aux).__name__}"
        expected, fix = "a scalar tensor, or one and a dict", "take its mean over the batch"
        raise ValueError(message("step: loss_fn", expected=expected, got=got, fix=fix))
    return value, {name: torch.as_tensor(own, device=value.device) for name, own in aux.items()}
