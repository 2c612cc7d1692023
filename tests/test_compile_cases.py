"""The compile contract on shapes that users of neighbouring tools met, and torch's own limits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract import MAPPERS, mapped, settings, through_apply
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import mapfn
from mapfn.testing import assert_fullgraph


def on_latents(target: str = "mlp", mapper: str = "hashed") -> tuple[Callable[..., Tensor], Any]:
    """Return the loss as a function of the one latent and a batch, and the latent."""
    of = mapped(target, "slvt", mapper)
    value = through_apply(of)

    def total(latent: Tensor, x: Tensor) -> Tensor:
        return value({"all": latent}, of.buffers, of.state, x)[0]

    return total, of


def test_vmap_with_an_output_that_no_member_has() -> None:
    """C6: `out_dims=None` beside a mapped output, one graph."""
    total, of = on_latents()

    def shared(latents: Tensor, x: Tensor) -> Any:
        over = torch.vmap(lambda z: (total(z, x), x.sum()), out_dims=(0, None))
        return over(latents)

    latents = torch.stack([of.latents["all"], of.latents["all"] * 2])
    values, common = assert_fullgraph(shared, latents, of.x)[0]
    assert values.tolist() == pytest.approx([float(total(z, of.x)) for z in latents], rel=1e-5)
    assert common.shape == ()
    assert float(common) == pytest.approx(float(of.x.sum()), rel=1e-5)


def test_one_function_inside_and_outside_of_transforms() -> None:
    """C6: the same loss plainly, under grad, and under vmap, in one graph without a recompile."""
    total, of = on_latents()

    def everything(latent: Tensor, x: Tensor) -> Any:
        members = torch.stack([latent, 2 * latent])
        per_member = torch.vmap(total, in_dims=(0, None))(members, x)
        return total(latent, x), torch.func.grad(total)(latent, x), per_member

    value, gradient, members = assert_fullgraph(everything, of.latents["all"], of.x)[0]
    assert float(members[0]) == pytest.approx(float(value), rel=1e-5)
    step = 1e-3 * gradient
    ahead, behind = (float(total(of.latents["all"] + sign * step, of.x)) for sign in (1, -1))
    slope = 2e-3 * float(gradient.square().sum())
    assert ahead - behind == pytest.approx(slope, rel=0.05)


@pytest.mark.parametrize("mapper", ["identity", pytest.param("hadamard", marks=pytest.mark.slow)])
def test_inner_loop_of_gradient_steps_inside_vmap_inside_grad(mapper: str) -> None:
    """C6: learning a start point for several tasks, each two gradient steps away from it."""
    total, of = on_latents(mapper=mapper)

    def adapted(latent: Tensor, x: Tensor) -> Tensor:
        for _ in range(2):
            latent = latent - 0.1 * torch.func.grad(total)(latent, x)
        return total(latent, x)

    def outer(latent: Tensor, tasks: Tensor) -> Tensor:
        def mean(latent: Tensor) -> Tensor:
            return torch.vmap(adapted, in_dims=(None, 0))(latent, tasks).mean()

        return torch.func.grad(mean)(latent)

    tasks = torch.stack([of.x, of.x.flip(0) * 0.5, -of.x])
    got = assert_fullgraph(outer, of.latents["all"], tasks, calls=2)[0]
    leaf = of.latents["all"].clone().requires_grad_()
    (wanted,) = torch.autograd.grad(sum(adapted(leaf, task) for task in tasks) / 3, leaf)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_transforms_go_inside_of_compile(transform: Any) -> None:
    """C7: a transform of a compiled function is refused by torch; compile the transform."""
    of = mapped("mlp", "slvt", "identity")

    def total(latent: Tensor) -> Tensor:
        params = mapfn.generate(of.spec, {"all": latent}, of.buffers)
        return mapfn.apply(of.target, params, of.state, of.x)[0].square().sum()

    latent = of.latents["all"]
    argument = latent if transform is torch.func.grad else torch.stack([latent, latent * 2])
    torch.compiler.reset()
    compiled = torch.compile(total, fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"within a torch\.compile"):
        transform(compiled)(argument)
    got = assert_fullgraph(transform(total), argument, calls=2)[0]
    torch.testing.assert_close(got, transform(total)(argument))


def random_operations(fn: Callable[..., Any], *args: Any) -> tuple[list[str], Any]:
    """Name the operations in the graphs of both passes that draw, and return the first result."""
    seen: list[str] = []

    def reading(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        operations = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        tagged = [each for each in operations if isinstance(each, torch._ops.OpOverload)]
        assert tagged
        seen.extend(str(o) for o in tagged if torch.Tag.nondeterministic_seeded in o.tags)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=reading)
    return seen, assert_fullgraph(fn, *args, calls=2, seed=0, backend=backend)[0]


MODULATIONS = {
    "none": None,
    "affine": mapfn.affine(),
    "low_rank": mapfn.modulate_low_rank(2),
}


@pytest.mark.parametrize(
    ("mapper", "modulation"),
    [*((mapper, "affine") for mapper in MAPPERS), ("hadamard", "low_rank")],
)
def test_no_random_operation_in_the_graph_of_generate(mapper: str, modulation: str) -> None:
    """C18: nothing in the graph draws, and compiled weights are the eager ones to 1e-6."""
    target = torch.nn.Linear(4, 3)
    options = {"mapper": MAPPERS[mapper], "modulation": MODULATIONS[modulation]}
    spec = mapfn.make_spec(target, latent_dim=3, **options)
    latents, buffers = mapfn.init(spec, seed=2)
    leaves = {name: latent.requires_grad_() for name, latent in latents.items()}
    drawing, got = random_operations(mapfn.generate, spec, leaves, buffers)
    assert drawing == []
    torch.testing.assert_close(got, mapfn.generate(spec, latents, buffers), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mapper", [mapfn.hadamard(), mapfn.hashed()], ids=str)
def test_compiled_bits_are_the_eager_ones(mapper: mapfn.types.Mapper) -> None:
    """C18: where the arithmetic is exact, latents of whole numbers, every weight is bit for bit."""
    target = torch.nn.Linear(40, 30)
    spec = mapfn.make_spec(target, latent_dim=16, mapper=mapper, scale={"*": 0.25})
    _, buffers = mapfn.init(spec, seed=2)
    latents = {"(root)": torch.arange(-8.0, 8.0)}
    compiled = torch.compile(mapfn.generate, fullgraph=True)(spec, latents, buffers)
    for name, eager in mapfn.generate(spec, latents, buffers).items():
        assert torch.equal(compiled[name], eager)


def test_random_operations_in_a_graph_are_found() -> None:
    """C18: what looks into the graph above sees the dropout of a target."""
    of = mapped("dropout", "slvt", "identity")
    assert random_operations(through_apply(of), *of.arguments)[0] != []


def test_lstm_is_refused_until_it_is_allowed() -> None:
    """Dynamo says what to set, and `vmap` that there is no batching rule."""
    of = mapped("lstm", "slvt", "identity")
    with pytest.raises(AssertionError, match=r"Set torch\._dynamo\.config\.allow_rnn=True"):
        assert_fullgraph(through_apply(of), *of.arguments)
    over = torch.vmap(through_apply(of), in_dims=(0, None, 0, None))
    with pytest.raises(RuntimeError, match=r"Batching rule not implemented for aten::lstm\.input"):
        over(*of.members)


def test_ensemble_of_lstms_loops_over_its_members() -> None:
    """The way round: one graph that unrolls over the members, allowed by the caller."""
    of = mapped("lstm", "slvt", "hashed")
    value = through_apply(of)

    def each(stacked: Any, buffers: Any, x: Tensor) -> Tensor:
        members = mapfn.unstack(stacked)
        return torch.stack([value(member, buffers, {}, x)[0] for member in members])

    latents = of.members[0]
    with settings():
        got = assert_fullgraph(each, latents, of.buffers, of.x)[0]
    alone = [float(value(member, of.buffers, {}, of.x)[0]) for member in mapfn.unstack(latents)]
    assert got.tolist() == pytest.approx(alone, rel=1e-5)
