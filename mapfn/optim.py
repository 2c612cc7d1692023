"""Optimizers and schedules as pure functions over trees: traceable, and batched by ``vmap``.

An optimizer is a pair ``init(params) -> state`` and ``update(gradients, state, params) ->
(updates, state)``, and :func:`apply_updates` adds what comes out. The learning rate is a tensor of
the state, so it can differ from member to member, and changing it recompiles nothing.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mapfn import trees
from mapfn.errors import message
from mapfn.rates import OptimizerState, with_learning_rate
from mapfn.schedules import Schedule, check_number, constant, cosine, one_cycle

__all__ = [
    "Optimizer",
    "OptimizerState",
    "Schedule",
    "adam",
    "apply_updates",
    "chain",
    "clip_by_global_norm",
    "constant",
    "cosine",
    "global_norm",
    "one_cycle",
    "sgd",
    "with_learning_rate",
]


class Optimizer(NamedTuple):
    """A pair of pure functions."""

    init: Callable[[Any], Any]
    """``init(params) -> state``."""
    update: Callable[[Any, Any, Any], tuple[Any, Any]]
    """``update(gradients, state, params) -> (updates, state)``."""


def sgd(
    learning_rate: float | Schedule,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
) -> Optimizer:
    """Stochastic gradient descent, equal to ``torch.optim.SGD``.

    Args:
        learning_rate: a number or a schedule.
        momentum: share of the last step's direction that is kept, from 0 to below 1.
        nesterov: look ahead along the momentum.
        weight_decay: added to the gradient, times the params.

    Raises:
        ValueError: a rate that is not positive, a momentum outside, nesterov without momentum.

    >>> optimizer, params = sgd(0.5), {"z": torch.tensor([1.0])}
    >>> updates, state = optimizer.update(params, optimizer.init(params), params)
    >>> apply_updates(params, updates)
    {'z': tensor([0.5000])}
    """
    schedule = _schedule("sgd(learning_rate)", learning_rate)
    _check_share("sgd(momentum=)", momentum)
    check_number("sgd(weight_decay=)", weight_decay, least=0.0)
    if nesterov and momentum == 0.0:
        fix, where = "pass momentum=0.9, say", "sgd(nesterov=)"
        raise ValueError(message(where, expected="a momentum with it", got="0.0", fix=fix))

    def init(params: Any) -> OptimizerState:
        return _first(schedule, params, ("velocity",) if momentum else ())

    def update(gradients: Any, state: OptimizerState, params: Any) -> tuple[Any, OptimizerState]:
        if weight_decay:
            gradients = trees.map_tensors(lambda g, p: g + weight_decay * p, gradients, params)
        moments, directions = state.moments, gradients
        if momentum:
            # The first velocity is the first gradient, as in torch.
            velocity = trees.map_tensors(
                lambda v, g: momentum * v + g, state.moments["velocity"], gradients
            )
            moments, directions = {"velocity": velocity}, velocity
            if nesterov:
                directions = trees.map_tensors(lambda v, g: g + momentum * v, velocity, gradients)
        rate = state.learning_rate * schedule.factor(state.step)
        updates = trees.map_tensors(lambda d: -rate.to(d.dtype) * d, directions)
        return updates, state._replace(step=state.step + 1, moments=moments)

    return Optimizer(init, update)


def adam(
    learning_rate: float | Schedule,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> Optimizer:
    """Adam (Kingma and Ba 2015), equal to ``torch.optim.AdamW``, without decay to ``Adam``.

    Args:
        learning_rate: a number or a schedule; 0.03 to 0.1 suits latents.
        betas: decay of the running means of the gradient and of its square.
        eps: added to the root of the second.
        weight_decay: decoupled (Loshchilov and Hutter 2019): the params shrink by this share of
            the learning rate.

    Raises:
        ValueError: a rate or eps that is not positive, betas outside 0 to below 1.

    >>> optimizer, params = adam(0.5), {"z": torch.tensor([1.0])}
    >>> updates, state = optimizer.update(params, optimizer.init(params), params)
    >>> apply_updates(params, updates)
    {'z': tensor([0.5000])}
    """
    schedule = _schedule("adam(learning_rate)", learning_rate)
    for beta in betas:
        _check_share("adam(betas=)", beta)
    check_number("adam(eps=)", eps)
    check_number("adam(weight_decay=)", weight_decay, least=0.0)

    def init(params: Any) -> OptimizerState:
        return _first(schedule, params, ("mean", "square"))

    def update(gradients: Any, state: OptimizerState, params: Any) -> tuple[Any, OptimizerState]:
        step = state.step + 1
        mean = _running(betas[0], state.moments["mean"], gradients)
        squares = trees.map_tensors(torch.square, gradients)
        square = _running(betas[1], state.moments["square"], squares)
        rate = state.learning_rate * schedule.factor(state.step)
        size = rate / (1 - betas[0] ** step.double())
        root = (1 - betas[1] ** step.double()).sqrt()

        def change(mean: Tensor, square: Tensor, param: Tensor) -> Tensor:
            scaled = mean / (square.sqrt() / root.to(mean.dtype) + eps)
            decayed = rate.to(mean.dtype) * weight_decay * param if weight_decay else 0.0
            return -(size.to(mean.dtype) * scaled) - decayed

        updates = trees.map_tensors(change, mean, square, params)
        moments = {"mean": mean, "square": square}
        return updates, state._replace(step=step, moments=moments)

    return Optimizer(init, update)


def _running(beta: float, mean: Any, values: Any) -> Any:
    return trees.map_tensors(lambda m, v: torch.lerp(m, v, 1 - beta), mean, values)


def _first(schedule: Schedule, params: Any, names: tuple[str, ...]) -> OptimizerState:
    device = next((tensor.device for tensor in trees.tensors(params)), None)
    step = torch.zeros((), dtype=torch.int64, device=device)
    rate = torch.full((), schedule.peak, dtype=torch.float64, device=device)
    return OptimizerState(step, rate, {name: _zeros(params) for name in names})


def _zeros(params: Any) -> Any:
    return trees.map_tensors(lambda tensor: torch.zeros_like(tensor.detach()), params)


def clip_by_global_norm(max_norm: float) -> Optimizer:
    """Shrink all gradients together where their norm is larger; first in a :func:`chain`.

    Equal to ``torch.nn.utils.clip_grad_norm_``.

    >>> clip = clip_by_global_norm(1.0)
    >>> float(global_norm(clip.update({"z": torch.tensor([3.0, 4.0])}, (), {})[0])) <= 1.0
    True
    """
    check_number("clip_by_global_norm(max_norm)", max_norm)

    def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        factor = (max_norm / (global_norm(gradients) + 1e-6)).clamp(max=1.0)
        return trees.map_tensors(lambda g: g * factor.to(g.dtype), gradients), state

    return Optimizer(lambda params: (), update)


def chain(*optimizers: Optimizer) -> Optimizer:
    """Send gradients through several in turn; the state is the tuple of theirs.

    >>> optimizer = chain(clip_by_global_norm(1.0), adam(0.05))
    """

    def init(params: Any) -> tuple[Any, ...]:
        return tuple(optimizer.init(params) for optimizer in optimizers)

    def update(gradients: Any, state: tuple[Any, ...], params: Any) -> tuple[Any, Any]:
        after = []
        for optimizer, own in zip(optimizers, state, strict=True):
            gradients, new = optimizer.update(gradients, own, params)
            after.append(new)
        return gradients, tuple(after)

    return Optimizer(init, update)


def apply_updates(params: Any, updates: Any) -> Any:
    """Add updates to params, in the params' dtypes.

    >>> apply_updates({"z": torch.tensor([1.0])}, {"z": torch.tensor([-0.5])})
    {'z': tensor([0.5000])}
    """
    return trees.map_tensors(lambda param, update: param + update.to(param.dtype), params, updates)


def global_norm(tree: Any) -> Tensor:
    """Return the Euclidean norm of all tensors of a tree together, ``float []``.

    >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})
    tensor(5.)
    """
    norms = [torch.linalg.vector_norm(tensor) for tensor in trees.tensors(tree)]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def _schedule(where: str, learning_rate: float | Schedule) -> Schedule:
    if isinstance(learning_rate, Schedule):
        return learning_rate
    return constant(check_number(where, learning_rate))


def _check_share(where: str, value: float) -> None:
    if not check_number(where, value, least=0.0) < 1:
        fix = "pass 0.9, say"
        raise ValueError(message(where, expected="0 to below 1", got=repr(value), fix=fix))
