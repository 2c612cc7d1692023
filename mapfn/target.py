"""Running the target: its state, its forward pass with given params, and the way out.

Everything is stateless: the module lends its code, params and state come in as arguments, and new
state comes out. The module, the dicts and the tensors that are passed in keep their bits.
"""

import copy
import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module

from mapfn import refusals, trees, validation
from mapfn.errors import listing, message
from mapfn.layout import named_tensors, unwrap
from mapfn.types import State

# Where a module keeps what it has registered; all else among its attributes is plain.
_REGISTERED = {"_parameters", "_buffers", "_modules"}


def init_state(target: Any, values: Mapping[str, Tensor] | None = None) -> State:
    """Copy the target's own buffers, persistent or not.

    Args:
        target: the module; a function has no buffers and gets an empty dict.
        values: values of buffers by name, needed for those of a target on ``meta``.

    Returns:
        ``{name: Tensor}``, copies, without the prefixes of wrappers.

    Raises:
        ValueError: a buffer or a plain tensor attribute on ``meta`` whose value nobody gave.

    >>> list(init_state(nn.BatchNorm1d(2)))
    ['running_mean', 'running_var', 'num_batches_tracked']
    """
    given = dict(values or {})
    if not isinstance(target, nn.Module):
        return given
    module = unwrap(target)
    own = {plain: found.tensor for plain, found in _own_tensors(module, "_buffers").items()}
    _check_meta(module, own, given)
    wanted = {name: own[name] for name in given}
    validation.check_tensors("init_state(values=)", wanted, given, "give each its buffer's shape")
    return {name: (given.get(name, tensor)).detach().clone() for name, tensor in own.items()}


def _check_meta(module: nn.Module, own: State, given: State) -> None:
    if extra := [name for name in given if name not in own]:
        fix = f"the buffers are {listing(own)}"
        where = "init_state(values=)"
        raise ValueError(message(where, expected="buffers", got=listing(extra), fix=fix))
    empty = [name for name, tensor in own.items() if tensor.is_meta and name not in given]
    if empty:
        fix = "pass init_state(target, {name: value}), or build the target on a real device"
        got = f"{listing(empty)} on meta"
        raise ValueError(message("init_state", expected="buffers with values", got=got, fix=fix))
    if attributes := _meta_attributes(module):
        fix = "set each to its value, target.name = tensor, or build the target on a real device"
        got = f"the plain tensors {listing(attributes)} on meta"
        raise ValueError(message("init_state", expected="values", got=got, fix=fix))


def _meta_attributes(module: nn.Module) -> list[str]:
    """Find plain tensor attributes that lost their values on ``meta``."""
    return [
        f"{path}.{name}".lstrip(".")
        for path, child in module.named_modules()
        for name, value in vars(child).items()
        if name not in _REGISTERED and any(tensor.is_meta for tensor in trees.tensors(value))
    ]


def apply(
    target: Any, params: Any, state: State, /, *args: Any, **kwargs: Any
) -> tuple[Any, State]:
    """Run the target with the given params and state; pure.

    Args:
        target: the module, or a function ``f(params, state, *args) -> (outputs, state)``.
        params: from :func:`~mapfn.generate`; one name a tie group, aliases are added.
        state: from :func:`init_state` or the last call.
        *args: the target's own arguments.
        **kwargs: the target's own keyword arguments, all of them.

    Returns:
        ``(outputs, state)``: what the target returns, and its buffers after the call.

    Raises:
        TypeError: params or state that are no dicts of tensors.
        ValueError: a missing, extra or misspelt name, or a shape that is not exactly the leaf's.
        RuntimeError: a module that checkpoints activations inside, in eager mode; a BatchNorm
            with ``momentum=None`` in a graph or under ``vmap``.

    Buffers that the target makes only while it runs come out in no state, and are gone after it;
    plain attributes that it sets are its own affair, and stay.

    >>> import torch
    >>> layer = nn.Linear(3, 2)
    >>> outputs, state = apply(layer, dict(layer.named_parameters()), {}, torch.ones(1, 3))
    >>> bool((outputs == layer(torch.ones(1, 3))).all())
    True
    """
    if not isinstance(target, nn.Module):
        return _run_function(target, params, state, args, kwargs)
    return call(target, params, state, *args, kwargs=kwargs)


def call(
    target: nn.Module,
    params: Mapping[str, Tensor],
    state: State,
    /,
    *args: Any,
    method: str = "forward",
    training: bool | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> tuple[Any, State]:
    """Run any method of the target, in train or eval mode; otherwise as :func:`apply`.

    Args:
        target: the module.
        params: from :func:`~mapfn.generate`.
        state: from :func:`init_state` or the last call.
        *args: the method's positional arguments.
        method: its name, ``"encode"`` or that of a submodule, ``"encoder"``, say;
            ``"forward"`` is the module itself, hooks included.
        training: the mode for this call alone, None to leave it.
        kwargs: the method's keyword arguments, as a dict, so that none of its names is taken.

    Returns:
        ``(outputs, state)``.

    Raises:
        TypeError: a target that is not a module.
        ValueError: as :func:`apply`.
        RuntimeError: as :func:`apply`.

    >>> import torch
    >>> layer = nn.Dropout(0.5)
    >>> call(layer, {}, {}, torch.ones(2), training=False)[0]
    tensor([1., 1.])
    """
    module = unwrap(validation.check_module(target, "call(target)"))
    own = _own_tensors(module, "_buffers")
    tensors = _lent(_own_tensors(module, "_parameters"), "params", params)
    tensors |= {name: tensor.clone() for name, tensor in _lent(own, "state", state).items()}
    function = module if method == "forward" else attrgetter(method)(module)
    with (
        refusals.refused_while_running(),
        _mode(module, training),
        _restored(module),
        _reparametrize_module(module, tensors),
    ):
        refusals.refuse_cumulative(module, tensors)
        outputs = function(*args, **(kwargs or {}))
    refusals.refuse_reentrant(outputs, tensors, (args, kwargs))
    return outputs, {plain: tensors[names[0]] for plain, (names, _) in own.items()}


def _run_function(
    target: Any, params: Any, state: State, args: Any, kwargs: Any
) -> tuple[Any, State]:
    if not callable(target):
        fix = "pass an nn.Module, or a function f(params, state, *args) -> (outputs, state)"
        got = type(target).__name__
        raise TypeError(message("apply(target)", expected="a target", got=got, fix=fix))
    copied = trees.map_tensors(lambda t: t.clone() if isinstance(t, Tensor) else t, state)
    outputs, new_state = target(params, copied, *args, **kwargs)
    return outputs, new_state


class _Own(NamedTuple):
    """A tensor of the target and every real name it has to be lent under."""

    names: list[str]
    tensor: Tensor


def _own_tensors(module: nn.Module, kind: str) -> dict[str, _Own]:
    """List the module's tensors by plain name, one a tie group, each place once."""
    own: dict[int, tuple[str, _Own]] = {}
    places = set()
    for real, (plain, tensor, child) in named_tensors(module, kind).items():
        _, found = own.setdefault(id(tensor), (plain, _Own([], tensor)))
        # A module that stands at two paths has its tensor lent once: the second loan would take
        # the first for the original and leave it behind.
        place = (id(child), real.rpartition(".")[2])
        if place not in places:
            found.names.append(real)
        places.add(place)
    return dict(own.values())


def _lent(own: Mapping[str, _Own], where: str, given: Any) -> dict[str, Tensor]:
    """Check what is given exactly, and spell it with the module's real names."""
    source = {"params": "generate(spec, latents, buffers)", "state": "init_state(target)"}[where]
    wanted = {plain: found.tensor for plain, found in own.items()}
    validation.check_tensors(where, wanted, given, f"pass what {source} returns for this target")
    return {real: given[plain] for plain, found in own.items() for real in found.names}


@contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Undo what lending tensors does not: buffers that forward makes, the own lists of RNNs."""
    before = [(child._buffers, dict(child._buffers)) for child in module.modules()]
    try:
        yield
    finally:
        for buffers, own in before:
            for name in [name for name in buffers if own.get(name) is None]:
                if name in own:
                    buffers[name] = None
                else:
                    del buffers[name]
        for child in module.modules():
            if isinstance(child, nn.RNNBase):
                child._init_flat_weights()


@contextmanager
def _mode(module: nn.Module, training: bool | None) -> Iterator[None]:
    """Put every submodule in train or eval mode for one call, and back into its own after it."""
    if training is None:
        yield
        return
    before = [(child, child.training) for child in module.modules()]
    try:
        module.train(training)
        yield
    finally:
        for child, mode in before:
            child.training = mode


def bake(target: Any, params: Any, state: State) -> Any:
    """Make a plain target to deploy: a copy of the module with these weights, nothing mapped.

    Args:
        target: the module (on ``meta`` too), or a function target.
        params: from :func:`~mapfn.generate`.
        state: the target's state.

    Returns:
        A module that is independent of the target and of the arguments, parametrizations and
        ties kept; for a function, ``inputs -> (outputs, state)`` with params and state bound.

    Raises:
        TypeError: params or state that are no dicts of tensors.
        ValueError: wrong names or shapes.

    >>> import torch
    >>> layer = nn.Linear(2, 1)
    >>> baked = bake(layer, {"weight": torch.ones(1, 2), "bias": torch.zeros(1)}, {})
    >>> baked(torch.ones(1, 2))
    tensor([[2.]], grad_fn=<AddmmBackward0>)
    """
    if not isinstance(target, nn.Module):
        return functools.partial(_run_function_on, target, params, state)
    module = unwrap(target)
    own = _own_tensors(module, "_parameters"), _own_tensors(module, "_buffers")
    _lent(own[0], "params", params), _lent(own[1], "state", state)
    memo: dict[int, Any] = {}
    for plain, found in own[0].items():
        weight = params[plain].detach().clone()
        memo[id(found.tensor)] = nn.Parameter(weight, requires_grad=found.tensor.requires_grad)
    for plain, found in own[1].items():
        memo[id(found.tensor)] = state[plain].detach().clone()
    # Old weight_norm keeps its last product as a plain attribute on a graph: no leaf to copy.
    for child in module.modules():
        plain_tensors = (value for value in vars(child).values() if isinstance(value, Tensor))
        memo |= {id(value): value.detach().clone() for value in plain_tensors}
    return copy.deepcopy(module, memo)


def _run_function_on(target: Any, params: Any, state: State, *args: Any, **kwargs: Any) -> Any:
    return apply(target, params, state, *args, **kwargs)
