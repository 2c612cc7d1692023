"""Layers: the transforms that each layer of a target takes, as rows of a table.

Every layer is run alone, with its own generated weights, on the inputs that it got in one real
forward pass.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from mapfn.generation import generate
from mapfn.layout import ROOT, layout, named_tensors, tensors_by_name, unwrap
from mapfn.parts import copied, forked, fresh, parts
from mapfn.spec import Spec
from mapfn.support import Case, Verdict, examine
from mapfn.target import apply, init_state
from mapfn.types import Buffers, Latents, State

WHOLE = "(whole)"


class Row(NamedTuple):
    """One layer of the target, or the whole."""

    path: str
    type: str
    verdicts: dict[str, Verdict]
    """By column: ``"grad"``, ``"vmap"``, ``"fullgraph"``."""
    tried: str
    """Path of the layer that was run: an outer one where this one is never called itself."""


def whole(spec: Spec, target: Any, latents: Latents, buffers: Buffers, inputs: Any) -> Case:
    """Make the case of the whole target: from the latents to its outputs.

    Args:
        spec: the target's spec.
        target: the module or function.
        latents: where to try it.
        buffers: the map's fixed numbers.
        inputs: ``(args, kwargs)`` of one call.
    """

    def run(target: Any, latents: Any, state: State, *args: Any, **kwargs: Any) -> Any:
        return apply(target, generate(spec, latents, buffers), state, *args, **kwargs)

    return Case(run, target, latents, init_state(target), inputs)


def rows(spec: Spec, case: Case, params: Any) -> tuple[Row, ...]:
    """Try every transform on each layer that owns leaves, and on the whole target, last.

    A layer that no call reaches (its weight is read by the layer around it) has the verdicts of
    the nearest layer around it that is called.

    Args:
        spec: the target's spec.
        case: from :func:`whole`.
        params: the generated weights.
    """
    layers: tuple[Row, ...] = ()
    verdicts = examine(case, {})
    if isinstance(case.target, nn.Module):
        # One graph of the whole holds every layer, and a compilation a layer takes long.
        known = {"fullgraph": Verdict(True)} if verdicts["fullgraph"].ok else {}
        layers = _layer_rows(spec, case, params, known)
    blamed = {name: _blamed(name, verdict, layers) for name, verdict in verdicts.items()}
    return (*layers, Row(WHOLE, _kind(unwrapped(case.target)), blamed, WHOLE))


def _blamed(column: str, verdict: Verdict, layers: tuple[Row, ...]) -> Verdict:
    """Explain the whole target's refusal by the first layer that refuses by itself."""
    refusing = [row for row in layers if row.tried == row.path and not row.verdicts[column].ok]
    if verdict.ok or not refusing:
        return verdict
    return Verdict(False, f"see {refusing[0].path}", refusing[0].verdicts[column].way_round)


def unwrapped(target: Any) -> Any:
    """Return a module without its wrappers, a function as it is."""
    return unwrap(target) if isinstance(target, nn.Module) else target


def _kind(target: Any) -> str:
    return type(target).__name__ if isinstance(target, nn.Module) else "function"


def _layer_rows(
    spec: Spec, case: Case, params: Mapping[str, Tensor], known: Mapping[str, Verdict]
) -> tuple[Row, ...]:
    module = copied(unwrap(case.target))
    inputs = _captured(module, params, case)
    tried: dict[Any, dict[str, Verdict]] = {}
    found = []
    for path, real in _owners(spec, module).items():
        called = real
        while called not in inputs:
            called = called.rpartition(".")[0]
        layer = _layer_case(spec, module, called, params, inputs[called])
        key = _signature((layer.target, layer.inputs))
        if key not in tried:
            tried[key] = examine(layer, known)
        kind, outer = type(module.get_submodule(real)).__name__, called or ROOT
        found.append(Row(path, kind, tried[key], path if called == real else outer))
    return tuple(found)


def _captured(module: nn.Module, params: Mapping[str, Tensor], case: Case) -> dict[str, Any]:
    """Run once, with gradients as in training, and keep the first inputs of each module."""
    inputs: dict[str, Any] = {}

    def keep(path: str) -> Callable[..., None]:
        return lambda _, args, kwargs: inputs.setdefault(path, fresh((args, kwargs))) and None

    handles = [
        child.register_forward_pre_hook(keep(path), with_kwargs=True)
        for path, child in module.named_modules()
    ]
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in params.items()}
    args, kwargs = fresh(case.inputs)
    with forked():
        apply(module, leaves, case.state, *args, **kwargs)
    for handle in handles:
        handle.remove()
    return inputs


def _owners(spec: Spec, module: nn.Module) -> dict[str, str]:
    """Map the path of each layer that owns leaves to its path with wrappers."""
    known = {leaf.owner for leaf in spec.layout.leaves}
    names = {plain: real for real, (plain, _, _) in named_tensors(module, "_parameters").items()}
    pairs = {_owner(plain) or ROOT: _owner(real) for plain, real in names.items()}
    return {path: real for path, real in pairs.items() if path in known}


def _owner(name: str) -> str:
    owner = name.rpartition(".")[0].split(".parametrizations.")[0]
    return "" if owner.startswith("parametrizations.") else owner


def _layer_case(
    spec: Spec, module: nn.Module, path: str, params: Mapping[str, Tensor], inputs: Any
) -> Case:
    first = {name: leaf.name for leaf in spec.layout.leaves for name in leaf.names}
    names = {id(tensor): first[name] for name, tensor in tensors_by_name(module).items()}
    layer = module.get_submodule(path)
    own = tensors_by_name(layer)
    leaves = [leaf.name for leaf in layout(layer).leaves]
    return Case(
        apply, layer, {n: params[names[id(own[n])]] for n in leaves}, init_state(layer), inputs
    )


def _signature(thing: Any) -> Any:
    """Describe all but the numbers, so that equal layers are tried once."""
    return tuple(
        (name, (part.shape, part.dtype) if isinstance(part, Tensor) else repr(part))
        for name, part in parts(thing)
    )
