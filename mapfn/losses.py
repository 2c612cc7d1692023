"""The mapping loss: ``task + l_st stability + l_sm smoothness + l_al alignment``.

:class:`mapping_loss` says how a train step weighs the terms (arXiv 2602.19134); the terms are pure
functions of :mod:`mapfn.terms`, for loops of one's own.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from mapfn.errors import message
from mapfn.terms import alignment, smoothness, stability

__all__ = [
    "alignment",
    "coefficients",
    "mapping_loss",
    "smoothness",
    "stability",
    "trained",
    "weigh",
    "weights",
]

_TERMS = ("stability", "smoothness", "alignment")


@dataclass(frozen=True)
class trained:
    """A coefficient that is trained, as ``softplus`` of a number in ``TrainState.coefficients``.

    Left alone it would shrink to 0, which is the cheapest way to reduce ``l * term``. So a trained
    coefficient brings ``- log l`` with it, and settles where ``l = 1 / term``.

    >>> trained(0.1).value
    0.1
    """

    value: float = 0.01
    """The coefficient at the start, above 0."""

    def __post_init__(self) -> None:
        """Refuse a start from which softplus cannot come."""
        if not 0 < self.value < math.inf:
            expected, fix = "a finite start above 0", "pass trained(0.01), say"
            got = repr(self.value)
            raise ValueError(message("trained(value=)", expected=expected, got=got, fix=fix))


@dataclass(frozen=True)
class mapping_loss:
    """The composite ``task + l_st stability + l_sm smoothness + l_al alignment``.

    What :func:`mapfn.train.make_step` takes in place of a task loss. A coefficient is a float,
    0 for a term that is not even computed, or :class:`trained`.

    >>> loss = mapping_loss(torch.nn.functional.cross_entropy, stability=0.1, alignment=trained())
    >>> loss.terms
    ('stability', 'alignment')
    """

    task: Callable[[Any, Any], Any]
    """``task(outputs, targets)``: a scalar, or a scalar and a dict of named tensors."""
    stability: float | trained = 0.0
    """Dropout draws anew in the noisy pass, and what that changes counts too: put it in eval mode
    where the noise of the latents alone is meant."""
    smoothness: float | trained = 0.0
    alignment: float | trained = 0.0
    noise: float = 0.05
    """Standard deviation of the noise on the latents, whose own is about 1."""
    num_probes: int = 1
    """Probes a step for the groups whose smoothness has no closed form."""

    def __post_init__(self) -> None:
        """Refuse what cannot be weighed."""
        task: Any = self.task
        if not callable(task):
            got, fix = type(task).__name__, "pass torch.nn.functional.cross_entropy, say"
            raise TypeError(message("mapping_loss(task)", expected="a function", got=got, fix=fix))
        for name in (*_TERMS, "noise"):
            _check_weight(name, getattr(self, name))
        if type(self.num_probes) is not int or self.num_probes < 1:
            got, fix = repr(self.num_probes), "pass 1, more for less noise"
            where = "mapping_loss(num_probes=)"
            raise ValueError(message(where, expected="an int >= 1", got=got, fix=fix))

    @property
    def terms(self) -> tuple[str, ...]:
        """The terms that are computed."""
        return tuple(name for name in _TERMS if getattr(self, name) != 0)


def _check_weight(name: str, value: Any) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    can_train = name in _TERMS and isinstance(value, trained)
    if can_train or (number and 0 <= value < math.inf):
        return
    expected, fix = "a number >= 0", "pass a float"
    fix += ", or trained() to train it" if name in _TERMS else ""
    raise ValueError(message(f"mapping_loss({name}=)", expected=expected, got=repr(value), fix=fix))


def coefficients(loss: mapping_loss) -> dict[str, Tensor]:
    """Make the trained coefficients' numbers before softplus, ``{term: float32 []}``.

    >>> coefficients(mapping_loss(torch.nn.functional.mse_loss, stability=trained(0.5)))
    {'stability': tensor(-0.4328)}
    """
    found = {name: getattr(loss, name) for name in loss.terms}
    starts = {name: own.value for name, own in found.items() if isinstance(own, trained)}
    # The inverse of softplus, in the form that large starts do not overflow.
    return {
        name: torch.tensor(start + math.log(-math.expm1(-start))) for name, start in starts.items()
    }


def weights(coefficients: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the trained coefficients themselves, named for a report.

    >>> weights({"stability": torch.tensor(0.0)})
    {'stability_weight': tensor(0.6931)}
    """
    return {f"{name}_weight": softplus(number) for name, number in coefficients.items()}


def weigh(
    loss: mapping_loss, terms: Mapping[str, Tensor], coefficients: Mapping[str, Tensor]
) -> Tensor:
    """Return the weighed sum of the terms, with ``- log l`` for each trained coefficient.

    Args:
        loss: which coefficients there are.
        terms: ``{term: float []}`` for each of ``loss.terms``, at least one.
        coefficients: of the trained ones, before softplus.

    >>> loss = mapping_loss(torch.nn.functional.mse_loss, stability=0.5)
    >>> weigh(loss, {"stability": torch.tensor(3.0)}, {})
    tensor(1.5000)
    """
    parts = []
    for name, term in terms.items():
        own = getattr(loss, name)
        if isinstance(own, trained):
            weight = softplus(coefficients[name])
            parts.append(weight * term - weight.log())
        else:
            parts.append(own * term)
    return torch.stack(parts).sum()
