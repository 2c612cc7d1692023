"""Parts: take anything apart into tensors and plain values, to copy, compare and weigh it."""

import copy
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn


def parts(thing: Any) -> Iterator[tuple[str, Any]]:
    """Take anything apart: its tensors and plain values, each by its path.

    >>> [name for name, _ in parts({"a": [1, torch.ones(2)]})]
    ['a.0', 'a.1']
    """
    yield from _parts(thing, "", set())


def _parts(thing: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    children = None if isinstance(thing, Tensor) else _children(thing)
    if children is None:
        yield path, thing
    elif id(thing) not in seen:
        seen.add(id(thing))
        for name, child in children:
            yield from _parts(child, f"{path}.{name}" if path else str(name), seen)


def _children(thing: Any) -> Iterable[tuple[Any, Any]] | None:
    if isinstance(thing, weakref.ref):
        return ()
    if isinstance(thing, Mapping):
        return list(thing.items())
    if isinstance(thing, list | tuple):
        return enumerate(thing)
    if isinstance(thing, type | types.ModuleType | types.FunctionType | types.MethodType):
        return None
    return list(vars(thing).items()) if hasattr(thing, "__dict__") else None


def same(one: Any, other: Any, rtol: float = 0.0) -> bool:
    """Compare two values: tensors bit for bit, or within a tolerance; NaN equals NaN.

    >>> same(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]))
    True
    """
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return one is other or (type(one) is type(other) and bool(one == other or one != one))
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    if one.is_meta or not one.numel():
        return True
    one, other = _dense(one), _dense(other)
    equal = (one == other) | ((one != one) & (other != other))
    if rtol and (one.is_floating_point() or one.is_complex()):
        atol = rtol * float(other.abs().nan_to_num(0, 0, 0).max())
        equal |= torch.isclose(one, other, rtol=rtol, atol=atol)
    return bool(equal.all())


def _dense(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def tolerance(things: Any) -> float:
    """Return what rounding may change, relatively, by the narrowest dtype inside.

    >>> tolerance([torch.ones(1)]) < 1e-4
    True
    """
    tensors = (part for _, part in parts(things) if isinstance(part, Tensor))
    steps = [torch.finfo(t.dtype).eps for t in tensors if t.is_floating_point()]
    return max((step * (100 if step < 1e-4 else 4) for step in steps), default=0.0)


def differences(one: Any, other: Any, rtol: float = 0.0) -> list[str]:
    """Name what differs between two trees.

    >>> differences({"a": 1, "b": 2}, {"a": 1, "b": 3})
    ['b']
    """
    before, after = dict(parts(one)), dict(parts(other))
    names = list(before | after)
    gone = [name for name in names if name not in before or name not in after]
    both = [name for name in names if name not in gone]
    return gone + [name for name in both if not same(before[name], after[name], rtol)]


def copied(target: Any) -> Any:
    """Copy a module whole, tensors that hang on a graph included; a function is itself.

    >>> copied(nn.Linear(2, 2)).weight.shape
    torch.Size([2, 2])
    """
    if not isinstance(target, nn.Module):
        return target
    held = (value for child in target.modules() for value in vars(child).values())
    loose = [value for value in held if isinstance(value, Tensor) and value.grad_fn is not None]
    return copy.deepcopy(target, {id(tensor): tensor.detach().clone() for tensor in loose})


def fresh(tree: Any) -> Any:
    """Copy inputs, so that what the target does to them stays in the copy.

    >>> fresh({"x": torch.ones(1), "n": 2})
    {'x': tensor([1.]), 'n': 2}
    """
    memo = {id(part): part.detach().clone() for _, part in parts(tree) if isinstance(part, Tensor)}
    return copy.deepcopy(tree, memo)


def scalar(outputs: Any) -> Tensor:
    """Add up all floating outputs, each element weighed differently.

    A plain sum has no gradient behind a softmax or a norm layer.

    >>> scalar({"y": torch.ones(2), "n": 3}).shape
    torch.Size([])
    """
    total = torch.zeros(())
    for _, part in parts(outputs):
        if isinstance(part, Tensor) and (part.is_floating_point() or part.is_complex()):
            flat = (torch.view_as_real(part) if part.is_complex() else part).reshape(-1)
            index = torch.arange(1, flat.numel() + 1, device=flat.device)
            total = total.to(flat.device) + (flat * torch.cos(index * 1.7)).sum()
    return total


def snapshot(thing: Any) -> dict[str, Any]:
    """Keep what is inside now: tensors as copies, plain values as they are.

    >>> snapshot({"a": torch.ones(1)})
    {'a': tensor([1.])}
    """
    return {
        name: part.detach().clone() if isinstance(part, Tensor) else part
        for name, part in parts(thing)
    }


def random_state() -> list[Tensor]:
    """Read torch's global random generators; those of CUDA where it is in use.

    >>> len(random_state()) >= 1
    True
    """
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *cuda]


def forked() -> AbstractContextManager[None]:
    """Let the global random generators move inside, and put them back.

    >>> before = random_state()
    >>> with forked():
    ...     _ = torch.rand(1)
    >>> differences(before, random_state())
    []
    """
    return torch.random.fork_rng(range(torch.cuda.device_count()))
