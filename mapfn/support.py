"""Support: which of grad, vmap and fullgraph each layer of a target takes, and why not.

Every layer is run alone, on a copy, on the inputs that it got in one real forward pass. A verdict
holds only where the transform runs and gives the values that eager code gives.
"""

import copy
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mapfn import trees
from mapfn.ensemble import stack
from mapfn.layout import layout, named_tensors, unwrap
from mapfn.spec import Spec
from mapfn.target import apply, init_state
from mapfn.types import State

_LOOP = "loop over the members: [apply(target, generate(spec, z, buffers), s, x) for z in latents]"
_NO_RULE = "have not yet implemented the batching rule for "


class Verdict(NamedTuple):
    """Whether a layer takes one transform."""

    ok: bool
    reason: str = ""
    """Why not, in torch's own words; or what it costs where it does."""
    way_round: str = ""


class Row(NamedTuple):
    """One layer of the target, or the whole."""

    path: str
    type: str
    verdicts: dict[str, Verdict]
    """By column: ``"grad"``, ``"vmap"``, ``"fullgraph"``."""


class Known(NamedTuple):
    """A refusal that has a way round."""

    column: str
    fragment: str
    """A part of torch's error."""
    kind: str
    """Name of a class among the layer's; empty for any layer."""
    reason: str
    """Empty for torch's own words."""
    way_round: str


_BATCH_NORM = "momentum=None reads num_batches_tracked as a Python number"
KNOWN = (
    Known("vmap", "", "_BatchNorm", _BATCH_NORM, "give the layer a number, momentum=0.1"),
    Known("fullgraph", "", "_BatchNorm", _BATCH_NORM, "give the layer a number, momentum=0.1"),
    Known(
        "fullgraph",
        "RNN, GRU, or LSTM",
        "",
        "torch.compile refuses RNN, GRU and LSTM unless allowed",
        "set torch._dynamo.config.allow_rnn = True before compiling",
    ),
    Known("fullgraph", "Data-dependent branching", "", "", "use torch.where or torch.cond"),
    Known("vmap", "data-dependent control flow", "", "", f"use torch.where, or {_LOOP}"),
    Known("grad", "saved tensor hooks", "", "", "use loss.backward(), or drop the checkpointing"),
    Known("grad", "mutate a captured Tensor", "", "", "register that tensor as a buffer"),
    Known("vmap", "", "", "", _LOOP),
)
"""First match wins."""


class Case(NamedTuple):
    """What a transform is tried on: ``run(target, params, state, *args, **kwargs)``."""

    run: Callable[..., tuple[Any, State]]
    target: Any
    params: Any
    """What is differentiated and stacked: a layer's params, or the latents for the whole."""
    state: State
    inputs: tuple[tuple[Any, ...], dict[str, Any]]

    def bind(self) -> Callable[[Any, State], tuple[Any, State]]:
        """Return ``run(params, state)`` on copies, so that no trial sees what another left."""
        target, (args, kwargs) = copied(self.target), fresh(self.inputs)

        def run(params: Any, state: State) -> tuple[Any, State]:
            return self.run(target, params, state, *args, **kwargs)

        return run


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
    one, other = one.detach(), other.detach()
    atol = rtol * float(other.abs().nan_to_num(0, 0, 0).max()) if rtol else 0.0
    return torch.allclose(one, other, rtol=rtol, atol=atol, equal_nan=True)


def tolerance(things: Any) -> float:
    """Return what rounding may change, relatively, by the narrowest dtype inside.

    >>> tolerance([torch.ones(1)]) < 1e-4
    True
    """
    floats = [t.dtype for _, t in parts(things) if isinstance(t, Tensor) and t.is_floating_point()]
    return max((100 * torch.finfo(dtype).eps for dtype in floats), default=0.0)


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


def examine(case: Case) -> dict[str, Verdict]:
    """Try every transform on a case.

    >>> layer = nn.Linear(2, 1)
    >>> case = Case(apply, layer, dict(layer.named_parameters()), {}, ((torch.ones(1, 2),), {}))
    >>> examine(case)["grad"].ok
    True
    """
    return {column: _verdict(column, probe, case) for column, probe in COLUMNS.items()}


def _verdict(column: str, probe: Callable[[Case], None], case: Case) -> Verdict:
    with torch.random.fork_rng(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            probe(case)
        except Exception as error:  # Whatever torch says is the verdict.
            return _explained(column, case.target, str(error) or type(error).__name__)
    texts = [str(warning.message) for warning in caught]
    slow = [text.split(_NO_RULE)[1].split(". ")[0] for text in texts if _NO_RULE in text]
    return Verdict(True, f"loops inside, no batching rule for {slow[0]}" if slow else "")


def _explained(column: str, target: Any, text: str) -> Verdict:
    kinds = {cls.__name__ for cls in type(target).__mro__}
    if getattr(target, "momentum", 0.0) is not None:
        kinds.discard("_BatchNorm")
    first = text.strip().splitlines()[0]
    first = first if len(first) <= 100 else first[:97] + "..."
    for known in KNOWN:
        if known.column == column and known.fragment in text and known.kind in {"", *kinds}:
            return Verdict(False, known.reason or first, known.way_round)
    return Verdict(False, first)


def _eager(case: Case, params: Any) -> tuple[Any, bool]:
    """Return what eager code gives, and whether it drew random numbers on the way."""
    before = [torch.get_rng_state(), *_cuda_states()]
    result = case.bind()(params, case.state)
    return result, bool(differences(before, [torch.get_rng_state(), *_cuda_states()]))


def _cuda_states() -> list[Tensor]:
    return torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []


def _compare(got: Any, wanted: Any) -> None:
    if wrong := differences(got, wanted, tolerance(wanted)):
        raise RuntimeError(f"gives other values than eager code, at {wrong[0] or 'the output'}")


def _try_grad(case: Case) -> None:
    run = case.bind()
    got = torch.func.grad(lambda params: scalar(run(params, case.state)[0]))(case.params)
    random = _eager(case, case.params)[1]
    leaves = trees.map_tensors(lambda t: t.detach().clone().requires_grad_(), case.params)
    total = scalar(case.bind()(leaves, case.state)[0])
    if total.requires_grad and not random:
        tensors = list(trees.tensors(leaves))
        wanted = torch.autograd.grad(total, tensors, materialize_grads=True)
        _compare(list(trees.tensors(got)), list(wanted))


def _try_vmap(case: Case) -> None:
    members = [case.params, trees.map_tensors(lambda t: t.detach() * 0.9, case.params)]
    run, states = case.bind(), [case.state] * 2

    def tensors(params: Any, state: State) -> list[Tensor]:
        return [part for _, part in parts(run(params, state)) if isinstance(part, Tensor)]

    got = torch.vmap(tensors, randomness="different")(stack(members), stack(states))
    results = [_eager(case, member) for member in members]
    if not any(random for _, random in results):
        pairs = [[t for _, t in parts(out) if isinstance(t, Tensor)] for out, _ in results]
        _compare(got, [torch.stack(pair) for pair in zip(*pairs, strict=True)])


def _try_fullgraph(case: Case) -> None:
    torch._dynamo.reset()
    try:
        run = torch.compile(case.bind(), backend="aot_eager", fullgraph=True, dynamic=False)
        got = run(case.params, case.state)
    finally:
        torch._dynamo.reset()
    wanted, random = _eager(case, case.params)
    if not random:
        _compare(got, wanted)


COLUMNS: dict[str, Callable[[Case], None]] = {
    "grad": _try_grad,
    "vmap": _try_vmap,
    "fullgraph": _try_fullgraph,
}
"""The columns of the table: each a trial that raises where the transform does not hold."""
