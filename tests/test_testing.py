"""assert_fullgraph: passes what is right, and names what is wrong."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from mapfn.testing import assert_fullgraph


def double(x: Tensor) -> Tensor:
    return x * 2


def prints(x: Tensor) -> Tensor:
    print("a side effect")
    return x * 2


def breaks(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    return x * 2


def branches(x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


def counting() -> Callable[[Tensor], Tensor]:
    calls = 0

    def counted(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x * calls

    return counted


def draws(x: Tensor) -> Tensor:
    return x + torch.rand(x.shape)


def differs(x: Tensor) -> Tensor:
    return x + torch.compiler.is_compiling()


def differs_backward(x: Tensor) -> Tensor:
    return x * 2 if torch.compiler.is_compiling() else x.detach() + x


def differs_in_structure(x: Tensor) -> Any:
    return [x + 1] if torch.compiler.is_compiling() else (x + 1,)


def differs_in_number(x: Tensor) -> Any:
    return x + 1, 1 if torch.compiler.is_compiling() else 2


def writes(x: Tensor) -> Tensor:
    return x.add_(1.0)


def constant(x: Tensor) -> int:
    return 3


def fails(graph: Any, inputs: Any) -> Any:
    def run(*inputs: Any) -> Any:
        raise RuntimeError("no such kernel")

    return run


WRONG = [
    (prints, r"\(prints\): expected no graph break, got .*`print`"),
    (breaks, r"\(breaks\): expected no graph break, got .*graph_break"),
    (branches, r"expected no graph break, got Data-dependent branching"),
    (
        counting(),
        r"\(counted\): expected no recompilation, got Recompiling function counted.* calls == 5",
    ),
    (draws, r"expected what eager code computes, got other outputs: it draws random numbers"),
    (differs, r"got other outputs: Tensor-likes are not close.*difference: 1\.0"),
    (differs_backward, r"got other gradients: Tensor-likes are not close"),
    (differs_in_structure, r"expected outputs \(.*\) as in eager code, got \[.*\]"),
    (differs_in_number, r"expected outputs .*, 2\) as in eager code, got .*, 1\)"),
    (writes, r"expected arguments that keep their bits, got tensor 0 .* in place"),
    (constant, r"expected exactly one graph, got 0 in 5 calls"),
]


@pytest.mark.parametrize(("fn", "reason"), WRONG, ids=lambda part: getattr(part, "__name__", ""))
def test_names_what_is_wrong(fn: Callable[[Tensor], Any], reason: str) -> None:
    x = torch.ones(2, requires_grad=fn is differs_backward)
    with pytest.raises(AssertionError, match=r"(?s)^assert_fullgraph.*" + reason + ".*To mend it"):
        assert_fullgraph(fn, x)


def test_a_buffer_changed_in_a_module_is_seen() -> None:
    norm = nn.BatchNorm1d(2)
    with pytest.raises(AssertionError, match="keep their bits, got tensor 2 of them"):
        assert_fullgraph(lambda norm, x: norm(x), norm, torch.eye(2))


def test_a_graph_that_does_not_run_is_named() -> None:
    with pytest.raises(AssertionError, match="expected a graph that runs, got RuntimeError: no su"):
        assert_fullgraph(double, torch.ones(2), backend=fails)


def test_an_error_of_the_function_itself_comes_as_it_is() -> None:
    with pytest.raises(RuntimeError, match=r"shape '.7.' is invalid"):
        assert_fullgraph(lambda x: x.reshape(7), torch.ones(2))


def test_advice_for_random_functions_is_a_seed() -> None:
    with pytest.raises(AssertionError, match=r"To mend it: pass seed=\.$"):
        assert_fullgraph(draws, torch.ones(2))


def test_seed_makes_random_functions_equal() -> None:
    results = assert_fullgraph(draws, torch.zeros(3), seed=4, calls=2)
    with torch.random.fork_rng([]):
        torch.manual_seed(4)
        assert torch.equal(results[0], torch.rand(3))
    assert torch.equal(*results)


def test_results_are_of_new_numbers_each_call() -> None:
    results = assert_fullgraph(double, torch.tensor([1.0, -2.0]), calls=3)
    torch.testing.assert_close(
        torch.stack(results), torch.tensor([[2.0, -4.0], [1.94, -3.88], [1.8818, -3.7636]])
    )


class Pair(NamedTuple):
    left: Any
    right: Any


def test_trees_integers_ties_and_parameters_pass() -> None:
    """A tied tensor stays one tensor, integers keep their values, None and strings pass."""
    shared, index = torch.ones(2), torch.tensor([1, 0])
    arguments = {"pair": Pair(shared, [shared, None]), "name": "add", "index": index}

    def read(arguments: Any, weight: Tensor) -> Any:
        assert arguments["pair"].left is arguments["pair"].right[0]
        total = weight[arguments["index"]] + arguments["pair"].left
        return Pair({"total": total}, [arguments["name"], arguments["index"]])

    weight = nn.Parameter(torch.tensor([3.0, 5.0]))
    first = assert_fullgraph(read, arguments, weight, calls=2)[0]
    assert first.left["total"].tolist() == [6.0, 4.0]
    assert first.right[0] == "add"
    assert first.right[1].tolist() == [1, 0]


def test_nan_equals_nan_and_tolerance_is_asked_for() -> None:
    assert_fullgraph(lambda x: x.log(), torch.tensor([-1.0, 1.0]), calls=2)

    def slightly(x: Tensor) -> Tensor:
        return x * (1.001 if torch.compiler.is_compiling() else 1.0)

    assert_fullgraph(slightly, torch.ones(1), calls=2, tolerance=(1e-2, 0.0))
    with pytest.raises(AssertionError, match="other outputs"):
        assert_fullgraph(slightly, torch.ones(1), calls=2)


def test_backend_gets_one_graph() -> None:
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    assert_fullgraph(double, torch.ones(1), backend=backend)
    assert seen == ["<built-in function mul>"]


def test_arguments_generators_and_caches_are_left_alone() -> None:
    """Caches are emptied after too: a function of the same code compiles anew, without an error."""
    x, generator = torch.ones(2, requires_grad=True), torch.get_rng_state()
    for size in range(1, 12):
        assert_fullgraph(lambda x, size=size: x.sum() * size, torch.ones(size), calls=1)
    assert_fullgraph(draws, x, seed=0)
    assert x.grad is None
    assert x.tolist() == [1.0, 1.0]
    assert torch.equal(torch.get_rng_state(), generator)
