"""Cases from users of neighbouring tools: transforms of torch.func, ensembles and graphs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import mapfn

MAPPERS = [
    mapfn.hadamard(),
    mapfn.hashed(),
    mapfn.orthogonal(),
    mapfn.mlp((6,)),
    mapfn.residual_mlp(hidden_dim=6, depth=1),
    mapfn.identity(),
]
each_mapper = pytest.mark.parametrize("mapper", MAPPERS, ids=lambda mapper: type(mapper).__name__)


def bits(tree: Any) -> list[Any]:
    return [tensor.tolist() for tensor in torch.utils._pytree.tree_leaves(tree)]


def test_inner_loop_of_gradient_steps_inside_vmap_inside_grad() -> None:
    """C6: learning a start point through two steps a task equals the loop written out."""
    target = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    spec = mapfn.make_spec(target, strategy="slvt", latent_dim=6)
    latents, buffers = mapfn.init(spec, seed=3)
    start = latents["all"].double()
    inputs, labels = torch.randn(3, 5, 2).double(), torch.randn(3, 5, 1).double()

    def loss(latent: Tensor, x: Tensor, y: Tensor) -> Tensor:
        params = mapfn.generate(spec, {"all": latent}, buffers)
        return (mapfn.apply(target, params, {}, x)[0] - y).square().mean()

    def task(latent: Tensor, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(2):
            latent = latent - 0.1 * torch.func.grad(loss)(latent, x, y)
        return loss(latent, x, y)

    def all_tasks(latent: Tensor) -> Tensor:
        return torch.vmap(task, in_dims=(None, 0, 0))(latent, inputs, labels).sum()

    leaf = start.clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for x, y in zip(inputs, labels, strict=True):
        latent = leaf
        for _ in range(2):
            (step,) = torch.autograd.grad(loss(latent, x, y), latent, create_graph=True)
            latent = latent - 0.1 * step
        total = total + loss(latent, x, y)
    total.backward()
    torch.testing.assert_close(torch.func.grad(all_tasks)(start), leaf.grad)


def test_positional_arguments_are_mapped() -> None:
    """C8: generate, apply and call take what is mapped positionally, spec and target too."""
    target = nn.Linear(3, 2)
    spec = mapfn.make_spec(target, latent_dim=4)
    latents, buffers = map(list, zip(*(mapfn.init(spec, seed) for seed in range(3)), strict=True))
    x = torch.randn(3, 5, 3)
    over_members = torch.vmap(mapfn.generate, in_dims=(None, 0, 0))
    params = over_members(spec, mapfn.stack(latents), mapfn.stack(buffers))
    outputs = [
        torch.vmap(run, in_dims=(None, 0, None, 0))(target, params, {}, x)[0]
        for run in (mapfn.apply, mapfn.call)
    ]
    for index, member in enumerate(zip(latents, buffers, strict=True)):
        own = mapfn.generate(spec, *member)
        for output in outputs:
            torch.testing.assert_close(output[index], x[index] @ own["weight"].T + own["bias"])


def test_keyword_arguments_are_not_mapped() -> None:
    """C8: stacked latents by keyword arrive whole, and are refused instead of broadcast."""
    spec = mapfn.make_spec(nn.Linear(3, 2), latent_dim=4)
    latents, buffers = mapfn.init(spec)
    stacked = mapfn.stack([latents, latents])
    by_keyword = torch.vmap(lambda _, **kwargs: mapfn.generate(spec, buffers=buffers, **kwargs))
    with pytest.raises(ValueError, match=r"expected shape \(4,\), got shape \(2, 4\).*torch.vmap"):
        by_keyword(torch.zeros(2), latents=stacked)


class Products(nn.Module):
    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return first @ second.T


def test_batch_by_keyword_is_whole_in_every_member() -> None:
    """C8: a keyword of the target under vmap is the same for all members."""
    x = torch.randn(4, 3)
    over = torch.vmap(lambda first, **kwargs: mapfn.apply(Products(), {}, {}, first, **kwargs)[0])
    torch.testing.assert_close(over(x, second=x), x @ x.T)


NETS: dict[str, Callable[[], nn.Module]] = {
    "1d": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)),
    "2d": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 1, 1)),
        nn.Conv2d(3, 2, 1),
        nn.BatchNorm2d(2),
        nn.Sigmoid(),
        nn.Flatten(),
    ),
    "bare": lambda: nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, affine=False), nn.Tanh()),
}


@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.jacfwd])
@pytest.mark.parametrize("argument", ["inputs", "latents"])
@pytest.mark.parametrize("net", NETS)
def test_jacobian_of_each_sample_through_batch_norm(
    net: str, argument: str, transform: Callable[..., Any]
) -> None:
    """C9: per-sample Jacobians through eval-mode BatchNorm equal a loop of gradients."""
    target = NETS[net]().double().eval()
    spec = mapfn.make_spec(target, strategy="slvt", latent_dim=5)
    latents, buffers = mapfn.init(spec, seed=2)
    latent, inputs = latents["all"].double(), torch.randn(4, 3, dtype=torch.float64)
    state = mapfn.init_state(target)
    state = {k: v + torch.rand_like(v) if v.is_floating_point() else v for k, v in state.items()}

    def output(latent: Tensor, x: Tensor) -> Tensor:
        params = mapfn.generate(spec, {"all": latent}, buffers)
        return mapfn.apply(target, params, state, x[None])[0][0]

    place = ("latents", "inputs").index(argument)
    got = torch.vmap(transform(output, argnums=place), in_dims=(None, 0))(latent, inputs)
    for sample, x in zip(got, inputs, strict=True):
        leaves = [latent.clone().requires_grad_(), x.clone().requires_grad_()]
        torch.testing.assert_close(sample, torch.stack(rows(output, leaves, place)))


def rows(output: Callable[..., Tensor], leaves: list[Tensor], place: int) -> list[Tensor]:
    """Differentiate one output at a time by leaf autograd."""
    numbers = output(*leaves)
    return [torch.autograd.grad(n, leaves[place], retain_graph=True)[0] for n in numbers]


class RandomOperations(TorchDispatchMode):
    """Writes down every operation that reads a random generator."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@each_mapper
@pytest.mark.parametrize("modulation", [None, mapfn.affine(), mapfn.modulate_low_rank(2)])
def test_no_random_operation(mapper: Any, modulation: Any) -> None:
    """C18: init and generate use no generator of torch, and give the same bits each time."""
    spec = mapfn.make_spec(
        nn.Linear(5, 4), latent_dim=3, mapper=mapper, modulation=modulation, base="init"
    )
    generator = torch.get_rng_state()
    with RandomOperations() as mode:
        first, second = (
            mapfn.generate(spec, {"(root)": torch.ones(spec.groups[0].latent_dim)}, buffers)
            for _, buffers in (mapfn.init(spec, seed=1), mapfn.init(spec, seed=1))
        )
    assert mode.seen == []
    assert bits(first) == bits(second)
    assert torch.equal(torch.get_rng_state(), generator)


def test_random_operations_are_seen() -> None:
    """C18: the counter above counts."""
    with RandomOperations() as mode:
        nn.functional.dropout(torch.rand(3), 0.5)
    assert mode.seen == ["aten.rand.default", "aten.bernoulli_.float"]


def chain(depth: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(depth)))


def nodes(depth: int, strategy: str, mapper: Any) -> tuple[int, int]:
    """Count the graphs, and the nodes in them, of the loss of a mapped chain."""
    torch.compiler.reset()
    target = chain(depth)
    spec = mapfn.make_spec(target, strategy=strategy, latent_dim=4, mapper=mapper)
    latents, buffers = mapfn.init(spec)
    counts: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        counts.append(len(list(graph.graph.nodes)))
        return graph.forward

    @torch.compile(fullgraph=True, dynamic=False, backend=backend)
    def loss(latents: Any, x: Tensor) -> Tensor:
        params = mapfn.generate(spec, latents, buffers)
        return mapfn.apply(target, params, {}, x)[0].sum()

    loss(latents, torch.ones(2, 3))
    return len(counts), sum(counts)


@pytest.mark.parametrize(
    ("strategy", "mapper"), [("slvt", mapfn.hashed()), ("layerwise", mapfn.hadamard())]
)
def test_graph_grows_with_depth_and_no_faster(strategy: str, mapper: Any) -> None:
    """C23: one graph, and each further layer adds the same number of nodes to it."""
    counts = [nodes(depth, strategy, mapper) for depth in (1, 2, 4)]
    assert [graphs for graphs, _ in counts] == [1, 1, 1]
    one, two, four = (number for _, number in counts)
    assert four - two == 2 * (two - one) > 0


@each_mapper
@pytest.mark.parametrize("members", [1, 3])
def test_stacked_members_are_the_single_ones(mapper: Any, members: int) -> None:
    """C24: member k is `init` with seed k bit for bit, and unstack gives it back."""
    spec = mapfn.make_spec(nn.Linear(3, 2), latent_dim=4, mapper=mapper)
    single = [mapfn.init(spec, seed=seed) for seed in range(members)]
    stacked = mapfn.stack(single)
    for tensor in torch.utils._pytree.tree_leaves(stacked):
        assert (tensor.is_leaf, tensor.grad_fn, len(tensor)) == (True, None, members)
    for seed, member in enumerate(mapfn.unstack(stacked)):
        assert bits(member) == bits(mapfn.init(spec, seed=seed))


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD, torch.optim.RMSprop])
def test_optimizers_take_stacked_latents(make: type[torch.optim.Optimizer]) -> None:
    """C24: an optimizer trains the stacked latents as it trains each member alone."""
    target, x = nn.Linear(3, 2), torch.randn(6, 3)
    spec = mapfn.make_spec(target, latent_dim=4)
    members, buffers = zip(*(mapfn.init(spec, seed=seed) for seed in range(2)), strict=True)

    def loss(latents: Any, buffers: Any) -> Tensor:
        params = mapfn.generate(spec, latents, buffers)
        return mapfn.apply(target, params, {}, x)[0].square().sum()

    def train(latents: Any, total: Callable[[Any], Tensor]) -> Any:
        leaves = {name: latent.clone().requires_grad_() for name, latent in latents.items()}
        optimizer = make(leaves.values(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            total(leaves).backward()
            optimizer.step()
        return {name: leaf.detach() for name, leaf in leaves.items()}

    shared = mapfn.stack(buffers)
    together = train(mapfn.stack(members), lambda z: torch.vmap(loss)(z, shared).sum())
    for index, got in enumerate(mapfn.unstack(together)):
        alone = train(members[index], lambda z, fixed=buffers[index]: loss(z, fixed))
        torch.testing.assert_close(got, alone)
        assert not torch.equal(got["(root)"], members[index]["(root)"])


def test_stacked_latents_are_accepted_as_they_are() -> None:
    """C24: no clone is needed between stack and the optimizer."""
    latents, _ = mapfn.init(mapfn.make_spec(nn.Linear(3, 2), latent_dim=4))
    stacked = mapfn.stack([latents, latents])
    leaf = stacked["(root)"].requires_grad_()
    leaf.sum().backward()
    torch.optim.SGD(stacked.values(), lr=1.0).step()
    torch.testing.assert_close(leaf.detach(), (latents["(root)"] - 1).expand(2, 4))
