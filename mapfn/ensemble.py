"""Ensembles: many members as one tree with a leading member dimension, for vmap."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from mapfn import optim, trees
from mapfn.errors import message
from mapfn.generation import generate
from mapfn.members import at, member_dims, stack, stack_states, stacked, take, unstack, whole
from mapfn.parts import differences, random_state
from mapfn.schedules import check_number
from mapfn.spec import Spec
from mapfn.target import apply, call
from mapfn.types import StepInfo, TrainState

__all__ = ["Ensemble", "Prediction", "make_ensemble", "predict", "stack", "unstack"]

Method = Literal["vmap", "loop"]
Randomness = Literal["error", "different", "same"]
Step = Callable[[TrainState, Any], tuple[TrainState, StepInfo]]


class Ensemble(NamedTuple):
    """Three functions: ``init, step, members = make_ensemble(...)``."""

    init: Callable[..., TrainState]
    """``init(seeds, learning_rates=None) -> TrainState`` of ``[K, ...]`` tensors; those that all
    members share, a base for one, stand in ``buffers`` once, as ``<shared>name``."""
    step: Step
    """``step(state, batch) -> (state, info)``, info ``[K]``; pure."""
    members: Callable[[TrainState], list[TrainState]]
    """Take a state apart into members that run alone, by the plain step."""


def make_ensemble(
    training: tuple[Callable[..., TrainState], Step],
    *,
    method: Method = "vmap",
    shared_map: bool = False,
    shared_data: bool = True,
    randomness: Randomness = "error",
    chunk_size: int | None = None,
) -> Ensemble:
    """Train K members together: the very same step, batched by ``vmap`` or in a loop.

    Args:
        training: ``(init, step)`` of :func:`~mapfn.train.make_step`.
        method: ``"vmap"``; or ``"loop"``, with the same results, for what torch cannot batch, an
            LSTM for one, and for what it batches badly, convolutions on CPU for one.
        shared_map: whether all members use the first seed's map, or each its own.
        shared_data: whether all members see one batch, or each its own, ``[K, batch, ...]``.
        randomness: of ``torch.vmap``, for targets with dropout: ``"different"`` draws for each
            member, or the ``"same"``. A loop draws for each member in turn.
        chunk_size: members that ``vmap`` runs at once, all by default; saves memory.

    Returns:
        ``(init, step, members)``.

    Raises:
        ValueError: an unknown method or randomness; ``"same"`` in a loop. By ``init``: no seeds,
            or another number of learning rates. By ``step``: a batch that is not there for each
            member where ``shared_data`` is false.
        RuntimeError: by ``step``: a target that draws random numbers where randomness is
            ``"error"``.

    >>> from mapfn import make_spec, optim
    >>> from mapfn.steps import make_step
    >>> target = nn.Linear(3, 1)
    >>> spec = make_spec(target, latent_dim=2)
    >>> training = make_step(spec, target, nn.functional.mse_loss, optim.adam(0.05))
    >>> init, step, members = make_ensemble(training)
    >>> state = init(range(4), learning_rates=[0.01, 0.02, 0.05, 0.1])
    >>> state, info = step(state, (torch.ones(8, 3), torch.ones(8, 1)))
    >>> info.loss.shape, len(members(state))
    (torch.Size([4]), 4)
    """
    _check_options(method, randomness)
    start, single = training

    def init(seeds: Sequence[int], learning_rates: Sequence[float] | None = None) -> TrainState:
        """Make the members' states, one a seed."""
        return _first_members(start, list(seeds), learning_rates, shared_map)

    def one(state: TrainState, batch: Any) -> tuple[TrainState, StepInfo]:
        after, info = single(whole(state), batch)
        return after._replace(buffers={}, moments={}), info

    def step(state: TrainState, batch: Any) -> tuple[TrainState, StepInfo]:
        """Take one step with every member."""
        if not shared_data and not torch.compiler.is_compiling():
            _check_own_data(batch, len(state.step))
        if method == "vmap":
            dims = member_dims(state), None if shared_data else 0
            batched = torch.vmap(one, dims, randomness=randomness, chunk_size=chunk_size)
            after, info = _named_randomness(batched, state, batch)
        else:
            with _draws_refused(randomness):
                after, info = _looped(one, state, batch, shared_data)
        return after._replace(buffers=state.buffers, moments=state.moments), info

    return Ensemble(init, step, _members)


def _check_options(method: str, randomness: str) -> None:
    for name, got, choices in (
        ("method", method, ("vmap", "loop")),
        ("randomness", randomness, ("error", "different", "same")),
    ):
        if got not in choices:
            fix, where = "pass one of them", f"make_ensemble({name}=)"
            raise ValueError(message(where, expected=f"{choices}", got=repr(got), fix=fix))
    if (method, randomness) == ("loop", "same"):
        fix, where = 'pass method="vmap", or randomness="different"', "make_ensemble(randomness=)"
        got = "'same' in a loop, which draws for each member in turn"
        raise ValueError(message(where, expected="'different'", got=got, fix=fix))


def _check_own_data(batch: Any, count: int) -> None:
    shapes = [list(tensor.shape) for tensor in trees.tensors(batch)]
    if any(shape[:1] != [count] for shape in shapes):
        expected, got = f"tensors [{count}, batch, ...], one batch a member", f"shapes {shapes}"
        fix = (
            "stack the members' batches, batches(data, size, seed=seeds) does; or shared_data=True"
        )
        where = "make_ensemble.step(batch)"
        raise ValueError(message(where, expected=expected, got=got, fix=fix))


def _first_members(
    start: Callable[..., TrainState],
    seeds: list[int],
    learning_rates: Sequence[float] | None,
    shared_map: bool,
) -> TrainState:
    rates = [None] * len(seeds) if learning_rates is None else list(learning_rates)
    if not seeds or len(rates) != len(seeds):
        got = f"{len(seeds)} seeds and {len(rates)} learning rates"
        fix = "pass a seed for each member, and a learning rate for each or none"
        expected = "at least one member"
        raise ValueError(message("make_ensemble.init", expected=expected, got=got, fix=fix))
    states = [start(seed) for seed in seeds]
    if shared_map:
        buffers, moments = states[0].buffers, states[0].moments
        states = [state._replace(buffers=buffers, moments=moments) for state in states]
    if learning_rates is not None:
        for rate in learning_rates:
            check_number("make_ensemble.init(learning_rates=)", float(rate))
        states = [_at_rate(state, rate) for state, rate in zip(states, rates, strict=True)]
    return stack_states(states)


def _at_rate(state: TrainState, rate: Any) -> TrainState:
    return state._replace(optimizer_state=optim.with_learning_rate(state.optimizer_state, rate))


def _named_randomness(batched: Callable[..., Any], state: TrainState, batch: Any) -> Any:
    """Run; where torch refuses random numbers, say which of our arguments allows them."""
    if torch.compiler.is_compiling():
        return batched(state, batch)
    try:
        return batched(state, batch)
    except RuntimeError as error:
        if "randomness" not in str(error):
            raise
        raise RuntimeError(_random_text()) from error


@contextmanager
def _draws_refused(randomness: str) -> Iterator[None]:
    """Refuse in a loop what ``vmap`` refuses; a graph hides it, and is not looked into."""
    if randomness != "error" or torch.compiler.is_compiling():
        yield
        return
    before = random_state()
    yield
    if differences(before, random_state()):
        raise RuntimeError(_random_text())


def _random_text() -> str:
    expected, got = "a target without random numbers", "one that draws them, dropout perhaps"
    fix = 'pass randomness="different", each member its own, or "same"'
    return message("make_ensemble(randomness='error')", expected=expected, got=got, fix=fix)


def _looped(
    one: Step, state: TrainState, batch: Any, shared_data: bool
) -> tuple[TrainState, StepInfo]:
    count = len(state.step)
    results = [
        one(take(state, index), batch if shared_data else at(batch, index))
        for index in range(count)
    ]
    looped: tuple[TrainState, StepInfo] = trees.map_tensors(stacked, *results)
    return looped


def _members(state: TrainState) -> list[TrainState]:
    taken = [whole(take(state, index)) for index in range(len(state.step))]
    return [trees.map_tensors(lambda tensor: tensor.detach().clone(), own) for own in taken]


class Prediction(NamedTuple):
    """What the members predict together."""

    mean: Any
    """Mean over the members, in the structure of the outputs."""
    spread: Any
    """Standard deviation over the members, unbiased; 0 for one member."""
    outputs: Any
    """Of all members, ``[K, ...]``."""


def predict(
    spec: Spec,
    target: Any,
    state: TrainState,
    *args: Any,
    method: Method = "vmap",
    randomness: Randomness = "error",
) -> Prediction:
    """Run every member on the same inputs, in eval mode.

    Args:
        spec: from :func:`~mapfn.make_spec`.
        target: the module, or a function, which has no mode.
        state: of an ensemble's training.
        *args: the target's own arguments.
        method: ``"vmap"`` or ``"loop"``.
        randomness: of ``torch.vmap``, for a target that draws random numbers in eval mode.

    Returns:
        :class:`Prediction`: tensors, or a tuple, list or dict of them as the target returns.

    >>> from mapfn import make_spec, optim
    >>> from mapfn.steps import make_step
    >>> target = nn.Linear(3, 1)
    >>> spec = make_spec(target, latent_dim=2)
    >>> training = make_step(spec, target, nn.functional.mse_loss, optim.adam(0.05))
    >>> state = make_ensemble(training).init(range(4))
    >>> predict(spec, target, state, torch.ones(8, 3)).mean.shape
    torch.Size([8, 1])
    """
    _check_options(method, randomness)

    def one(member: TrainState) -> Any:
        own = whole(member)
        params = generate(spec, own.latents, own.buffers)
        return trees.plain(_outputs(target, params, own, args))

    if method == "vmap":
        outputs = torch.vmap(one, (member_dims(state),), randomness=randomness)(state)
    else:
        with _draws_refused(randomness):
            each = [one(take(state, index)) for index in range(len(state.step))]
        outputs = trees.map_tensors(stacked, *each)
    mean = trees.map_tensors(lambda tensor: tensor.mean(0), outputs)
    spread = trees.map_tensors(_spread, outputs)
    return Prediction(mean, spread, outputs)


def _outputs(target: Any, params: Any, state: TrainState, args: tuple[Any, ...]) -> Any:
    if isinstance(target, nn.Module):
        return call(target, params, state.target_state, *args, training=False)[0]
    return apply(target, params, state.target_state, *args)[0]


def _spread(tensor: Tensor) -> Tensor:
    return tensor.std(0, correction=1 if len(tensor) > 1 else 0)
