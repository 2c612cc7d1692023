"""The compile contract as one assertion: one graph, no break, no recompile, equal to eager."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mapfn import trees
from mapfn.errors import message
from mapfn.parts import forked, random_state, same

# Lines of torch's explanation behind which only links and Dynamo's own internals follow.
_ENDS = ("Developer debug context", "For more details", "from user code", "- User stack trace")


def assert_fullgraph(
    fn: Callable[..., Any],
    *args: Any,
    backend: str | Callable[..., Any] = "aot_eager",
    calls: int = 5,
    seed: int | None = None,
    tolerance: tuple[float, float] | None = None,
) -> list[Any]:
    """Assert that a function is captured whole, once, and computes what eager code computes.

    The function is compiled with ``fullgraph=True, dynamic=False`` and called ``calls`` times,
    each time with new numbers: the floating tensors of ``args``, a little smaller. Where the
    results hang on tensors of ``args`` that require a gradient, the gradients are compared too.
    Every call gets copies, and ``torch.compile``'s caches are emptied before and after.

    Args:
        fn: the function. What it compiles to must follow from its arguments alone.
        *args: trees of tensors, modules, specs, plain values; tensors are copied, modules not.
        backend: of ``torch.compile``, a name or a function; by default one that traces forward
            and backward pass through AOTAutograd and runs them without a compiler.
        calls: how often the one graph is used.
        seed: of torch's random generators, set before each call, for a target with dropout.
        tolerance: ``(rtol, atol)`` of the comparison, None for the dtype's own.

    Returns:
        The compiled results, one a call.

    Raises:
        AssertionError: a graph break, a recompilation, no graph at all; an argument changed in
            place; a structure, results or gradients other than eager code's. With the reason.

    >>> def gradient(z, x):
    ...     return torch.func.grad(lambda z: (x @ z).square().sum())(z)
    >>> first, second = assert_fullgraph(gradient, torch.ones(2), torch.eye(2), calls=2)
    >>> first
    tensor([2., 2.])
    """
    trial = _Trial(fn, seed, tolerance)
    versions = [_numbered(args, call) for call in range(calls)]
    torch.compiler.reset()
    try:
        with forked():
            # Eager code first: what is wrong with the function itself shows as it is.
            wanted = [_called(trial, fn, _numbered(version, 0)) for version in versions]
            compiled = _compiled_calls(trial, backend, versions)
    finally:
        torch.compiler.reset()
    for one, other in zip(compiled, wanted, strict=True):
        _check_equal(trial, one, other)
    return [outcome.outputs for outcome in compiled]


class _Trial(NamedTuple):
    """What is asserted about."""

    fn: Callable[..., Any]
    seed: int | None
    tolerance: tuple[float, float] | None

    def fault(self, expected: str, got: str, fix: str) -> AssertionError:
        name = getattr(self.fn, "__name__", type(self.fn).__name__)
        where = f"assert_fullgraph({name})"
        return AssertionError(message(where, expected=expected, got=got, fix=fix))


class _Outcome(NamedTuple):
    """What one call gives."""

    outputs: Any
    gradients: list[Tensor]
    random: bool
    """Whether it drew random numbers."""


def _compiled_calls(trial: _Trial, backend: Any, versions: list[Any]) -> list[_Outcome]:
    compiler = torch._dynamo.lookup_backend(backend)
    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any, **options: Any) -> Any:
        made = compiler(graph, inputs, **options)
        # Only now: AOTAutograd may ask for one restart, to take a float64 scalar for a tensor.
        graphs.append(graph)
        return made

    compiled = torch.compile(trial.fn, backend=counting, fullgraph=True, dynamic=False)
    outcomes = [_compiled_call(trial, compiled, _numbered(version, 0)) for version in versions]
    if len(graphs) != 1:
        got, fix = f"{len(graphs)} in {len(versions)} calls", "compute something from the arguments"
        raise trial.fault("exactly one graph", got, fix)
    return outcomes


def _compiled_call(trial: _Trial, compiled: Callable[..., Any], args: Any) -> _Outcome:
    before = [tensor.detach().clone() for tensor in _held(args)]
    try:
        with torch._dynamo.config.patch(error_on_recompile=True):
            outcome = _called(trial, compiled, args)
    except torch._dynamo.exc.RecompileError as error:
        fix = "pass what changes between the calls as a tensor"
        raise trial.fault("no recompilation", _reason(error), fix) from error
    except torch._dynamo.exc.TorchDynamoException as error:
        fix = "use plain tensor operations there, or keep that line out of the compiled function"
        raise trial.fault("no graph break", _reason(error), fix) from error
    except Exception as error:  # Eager code ran, so that torch's compiler is to blame.
        got = f"{type(error).__name__}: {_reason(error)}"
        fix = "find the operation with backend='eager', which leaves out AOTAutograd"
        raise trial.fault("a graph that runs", got, fix) from error
    for index, (old, new) in enumerate(zip(before, _held(args), strict=True)):
        if not same(old, new):
            got, fix = f"tensor {index} of them changed in place", "return the new value instead"
            raise trial.fault("arguments that keep their bits", got, fix)
    return outcome


def _called(trial: _Trial, fn: Callable[..., Any], args: Any) -> _Outcome:
    """Call, and differentiate where that can be."""
    if trial.seed is not None:
        torch.manual_seed(trial.seed)
    before = random_state()
    outputs = fn(*args)
    gradients = _gradients(outputs, args)
    moved = not all(map(torch.equal, before, random_state()))
    return _Outcome(outputs, gradients, moved)


def _gradients(outputs: Any, args: Any) -> list[Tensor]:
    """Differentiate the sum of all outputs, each element weighed differently."""
    leaves = [tensor for tensor in _held(args) if tensor.requires_grad]
    roots = [tensor for tensor in trees.tensors(outputs) if tensor.requires_grad]
    if not leaves or not roots:
        return []
    weights = [torch.linspace(0.5, 1.5, root.numel()).to(root).view_as(root) for root in roots]
    return list(torch.autograd.grad(roots, leaves, weights, materialize_grads=True))


def _check_equal(trial: _Trial, got: _Outcome, wanted: _Outcome) -> None:
    one, other = _structure(got.outputs), _structure(wanted.outputs)
    if one != other:
        fix = "return the same structure and the same plain values when traced"
        raise trial.fault(f"outputs {other} as in eager code", one, fix)
    unseeded = wanted.random and trial.seed is None
    why = "it draws random numbers: " if unseeded else ""
    fix = "pass seed=" if unseeded else "compare parts of it to find the operation"
    for what in ("outputs", "gradients"):
        try:
            _assert_close(getattr(got, what), getattr(wanted, what), trial.tolerance)
        except AssertionError as error:
            text = f"other {what}: {why}{_reason(error)}"
            raise trial.fault("what eager code computes", text, fix) from error


def _structure(tree: Any) -> str:
    """Write a tree down, each tensor as its class."""

    def name(leaf: Any) -> Any:
        return type(leaf) if isinstance(leaf, Tensor) else leaf

    return str(trees.map_tensors(name, tree))


def _assert_close(got: Any, wanted: Any, tolerance: tuple[float, float] | None) -> None:
    rtol, atol = tolerance or (None, None)
    for one, other in zip(trees.tensors(got), trees.tensors(wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol, equal_nan=True)


def _reason(error: Exception) -> str:
    """Take torch's own words on one line, without links and internals."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if line.strip()]
    ends = [index for index, line in enumerate(lines) if line.startswith(_ENDS)]
    kept = lines[: ends[0]] if ends else lines
    return "; ".join(line.rstrip(".;:") for line in kept[:8])


def _numbered(args: Any, call: int) -> Any:
    """Copy the tensors of a tree, the floating ones a little smaller at each call.

    A tensor that stands at two places stays one tensor; signs and ranges stay as they are.
    """
    copies: dict[int, Tensor] = {}

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in copies:
            number = leaf.detach().clone()
            number = number * 0.97**call if call and leaf.is_floating_point() else number
            parameter = isinstance(leaf, nn.Parameter)
            number = nn.Parameter(number, requires_grad=False) if parameter else number
            copies[id(leaf)] = number.requires_grad_(leaf.requires_grad)
        return copies[id(leaf)]

    return trees.map_tensors(copied, args)


def _held(args: Any) -> Iterator[Tensor]:
    """Yield every tensor of the arguments, those inside modules too."""
    leaves: list[Any] = []
    trees.map_tensors(leaves.append, args)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, nn.Module):
            yield from (*leaf.parameters(), *leaf.buffers())
