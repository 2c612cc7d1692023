"""Proofs: purity, parity and gradient reach of a target on one small batch, on copies."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mapfn import trees
from mapfn.errors import listing
from mapfn.generation import generate
from mapfn.layout import tensors_by_name
from mapfn.parts import (
    copied,
    differences,
    forked,
    fresh,
    random_state,
    scalar,
    snapshot,
    tolerance,
)
from mapfn.spec import Spec
from mapfn.support import explain
from mapfn.target import apply, bake, init_state
from mapfn.types import Buffers, Latents, State

_UNREACHED = (
    "they are unused, detached, or read before the call; use them, or put them in a frozen() group"
)


class Finding(NamedTuple):
    """One thing that was proved, or not."""

    name: str
    ok: bool | None
    """None where it cannot be checked."""
    detail: str = ""


class Exam(NamedTuple):
    """What is examined, and where."""

    spec: Spec
    target: Any
    latents: Latents
    buffers: Buffers
    params: Any
    state: State
    inputs: tuple[tuple[Any, ...], dict[str, Any]]

    def run(self, target: Any, params: Any) -> tuple[Any, State]:
        """Run a copy of the target; the random generators go back after it."""
        args, kwargs = fresh(self.inputs)
        with forked():
            return apply(target, params, self.state, *args, **kwargs)


def prove(exam: Exam) -> tuple[Finding, ...]:
    """Prove everything."""
    return (*purity(exam), *parity(exam), gradient_parity(exam), reach(exam))


def purity(exam: Exam) -> Iterator[Finding]:
    """Prove that one call changes nothing: the target, what is passed in, random generators."""
    before = random_state()
    generate(exam.spec, exam.latents, exam.buffers)
    drew = bool(differences(before, random_state()))
    target, (args, kwargs) = copied(exam.target), fresh(exam.inputs)
    passed = {"params": exam.params, "state": exam.state}
    passed |= {"latents": exam.latents, "buffers": exam.buffers}
    things = target, {"args": args, "kwargs": kwargs}, passed
    kept = [snapshot(thing) for thing in things]
    with forked():
        random = random_state()
        apply(target, exam.params, exam.state, *args, **kwargs)
        uses_random = bool(differences(random, random_state()))
    own, inputs, trees_ = (
        differences(old, snapshot(new)) for old, new in zip(kept, things, strict=True)
    )
    yield _unchanged("purity: target", [_plain(name) for name in own], target)
    yield _unchanged("purity: inputs", inputs, None)
    yield _unchanged("purity: params, state, latents", trees_, target)
    detail = "generate draws random numbers" if drew else ""
    if uses_random and not drew:
        detail = f"the target uses torch's RNG ({_random_layers(target)})"
    yield Finding("purity: random generators", not drew, detail)


def _plain(name: str) -> str:
    return re.sub(r"(^|\.)_(modules|parameters|buffers)(?=\.)\.", r"\1", name)


def _random_layers(target: Any) -> str:
    modules = target.named_modules() if isinstance(target, nn.Module) else ()
    names = [path for path, child in modules if "Dropout" in type(child).__name__]
    return f"dropout: {', '.join(names)}" if names else "dropout, say"


def _unchanged(name: str, changed: list[str], target: Any) -> Finding:
    """Name what changed, by the layer it belongs to, with the way round."""
    kept = [each for each in changed if "_flat_weights." not in each]
    if not kept:
        # torch renews the list from the parameters when it runs the layer: no result depends on it.
        lists = "an RNN's own list keeps the last weights until its next call" if changed else ""
        return Finding(name, True, lists)
    return Finding(name, False, "; ".join(dict.fromkeys(_change(each, target) for each in kept)))


def _change(name: str, target: Any) -> str:
    if target is None:
        return f"{name!r} is changed in place: clone it in the target first"
    _, layer = _holder(name.removeprefix("params."), target)
    verdict = explain("change", layer, name)
    because = f" ({verdict.reason})" if verdict.reason != name else ""
    return f"{name!r} changes{because}: {verdict.way_round}"


def _holder(name: str, target: Any) -> tuple[str, Any]:
    """Find the innermost module that a dotted name leads through."""
    if not isinstance(target, nn.Module):
        return "", target
    found = [(p, m) for p, m in target.named_modules() if name.startswith(p + ".") or not p]
    return max(found, key=lambda pair: len(pair[0]))


def parity(exam: Exam) -> Iterator[Finding]:
    """Prove that the target's own weights give its own outputs and its own state."""
    names = ("parity: outputs", "parity: state")
    reference, (args, kwargs) = copied(exam.target), fresh(exam.inputs)
    if isinstance(reference, nn.Module):
        own = tensors_by_name(reference)
        if any(tensor.is_meta for tensor in own.values()):
            why = "the target is on meta and holds no weights of its own"
            yield from (Finding(name, None, why) for name in names)
            return
        params = {leaf.name: _like(own[leaf.name]) for leaf in exam.spec.layout.leaves}
        with forked():
            outputs = reference(*args, **kwargs)
        wanted = outputs, init_state(reference)
    else:
        params = exam.params
        with forked():
            wanted = reference(params, fresh(exam.state), *args, **kwargs)
    got = exam.run(copied(exam.target), params)
    for name, one, other in zip(names, got, wanted, strict=True):
        yield _equal(name, one, other)


def _like(tensor: Tensor) -> Tensor:
    """Copy a weight, requires_grad included: layers choose their fast path by it."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _equal(name: str, got: Any, wanted: Any) -> Finding:
    if not differences(got, wanted):
        return Finding(name, True, "bit for bit")
    rtol = tolerance(wanted)
    if wrong := differences(got, wanted, rtol):
        return Finding(name, False, f"differs at {listing(each or '(output)' for each in wrong)}")
    return Finding(name, True, f"to {rtol:.0e}")


def gradient_parity(exam: Exam) -> Finding:
    """Compare with a plain module that holds the generated weights itself."""
    name = "parity: gradients"
    if not isinstance(exam.target, nn.Module):
        return Finding(name, None, "a function holds no weights of its own")
    plain = bake(copied(exam.target), exam.params, exam.state).requires_grad_(True)
    own, (args, kwargs) = tensors_by_name(plain), fresh(exam.inputs)
    held = {leaf.name: own[leaf.name] for leaf in exam.spec.layout.leaves}
    lent = {leaf: tensor.detach().clone().requires_grad_() for leaf, tensor in held.items()}
    with forked():
        wanted = _gradients(lambda: plain(*args, **kwargs), held)
    got = _gradients(lambda: exam.run(copied(exam.target), lent)[0], lent)
    if isinstance(got, str) or isinstance(wanted, str):
        reasons = [each for each in (got, wanted) if isinstance(each, str)]
        return Finding(name, False if isinstance(wanted, dict) else None, reasons[0])
    return _equal(name, got, wanted)


def _gradients(forward: Callable[[], Any], leaves: Mapping[str, Tensor]) -> dict[str, Any] | str:
    """Return the gradients by name, None where there is none, or why there are none at all."""
    try:
        total = scalar(forward())
        if not total.requires_grad:
            return "the outputs depend on no weight"
        found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return dict(zip(leaves, found, strict=True))


def reach(exam: Exam) -> Finding:
    """Prove that every latent vector gets a gradient and that every trained leaf takes part."""
    latents = trees.map_tensors(lambda t: t.detach().clone().requires_grad_(), exam.latents)
    params = generate(exam.spec, latents, exam.buffers)
    named = trees.describe(params)[1]
    trained = [leaf.name for group in exam.spec.trained_groups for leaf in group.leaves]
    taking = [leaf for leaf in trained if named[leaf].numel()]
    wanted = {f"group {name!r}": latent for name, latent in latents.items()}
    wanted |= {f"leaf {name!r}": named[name] for name in taking}
    found = _gradients(lambda: exam.run(copied(exam.target), params)[0], wanted)
    if isinstance(found, str):
        every = f"{listing(latents)} get no gradient: {found}"
        return Finding("gradient reach", False, every)
    lacks: dict[str, list[str]] = {}
    for name, gradient in found.items():
        if lack := _lack(name, gradient):
            lacks.setdefault(lack, []).append(name)
    detail = "; ".join(f"{', '.join(names)}: {lack}" for lack, names in lacks.items())
    return Finding("gradient reach", not lacks, detail)


def _lack(name: str, gradient: Tensor | None) -> str:
    """Say what is wrong with one gradient; of a leaf only whether it takes part at all."""
    if gradient is None:
        return f"never reach the outputs, because {_UNREACHED}"
    if not bool(gradient.isfinite().all()):
        return "get a gradient that is NaN or infinite"
    if name.startswith("group") and not bool(gradient.count_nonzero()):
        return "get a gradient that is exactly zero"
    return ""
