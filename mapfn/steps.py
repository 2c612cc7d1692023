"""The train step: one pure function from a state and a batch to the next state.

Everything that a step needs is in :class:`~mapfn.types.TrainState`, a tree of tensors, so a step
is compiled, put under ``vmap``, saved and resumed as it is.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mapfn import losses, optim, rates, seeds, trees
from mapfn.draws import Draw, draw_step
from mapfn.errors import listing, message
from mapfn.generation import generate, init
from mapfn.layout import tensors_by_name
from mapfn.losses import mapping_loss
from mapfn.moments import moments
from mapfn.optim import Optimizer
from mapfn.spec import Spec
from mapfn.target import apply, init_state
from mapfn.types import Latents, State, StepInfo, TrainState
from mapfn.unpacking import Unpacked, inputs_and_targets, parts, value_and_aux


class Training(NamedTuple):
    """A pair of functions; unpack it as ``init, step = make_step(...)``."""

    init: Callable[..., TrainState]
    """``init(seed=0, *, device=None, tensors=None, target_state=None) -> TrainState``."""
    step: Callable[[TrainState, Any], tuple[TrainState, StepInfo]]
    """``step(state, batch) -> (state, info)``; pure, and traceable as one graph."""


class _Plan(NamedTuple):
    """What make_step was asked for."""

    spec: Spec
    target: Any
    loss: mapping_loss
    optimizer: Optimizer
    accumulate: int
    autocast: torch.dtype | None
    unpack: Callable[[Any], Unpacked]


def make_step(
    spec: Spec,
    target: Any,
    loss_fn: Callable[[Any, Any], Any] | mapping_loss,
    optimizer: Optimizer,
    *,
    accumulate: int = 1,
    autocast: torch.dtype | None = None,
    unpack: Callable[[Any], Unpacked] = inputs_and_targets,
) -> Training:
    """Make the two functions of a training: ``init(seed)`` and ``step(state, batch)``.

    Args:
        spec: from :func:`~mapfn.make_spec`.
        target: the module, or a function ``f(params, state, *args) -> (outputs, state)``.
        loss_fn: ``loss_fn(outputs, targets)``, a scalar, or a scalar and a dict of named tensors;
            or a :class:`~mapfn.losses.mapping_loss`.
        optimizer: from :mod:`mapfn.optim`, or any pair of its form.
        accumulate: cut each batch into so many equal parts, run in turn, to save memory; one
            update, and the gradient of a mean loss is that of the whole batch.
        autocast: dtype in which the target and the loss run where autocast allows, ``bfloat16``
            for one; latents, weights and optimizer keep theirs. None leaves the caller's context.
        unpack: ``batch -> (args, kwargs, targets)``.

    Returns:
        ``(init, step)``.

    Raises:
        TypeError: a loss that is no function, an optimizer that is no such pair.
        ValueError: ``accumulate`` that is no int of at least 1, ``autocast`` that is no floating
            dtype. By ``init``: a seed, base or state as :func:`~mapfn.init` and
            :func:`~mapfn.init_state` refuse. By ``step``: a batch that cannot be cut, a loss that
            is no scalar.

    >>> from mapfn import make_spec
    >>> target = nn.Linear(3, 1)
    >>> spec = make_spec(target, latent_dim=2)
    >>> init, step = make_step(spec, target, nn.functional.mse_loss, optim.adam(0.05))
    >>> state, info = step(init(seed=0), (torch.ones(4, 3), torch.ones(4, 1)))
    >>> int(state.step), info.loss.shape
    (1, torch.Size([]))
    """
    _check_options(optimizer, accumulate, autocast)
    loss = loss_fn if isinstance(loss_fn, mapping_loss) else mapping_loss(loss_fn)
    plan = _Plan(spec, target, loss, optimizer, accumulate, autocast, unpack)

    def first(
        seed: int = 0,
        *,
        device: torch.device | str | None = None,
        tensors: Any = None,
        target_state: State | None = None,
    ) -> TrainState:
        """Make the state before the first step.

        Args:
            seed: any int; all of latents, map, noise and probes follow from it.
            device: where the tensors go; by default where the target's own are.
            tensors: what holds the base, where the target is a function.
            target_state: the target's state, for a target on ``meta`` or one already run.
        """
        own = target if isinstance(target, nn.Module) else tensors
        device = _device(own) if device is None else device
        values = init_state(target) if target_state is None else target_state
        return _first_state(plan, init(spec, seed, own, device), values, seed)

    def step(state: TrainState, batch: Any) -> tuple[TrainState, StepInfo]:
        """Take one step; pure."""
        return _step(plan, state, batch)

    return Training(first, step)


def _check_options(optimizer: Any, accumulate: Any, autocast: Any) -> None:
    if not callable(getattr(optimizer, "init", None)):
        expected, fix = "a pair of init and update", "pass mapfn.optim.adam(0.05), say"
        fix += "; a torch.optim optimizer takes the latents in a loop of yours"
        got, where = type(optimizer).__name__, "make_step(optimizer)"
        raise TypeError(message(where, expected=expected, got=got, fix=fix))
    if type(accumulate) is not int or accumulate < 1:
        got, fix = repr(accumulate), "pass the number of parts of a batch"
        raise ValueError(
            message("make_step(accumulate=)", expected="an int >= 1", got=got, fix=fix)
        )
    if autocast not in (None, torch.bfloat16, torch.float16):
        got, fix = repr(autocast), "pass torch.bfloat16, or None for no autocast of its own"
        raise ValueError(message("make_step(autocast=)", expected="a dtype", got=got, fix=fix))


def _device(own: Any) -> torch.device | None:
    held = () if own is None else tensors_by_name(own).values()
    return next((tensor.device for tensor in held if not tensor.is_meta), None)


def _first_state(plan: _Plan, made: tuple[Any, Any], values: State, seed: int) -> TrainState:
    latents, buffers = made
    key = seeds.key(seeds.derive(seed, "train"))
    device = next((latent.device for latent in latents.values()), key.device)
    coefficients = losses.coefficients(plan.loss)
    optimizer_state = plan.optimizer.init((latents, coefficients))
    rates.check_descends(optimizer_state)
    needed = {"smoothness", "alignment"} & set(plan.loss.terms)
    state = TrainState(
        latents=latents,
        coefficients=coefficients,
        buffers=buffers,
        moments=moments(plan.spec, buffers) if needed else {},
        target_state=values,
        optimizer_state=optimizer_state,
        key=key,
        step=torch.zeros((), dtype=torch.int64),
    )
    moved: TrainState = trees.map_tensors(lambda tensor: tensor.to(device), state)
    return moved


def _step(plan: _Plan, state: TrainState, batch: Any) -> tuple[TrainState, StepInfo]:
    trained, draw = (state.latents, state.coefficients), draw_step(plan.spec, plan.loss, state)
    target_state, found = state.target_state, []
    for part in parts(plan.unpack(batch), plan.accumulate):

        def objective(trained: Any, own: State = target_state, part: Any = part) -> Any:
            return _objective(plan, state._replace(target_state=own), trained, draw, part)

        run = torch.func.grad_and_value(objective, has_aux=True)
        gradients, (loss, (aux, target_state)) = run(trained)
        found.append((gradients, loss, aux))
    gradients, loss, aux = found[0] if len(found) == 1 else trees.map_tensors(_mean, *found)
    updates, optimizer_state = plan.optimizer.update(gradients, state.optimizer_state, trained)
    latents, coefficients = optim.apply_updates(trained, updates)
    size = optim.global_norm(trained)
    info = StepInfo(
        loss=loss,
        aux=aux,
        gradient_norm=optim.global_norm(gradients),
        latent_norm=optim.global_norm(state.latents),
        update_ratio=optim.global_norm(updates) / size.clamp(min=torch.finfo(size.dtype).tiny),
    )
    after = state._replace(
        latents=latents,
        coefficients=coefficients,
        target_state=target_state,
        optimizer_state=optimizer_state,
        step=state.step + 1,
    )
    return after, info


def _mean(*parts: Tensor) -> Tensor:
    whole = torch.stack(parts)
    return (whole if whole.is_floating_point() else whole.float()).mean(0)


def _objective(plan: _Plan, state: TrainState, trained: Any, draw: Draw, batch: Any) -> Any:
    """Return the loss, and beside it its named parts and the target's new state."""
    (latents, coefficients), loss = trained, plan.loss
    *inputs, targets = batch
    with torch.autocast(state.key.device.type, plan.autocast) if plan.autocast else nullcontext():
        outputs, target_state = _run(plan, state, latents, inputs)
        task, aux = value_and_aux(loss.task(outputs, targets))
        terms: dict[str, Tensor] = {}
        if "stability" in loss.terms:
            noisy = {name: z + loss.noise * draw.noise[name] for name, z in latents.items()}
            terms["stability"] = losses.stability(outputs, _run(plan, state, noisy, inputs)[0])
        where = plan.spec, latents, state.buffers, state.moments
        if "smoothness" in loss.terms:
            terms["smoothness"] = losses.smoothness(*where, draw.probes)
        if "alignment" in loss.terms:
            terms["alignment"] = losses.alignment(*where)
    if terms:
        named = {"task": task} | terms | losses.weights(coefficients)
        if taken := sorted(named.keys() & aux.keys()):
            got, fix = listing(taken), "give those of the loss function's aux other names"
            raise ValueError(message("step: aux", expected="names of its own", got=got, fix=fix))
        aux = named | aux
        task = task + losses.weigh(loss, terms, coefficients)
    return task, (aux, target_state)


def _run(plan: _Plan, state: TrainState, latents: Latents, inputs: Any) -> tuple[Any, State]:
    (args, kwargs), params = inputs, generate(plan.spec, latents, state.buffers)
    return apply(plan.target, params, state.target_state, *args, **kwargs)
