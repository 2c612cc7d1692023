"""Layouts: what a target's tensors look like, as static data.

A layout names every leaf once. Tied names are one leaf with aliases, parametrized tensors appear
under their own names, and the prefixes of wrappers (compiled, data-parallel, checkpointed) are
left out, so that a wrapped module has the layout of the plain one.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mapfn import scales, trees
from mapfn.errors import listing, message

ROOT = "(root)"

# The class name of a wrapper and the attribute that it keeps the wrapped module under. By name:
# importing the classes would load torch's compiler and its distributed package.
_WRAPPERS = {
    "OptimizedModule": "_orig_mod",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "CheckpointWrapper": "_checkpoint_wrapped_module",
}


@dataclass(frozen=True)
class Leaf:
    """One tensor of the target.

    >>> Leaf("fc.weight", (2, 3), "float32", owner="fc").numel
    6
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    """torch's name of the dtype, ``"float32"`` for example."""
    aliases: tuple[str, ...] = ()
    """Other names of the same tied tensor."""
    owner: str = ROOT
    """Path of the module or container that holds it."""
    initial: scales.Initial = scales.Initial(1.0, 0.0, 1)
    """Spread, centre and fan-in of torch's own initialisation."""

    @property
    def numel(self) -> int:
        """Count the elements."""
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Return the dtype itself."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def names(self) -> tuple[str, ...]:
        """List every name of the tie group."""
        return (self.name, *self.aliases)


@dataclass(frozen=True)
class Layout:
    """Every leaf of a target in the target's own order, and the structure they stand in."""

    leaves: tuple[Leaf, ...]
    structure: trees.Structure | None = None
    """The tree to put the leaves into; None for a module, whose params are a flat dict."""

    @property
    def numel(self) -> int:
        """Count the weights."""
        return sum(leaf.numel for leaf in self.leaves)

    def build(self, params: Mapping[str, Tensor]) -> Any:
        """Put named leaves into the target's structure."""
        if self.structure is None:
            return {leaf.name: params[leaf.name] for leaf in self.leaves}
        named = {name: params[leaf.name] for leaf in self.leaves for name in leaf.names}
        return trees.build(self.structure, named)


def layout(target: Any) -> Layout:
    """Read the layout of a module, or of a tree of tensors; allocates nothing.

    Raises:
        TypeError: an object that is neither, a scripted module, complex or integer leaves.
        ValueError: a module without parameters, or one that is lazy and not initialised.

    >>> [leaf.name for leaf in layout(nn.Linear(2, 3)).leaves]
    ['weight', 'bias']
    """
    if isinstance(target, nn.Module):
        target = unwrap(target)
        found = Layout(_tied(_module_leaves(target)))
    else:
        structure, leaves = trees.describe(target)
        rows = ((name, leaf, _parent(name), None) for name, leaf in leaves.items())
        found = Layout(_tied(rows), structure)
    if not found.leaves:
        fix = "pass a module with parameters, or a tree with tensors"
        got = f"none in {type(target).__name__}"
        raise ValueError(message("target", expected="at least one parameter", got=got, fix=fix))
    return found


def tensors_by_name(target: Any) -> dict[str, Tensor]:
    """Return the target's own tensors by plain name, tied names each with the same tensor.

    >>> list(tensors_by_name({"w": torch.zeros(1)}))
    ['w']
    """
    if isinstance(target, nn.Module):
        found = named_tensors(unwrap(target), "_parameters").values()
        return {plain: tensor for plain, tensor, _ in found}
    return trees.describe(target)[1]


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside any nesting of wrappers at the root.

    >>> unwrap(nn.DataParallel(nn.Linear(1, 1)))
    Linear(in_features=1, out_features=1, bias=True)
    """
    while (attribute := _wrapped_attribute(module)) is not None:
        module = getattr(module, attribute)
    return module


def named_tensors(module: nn.Module, kind: str) -> dict[str, tuple[str, Tensor, nn.Module]]:
    """Map each real name of a parameter or buffer to (plain name, tensor, its module).

    Args:
        module: the unwrapped target.
        kind: ``"_parameters"`` or ``"_buffers"``.
    """
    found = {}
    for real, plain, child in _walk(module, "", ""):
        for name, tensor in getattr(child, kind).items():
            if tensor is not None:
                found[real + name] = (plain + name, tensor, child)
    return found


def _walk(module: nn.Module, real: str, plain: str) -> Iterable[tuple[str, str, nn.Module]]:
    """Yield (real prefix, prefix without wrappers, module) for every path to every module."""
    if isinstance(module, torch.jit.ScriptModule):
        fix = "pass the module before torch.jit.script or trace; torch.compile works instead"
        where = f"target {real[:-1] or ROOT!r}"
        raise TypeError(message(where, expected="an eager module", got="a ScriptModule", fix=fix))
    yield real, plain, module
    wrapped = _wrapped_attribute(module)
    for name, child in module._modules.items():
        if child is not None:
            yield from _walk(
                child, f"{real}{name}.", plain if name == wrapped else f"{plain}{name}."
            )


def _wrapped_attribute(module: nn.Module) -> str | None:
    names = (cls.__name__ for cls in type(module).__mro__)
    return next((_WRAPPERS[name] for name in names if name in _WRAPPERS), None)


def _module_leaves(module: nn.Module) -> Iterable[tuple[str, Tensor, str, nn.Module | None]]:
    modules = {plain: child for _, plain, child in _walk(module, "", "")}
    for plain, tensor, _ in named_tensors(module, "_parameters").values():
        owner = _parent(plain).split(".parametrizations.")[0]
        owner = ROOT if owner.startswith("parametrizations.") else owner
        yield plain, tensor, owner, modules["" if owner == ROOT else owner + "."]


def _parent(name: str) -> str:
    return name.rpartition(".")[0] or ROOT


def _tied(rows: Iterable[tuple[str, Tensor, str, nn.Module | None]]) -> tuple[Leaf, ...]:
    """Make one leaf of all names of one tensor object."""
    groups: dict[int, list[tuple[str, Tensor, str, nn.Module | None]]] = {}
    for row in rows:
        groups.setdefault(id(row[1]), []).append(row)
    return tuple(_leaf(group) for group in groups.values())


def _leaf(group: list[tuple[str, Tensor, str, nn.Module | None]]) -> Leaf:
    name, tensor, owner, module = group[0]
    _check_leaf(name, tensor)
    shape = tuple(tensor.shape)
    first = scales.initial(module, name.rpartition(".")[2], shape)
    aliases = tuple(row[0] for row in group[1:])
    return Leaf(name, shape, str(tensor.dtype).removeprefix("torch."), aliases, owner, first)


def _check_leaf(name: str, tensor: Tensor) -> None:
    if nn.parameter.is_lazy(tensor):
        fix = "run one batch through the module first, so that its lazy layers get their shapes"
        where = f"target leaf {name!r}"
        raise ValueError(
            message(where, expected="a shape", got="an uninitialised lazy leaf", fix=fix)
        )
    if type(tensor).__name__ in ("DTensor", "FlatParameter"):
        fix = "map the target before FSDP or tensor parallelism; nothing is left to shard then"
        where, got = f"target leaf {name!r}", f"a {type(tensor).__name__}, a part of one"
        raise TypeError(message(where, expected="a whole tensor", got=got, fix=fix))
    if tensor.layout is not torch.strided:
        fix, where = "pass tensor.to_dense()", f"target leaf {name!r}"
        got = f"the layout {tensor.layout}"
        raise TypeError(message(where, expected="a dense tensor", got=got, fix=fix))
    if not tensor.is_floating_point():
        fix = "keep integers in buffers, and split complex numbers into two real leaves"
        got = f"{tensor.dtype} in {listing([name])}"
        raise TypeError(message("target", expected="real floating-point leaves", got=got, fix=fix))
