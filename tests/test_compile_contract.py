"""The compile contract: each public pure function is one graph, once, equal to eager code."""

import itertools
from typing import Any

import pytest
import torch
from contract import FUNCTIONS, MAPPERS, STRATEGIES, TRANSFORMS, Cell, mapped, named, settings
from torch import Tensor
from zoo import ZOO

import mapfn
from mapfn.testing import assert_fullgraph

# torch runs these two in a loop over the members, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


def distinct(cell: Cell) -> bool:
    """Leave out what others hold: grad is in grad_and_value, and dropout is one more layer."""
    held = cell.transform == "grad" or cell.target == "dropout"
    return cell.possible and (cell.strategy == "slvt" or not held)


PRODUCT = [
    cell
    for parts in itertools.product(["apply"], MAPPERS, STRATEGIES, ZOO, TRANSFORMS)
    if distinct(cell := Cell(*parts))
]


def covering() -> list[Cell]:
    """Each mapper with each transform; targets wander, and deep maps keep to small graphs."""
    cells = []
    for i, mapper in enumerate(MAPPERS):
        targets = itertools.cycle([*ZOO][i:] + [*ZOO][:i])
        for j, transform in enumerate(TRANSFORMS):
            deep = "mlp" in mapper or transform == "vmap_grad_and_value"
            strategy = "slvt" if deep and j else STRATEGIES[(i + j + 1) % len(STRATEGIES)]
            rows = (Cell("apply", mapper, strategy, target, transform) for target in targets)
            cells.append(next(cell for cell in rows if cell.possible))
    return cells


def others() -> list[Cell]:
    """The other functions, each mapper with each transform, strategies and targets wandering."""
    cells = []
    for index, parts in enumerate(itertools.product(["call", "generate"], MAPPERS, TRANSFORMS)):
        strategy = STRATEGIES[index % len(STRATEGIES)]
        target = list(ZOO)[(index + index // len(TRANSFORMS)) % len(ZOO)]
        cells.append(Cell(*parts[:2], strategy, target, parts[2]))
    return [cell for cell in cells if cell.possible]


FAST = covering()
FEW = [cell for cell in others() if cell.mapper == "hashed"][::3]


@pytest.mark.parametrize("cell", FAST + FEW, ids=named)
def test_one_graph_equal_to_eager(cell: Cell) -> None:
    cell.check()


@pytest.mark.slow
@pytest.mark.parametrize("cell", sorted({*PRODUCT, *others()} - {*FAST, *FEW}), ids=named)
def test_one_graph_equal_to_eager_full_product(cell: Cell) -> None:
    cell.check()


def test_fast_rows_hold_each_value_and_each_mapper_with_each_transform() -> None:
    axes = [["apply", "call", "generate"], MAPPERS, STRATEGIES, ZOO, TRANSFORMS]
    assert [{cell[i] for cell in FAST + FEW} for i in range(5)] == [set(axis) for axis in axes]
    pairs = {(cell.mapper, cell.transform) for cell in FAST}
    assert pairs == set(itertools.product(MAPPERS, TRANSFORMS))
    assert set(FUNCTIONS) == {"apply", "call", "generate"}


@pytest.mark.parametrize("target", ZOO)
def test_base_params(target: str) -> None:
    """One graph where a base is a number (auto), and by reference where it is a tensor (init)."""
    tree, _ = ZOO[target].built()
    spec = mapfn.make_spec(tree, latent_dim=2)
    auto = {"auto": spec, "init": mapfn.make_spec(tree, latent_dim=2, base="init")}
    buffers = {name: mapfn.init(each)[1] for name, each in auto.items()}

    def both(buffers: Any) -> Any:
        return [mapfn.base_params(auto[name], own) for name, own in buffers.items()]

    first = assert_fullgraph(both, buffers, calls=2)[0]
    for got, (name, own) in zip(first, buffers.items(), strict=True):
        torch.testing.assert_close(got, mapfn.base_params(auto[name], own), rtol=0, atol=0)


def test_stack_and_unstack() -> None:
    of = mapped("cnn", "layerwise", "hadamard")
    members = [(of.latents, of.buffers, of.state), (of.latents, of.buffers, of.state)]

    def there_and_back(members: Any) -> Any:
        stacked = mapfn.stack(members)
        return stacked, mapfn.unstack(stacked)

    stacked, back = assert_fullgraph(there_and_back, members, calls=2)[0]
    torch.testing.assert_close(back, members, rtol=0, atol=0)
    torch.testing.assert_close(stacked, mapfn.stack(members), rtol=0, atol=0)


def test_functions_are_captured_as_they_are() -> None:
    """Nothing has to be wrapped: spec and target are arguments as any other."""
    of = mapped("transformer", "slvt", "hashed")
    params = assert_fullgraph(mapfn.generate, of.spec, of.latents, of.buffers, calls=2)[0]
    assert_fullgraph(mapfn.apply, of.target, params, of.state, of.x, calls=2)
    assert_fullgraph(mapfn.call, of.target, params, of.state, of.x, calls=2)
    assert_fullgraph(mapfn.base_params, of.spec, of.buffers, calls=2)


def train(of: Any, step: Any, steps: int = 5) -> tuple[list[Tensor], Any]:
    """Train by plain SGD and return the loss of each step and the last latents and state."""
    latents, state, losses = of.latents, of.state, []
    for _ in range(steps):
        gradients, (value, state) = step(latents, of.buffers, state, of.x)
        latents = {name: z - 0.05 * gradients[name] for name, z in latents.items()}
        losses.append(value)
    return losses, (latents, state)


@pytest.mark.parametrize(
    ("target", "mapper"), [("cnn", "hadamard"), ("transformer", "orthogonal"), ("tree", "hashed")]
)
def test_five_steps_of_training_use_one_graph(target: str, mapper: str) -> None:
    """Latents and state go from step to step, statistics and their int64 count too."""
    of = mapped(target, "slvt", mapper)
    value = FUNCTIONS["apply"](of)

    def step(*arguments: Any) -> Any:
        gradients, (total, state) = torch.func.grad_and_value(value, has_aux=True)(*arguments)
        return gradients, (total, state)

    torch.compiler.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=False)
    got, wanted = train(of, compiled), train(of, step)
    assert counter.frame_count == 1
    assert got[0][0] > got[0][-1]
    torch.testing.assert_close(got, wanted)
    torch.compiler.reset()


def test_many_specs_in_one_process() -> None:
    """More specs than torch's limit of recompilations, through one function."""
    for size in range(1, torch._dynamo.config.recompile_limit + 3):
        spec = mapfn.make_spec(torch.nn.Linear(size, 1), mapper=mapfn.identity())
        latents, buffers = mapfn.init(spec)
        first = assert_fullgraph(mapfn.generate, spec, latents, buffers, calls=1)[0]
        torch.testing.assert_close(first, mapfn.generate(spec, latents, buffers))


def test_step_with_backward_inside_needs_a_setting() -> None:
    """torch refuses ``backward`` in a graph until it is allowed; its text says how."""
    of = mapped("mlp", "slvt", "identity")
    step, arguments = TRANSFORMS["backward"](FUNCTIONS["apply"](of), of)
    with pytest.raises(AssertionError, match="trace_autograd_ops"):
        assert_fullgraph(step, *arguments)
    with settings():
        assert_fullgraph(step, *arguments, calls=2)
