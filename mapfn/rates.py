"""Learning rates in the state of an optimizer: there is one, and it can be replaced."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mapfn import trees
from mapfn.errors import message
from mapfn.schedules import check_number


class OptimizerState(NamedTuple):
    """The state of :func:`sgd` and :func:`adam`."""

    step: Tensor
    """Updates done, ``int64 []``."""
    learning_rate: Tensor
    """The schedule's peak, ``float64 []``; replace it to change the rate."""
    moments: dict[str, Any]
    """Running means by name, each a tree like the params."""


def with_learning_rate(state: Any, learning_rate: float | Tensor) -> Any:
    """Replace the learning rate, the schedule's peak, in an optimizer's state.

    Args:
        state: of an optimizer of this module, or of a chain.
        learning_rate: a number, or a tensor, ``[K]`` for the stacked state of an ensemble.

    Returns:
        The state, new.

    Raises:
        ValueError: a state without a learning rate, a number that is not above 0.

    >>> from mapfn.optim import adam
    >>> state = with_learning_rate(adam(0.1).init({"z": torch.zeros(2)}), 0.5)
    >>> float(state.learning_rate)
    0.5
    """
    if not isinstance(learning_rate, Tensor):
        check_number("with_learning_rate(learning_rate)", learning_rate)
    replaced = _replaced(state, learning_rate)
    if replaced is None:
        expected, fix = "the state of sgd, adam or a chain", "pass state.optimizer_state"
        got = type(state).__name__
        raise ValueError(message("with_learning_rate", expected=expected, got=got, fix=fix))
    return replaced


def _replaced(state: Any, learning_rate: float | Tensor) -> Any:
    """Return the new state; None where it holds no learning rate."""
    if isinstance(state, OptimizerState):
        rate = torch.as_tensor(learning_rate).to(state.learning_rate)
        # One rate for all members of a stacked state is a rate for each.
        rate = rate.expand(state.learning_rate.shape).clone() if rate.dim() == 0 else rate
        return state._replace(learning_rate=rate)
    if type(state) is not tuple:
        return None
    parts = [_replaced(own, learning_rate) for own in state]
    if all(part is None for part in parts):
        return None
    return tuple(own if part is None else part for own, part in zip(state, parts, strict=True))


def check_descends(state: Any) -> None:
    """Refuse the state of an optimizer that applies no learning rate, or more than one.

    Raises:
        ValueError: so it does: clipping alone would climb, two rates would too.
    """
    rates = _num_rates(state)
    if rates > 1 or (rates == 0 and not any(True for _ in trees.tensors(state))):
        fix = "pass adam(0.05), or chain(clip_by_global_norm(1.0), adam(0.05))"
        expected = "one learning rate in all"
        raise ValueError(
            message("make_step(optimizer)", expected=expected, got=str(rates), fix=fix)
        )


def _num_rates(state: Any) -> int:
    if isinstance(state, OptimizerState):
        return 1
    return sum(map(_num_rates, state)) if type(state) is tuple else 0
