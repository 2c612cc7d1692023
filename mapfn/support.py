"""Support: whether code takes grad, vmap and fullgraph; if not, torch's reason and the way round.

A verdict holds only where the transform runs and gives the values that eager code gives. Every
trial runs on copies.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mapfn import trees
from mapfn.ensemble import stack
from mapfn.parts import copied, differences, forked, fresh, parts, random_state, scalar, tolerance
from mapfn.types import State

_LOOP = (
    "loop over the members, [apply(target, generate(spec, z, buffers), state, x) "
    "for z in unstack(latents)]"
)
_NO_RULE = "have not yet implemented the batching rule for "


class Verdict(NamedTuple):
    """Whether a layer takes one transform."""

    ok: bool
    reason: str = ""
    """Why not, in torch's own words; or what it costs where it does."""
    way_round: str = ""


_BATCH_NORM = "momentum=None reads num_batches_tracked as a Python number"
_OLD = "the old torch.nn.utils hook writes its product into the layer"
KNOWN: tuple[tuple[str, str, str, str, str], ...] = (
    ("vmap", "", "_BatchNorm", _BATCH_NORM, "give the layer a number, momentum=0.1"),
    ("fullgraph", "", "_BatchNorm", _BATCH_NORM, "give the layer a number, momentum=0.1"),
    (
        "fullgraph",
        "RNN, GRU, or LSTM",
        "",
        "torch.compile refuses RNN, GRU and LSTM unless allowed",
        "set torch._dynamo.config.allow_rnn = True before compiling",
    ),
    ("fullgraph", "Data-dependent branching", "", "", "use torch.where or torch.cond"),
    ("vmap", "data-dependent control flow", "", "", f"use torch.where, or {_LOOP}"),
    ("grad", "mutate a captured Tensor", "", "", "register that tensor as a buffer"),
    ("vmap", "", "", "", _LOOP),
    ("change", "", "WeightNorm", _OLD, "use torch.nn.utils.parametrizations.weight_norm"),
    ("change", "", "SpectralNorm", _OLD, "use torch.nn.utils.parametrizations.spectral_norm"),
    (
        "change",
        "",
        "Embedding",
        "max_norm edits the weight in place",
        "leave max_norm out, and limit the norms of what the layer returns",
    ),
    ("change", "", "", "", "register it as a buffer, so that state carries it"),
)
"""Refusals that have a way round, first match wins: column, a part of the error, name of a class
among the layer's or its hooks' (empty for any), reason (empty for torch's own words), way round."""


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


def examine(case: Case, known: Mapping[str, Verdict]) -> dict[str, Verdict]:
    """Try every transform on a case, those apart whose verdict is known.

    >>> from mapfn import apply
    >>> layer = torch.nn.Linear(2, 1)
    >>> case = Case(apply, layer, dict(layer.named_parameters()), {}, ((torch.ones(1, 2),), {}))
    >>> examine(case, {})["grad"].ok
    True
    """
    return {
        column: known[column] if column in known else _verdict(column, probe, case)
        for column, probe in COLUMNS.items()
    }


def _verdict(column: str, probe: Callable[[Case], None], case: Case) -> Verdict:
    with forked(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            probe(case)
        except Exception as error:  # Whatever torch says is the verdict.
            return explain(column, case.target, str(error) or type(error).__name__)
    texts = [str(warning.message) for warning in caught]
    slow = [text.split(_NO_RULE)[1].split(". ")[0] for text in texts if _NO_RULE in text]
    return Verdict(True, f"loops inside, no batching rule for {slow[0]}" if slow else "")


def explain(column: str, layer: Any, text: str) -> Verdict:
    """Look a refusal up in the table of known ones.

    >>> explain("fullgraph", torch.nn.Linear(1, 1), "Data-dependent branching").way_round
    'use torch.where or torch.cond'
    """
    kinds = _kinds(layer)
    first = text.strip().splitlines()[0]
    first = first if len(first) <= 100 else first[:97] + "..."
    for wanted, fragment, kind, reason, way_round in KNOWN:
        if wanted == column and fragment in text and kind in {"", *kinds}:
            return Verdict(False, reason or first, way_round)
    return Verdict(False, first)


def _kinds(layer: Any) -> set[str]:
    """Name the layer's classes and those of its hooks, less the ones that do no harm as set."""
    hooks = getattr(layer, "_forward_pre_hooks", {}).values()
    kinds = {cls.__name__ for cls in type(layer).__mro__} | {type(hook).__name__ for hook in hooks}
    if getattr(layer, "momentum", 0.0) is not None:
        kinds.discard("_BatchNorm")
    return kinds if getattr(layer, "max_norm", None) is not None else kinds - {"Embedding"}


def _eager(case: Case, params: Any) -> tuple[Any, bool]:
    """Return what eager code gives, and whether it drew random numbers on the way."""
    before = random_state()
    result = case.bind()(params, case.state)
    return result, bool(differences(before, random_state()))


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
        run = torch.compile(case.bind(), backend="eager", fullgraph=True, dynamic=False)
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
