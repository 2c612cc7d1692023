"""The one module: spec, target and latents as an ``nn.Module``, for DDP and other people's loops.

The latents are its parameters, the target's state its buffers; the map's fixed numbers move with
it and are in no file and on no wire. The target itself is held beside it, on ``meta``: its own
weights are never used.
"""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from mapfn.errors import message
from mapfn.generation import generate, init
from mapfn.report import count
from mapfn.spec import Spec
from mapfn.target import apply, init_state
from mapfn.types import Buffers, Latents, State


class Mapped(nn.Module):
    """A target whose weights come from latents, as a module.

    ``forward`` makes the weights, runs the target with them and keeps its new state. Names in the
    ``state_dict``: ``latents.<i>`` in the order of ``spec.trained_groups``, and ``state.<name>``.

    >>> from mapfn import make_spec
    >>> target = nn.Sequential(nn.Linear(20, 8), nn.BatchNorm1d(8))
    >>> mapped = Mapped(make_spec(target, strategy="slvt", latent_dim=16), target)
    >>> mapped(torch.ones(4, 20)).shape, [name for name, _ in mapped.named_parameters()]
    (torch.Size([4, 8]), ['latents.0'])
    >>> mapped.trainable_parameter_count, mapped.target_parameter_count
    (16, 184)
    """

    def __init__(
        self,
        spec: Spec,
        target: Any,
        seed: int = 0,
        *,
        tensors: Any = None,
        target_state: State | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        """Make latents and map from the seed.

        Args:
            spec: from :func:`~mapfn.make_spec`.
            target: the module, copied without its weights; or a function
                ``f(params, state, *args) -> (outputs, state)``.
            seed: any int, the same on every rank.
            tensors: what holds the base, where the target is a function.
            target_state: the target's state, for a target on ``meta`` or one already run.
            device: where the tensors go.

        Raises:
            TypeError: a seed that is not an int.
            ValueError: a target that is not the spec's, buffers on ``meta`` without a value.
        """
        super().__init__()
        module = isinstance(target, nn.Module)
        latents, buffers = init(spec, seed, target if module else tensors, device)
        state = init_state(target) if target_state is None else _copied(target_state)
        self.spec, self.seed = spec, seed
        # In a tuple it is no submodule: its weights are nobody's parameters.
        self._held = (_without_weights(target) if module else target,)
        self.latents = nn.ParameterList(latents.values())
        self.state = _Tensors(state, _persistent(target) if module else set(state))
        self._fixed_names = [(group, name) for group, own in buffers.items() for name in own]
        fixed = {str(i): buffers[group][name] for i, (group, name) in enumerate(self._fixed_names)}
        self.fixed = _Tensors(fixed, persistent=set())
        # DDP would send them at every forward pass otherwise (torch 2.13 reads this name).
        self._ddp_params_and_buffers_to_ignore = [f"fixed.{name}" for name in fixed]
        self.training = target.training if module else True
        if device is not None:
            self.to(device)

    @property
    def target(self) -> Any:
        """The target; a module without weights of its own."""
        return self._held[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the target on its own arguments; return its own outputs."""
        latents, buffers, state = functions(self)
        params = generate(self.spec, latents, buffers)
        outputs, after = apply(self.target, params, state, *args, **kwargs)
        with torch.no_grad():
            for name, tensor in state.items():
                tensor.copy_(after[name])
        return outputs

    def params(self) -> Any:
        """Make the weights, in the target's structure; differentiable."""
        latents, buffers, _ = functions(self)
        return generate(self.spec, latents, buffers)

    def train(self, mode: bool = True) -> Self:
        """Put the target in train or eval mode too."""
        super().train(mode)
        if isinstance(self.target, nn.Module):
            self.target.train(mode)
        return self

    @property
    def trainable_parameter_count(self) -> int:
        """Trained numbers: the latents."""
        return count(self.spec).trainable

    @property
    def target_parameter_count(self) -> int:
        """Weights of the target."""
        return count(self.spec).generated

    @property
    def compression_ratio(self) -> float:
        """Weights for each trained number."""
        return count(self.spec).compression_ratio


class Functional(NamedTuple):
    """What the functions of mapfn take, of a :class:`Mapped`; its very tensors."""

    latents: Latents
    buffers: Buffers
    state: State


def functions(mapped: nn.Module) -> Functional:
    """Return the tensors of a module for the functional side: ``latents, buffers, state``.

    Args:
        mapped: a :class:`Mapped`, wrapped by DDP or compiled too.

    Raises:
        TypeError: something else.

    >>> from mapfn import make_spec
    >>> target = nn.Linear(3, 2)
    >>> latents, buffers, state = functions(Mapped(make_spec(target, latent_dim=2), target))
    >>> list(latents), state
    (['(root)'], {})
    """
    own = unwrapped(mapped)
    groups = [group.name for group in own.spec.trained_groups]
    buffers: Buffers = {group.name: {} for group in own.spec.groups}
    fixed = own.fixed.tensors()
    for index, (group, name) in enumerate(own._fixed_names):
        buffers[group][name] = fixed[str(index)]
    return Functional(dict(zip(groups, own.latents, strict=True)), buffers, own.state.tensors())


def unwrapped(mapped: Any) -> Mapped:
    """Return the :class:`Mapped` inside wrappers of DDP, compilation or Accelerate.

    Raises:
        TypeError: there is none.

    >>> from mapfn import make_spec
    >>> mapped = Mapped(make_spec(nn.Linear(3, 2), latent_dim=2), nn.Linear(3, 2))
    >>> unwrapped(nn.DataParallel(mapped)) is mapped
    True
    """
    inner = mapped
    while not isinstance(inner, Mapped):
        inner = getattr(inner, "module", None) or getattr(inner, "_orig_mod", None)
        if not isinstance(inner, nn.Module):
            fix, got = "pass mapfn.nn.Mapped(spec, target)", type(mapped).__name__
            raise TypeError(message("mapped", expected="a Mapped", got=got, fix=fix))
    return inner


class _Tensors(nn.Module):
    """Buffers by dotted name: the names of a target's own, in modules of the same paths."""

    def __init__(self, named: Mapping[str, Tensor], persistent: set[str]) -> None:
        super().__init__()
        self._names = list(named)
        for name, tensor in named.items():
            *path, last = name.split(".")
            holder: nn.Module = self
            for part in path:
                if part not in holder._modules:
                    holder.add_module(part, nn.Module())
                holder = holder.get_submodule(part)
            holder.register_buffer(last, tensor, persistent=name in persistent)

    def tensors(self) -> dict[str, Tensor]:
        """Return them by name, in the order in which they came."""
        return {name: self.get_buffer(name) for name in self._names}


def _copied(state: State) -> State:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def _persistent(target: nn.Module) -> set[str]:
    return set(target.state_dict())


def _without_weights(target: nn.Module) -> nn.Module:
    """Copy a module, its parameters and buffers on ``meta``: nothing is allocated for them."""
    memo: dict[int, Any] = {}
    for parameter in target.parameters():
        blank = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        memo[id(parameter)] = blank
    for buffer in target.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    return copy.deepcopy(target, memo)
