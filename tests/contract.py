"""The axes of the compile contract, and one row of its table."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from zoo import ZOO, loss

import mapfn
from mapfn.layout import layout
from mapfn.testing import assert_fullgraph

MAPPERS = {
    "hadamard": mapfn.hadamard(),
    "orthogonal": mapfn.orthogonal(),
    "hashed": mapfn.hashed(),
    "mlp": mapfn.mlp((5,)),
    "residual_mlp": mapfn.residual_mlp(hidden_dim=4, depth=1),
    "identity": mapfn.identity(),
}
STRATEGIES = ("slvt", "layerwise", "grouped")

Value = Callable[..., tuple[Tensor, Any]]


class Mapped(NamedTuple):
    """A target of the zoo with everything to run it; the fields from latents on are arguments."""

    spec: mapfn.Spec
    target: Any
    latents: Any
    buffers: Any
    state: Any
    x: Tensor

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.latents, self.buffers, self.state, self.x

    @property
    def members(self) -> tuple[Any, ...]:
        """Two members: the latents and the target's state stacked, the rest shared."""
        other = {name: latent * 0.9 for name, latent in self.latents.items()}
        stacked = mapfn.stack([self.latents, other]), mapfn.stack([self.state] * 2)
        return stacked[0], self.buffers, stacked[1], self.x


def mapped(name: str, strategy: str, mapper: str) -> Mapped:
    """Map a target of the zoo, its batches of two."""
    row = ZOO[name]
    tree, target = row.built()
    first = layout(tree).leaves[0].name
    groups = mapfn.grouped({"first": [first], "rest": ...})
    spec = mapfn.make_spec(
        tree,
        strategy=groups if strategy == "grouped" else strategy,
        latent_dim=3,
        mapper=MAPPERS[mapper],
    )
    latents, buffers = mapfn.init(spec, seed=1)
    return Mapped(spec, target, latents, buffers, mapfn.init_state(target), row.inputs(2))


def through_apply(of: Mapped) -> Value:
    """Make the loss of one batch and the new state, as a function of the arguments."""

    def value(latents: Any, buffers: Any, state: Any, x: Tensor) -> tuple[Tensor, Any]:
        params = mapfn.generate(of.spec, latents, buffers)
        outputs, state = mapfn.apply(of.target, params, state, x)
        return loss(outputs), state

    return value


def through_call(of: Mapped) -> Value:
    """The same by ``call``, in a mode of its own; a function target has none and is applied."""
    if not isinstance(of.target, torch.nn.Module):
        return through_apply(of)

    def value(latents: Any, buffers: Any, state: Any, x: Tensor) -> tuple[Tensor, Any]:
        params = mapfn.generate(of.spec, latents, buffers)
        outputs, state = mapfn.call(of.target, params, state, x, training=False)
        return loss(outputs), state

    return value


def through_generate(of: Mapped) -> Value:
    """Make one number of all generated weights."""

    def value(latents: Any, buffers: Any, state: Any, x: Tensor) -> tuple[Tensor, Any]:
        params = mapfn.generate(of.spec, latents, buffers)
        return sum(loss(leaf[None]) for leaf in mapfn.trees.tensors(params)), state

    return value


FUNCTIONS = {"apply": through_apply, "call": through_call, "generate": through_generate}


def forward(value: Value, of: Mapped) -> tuple[Value, tuple[Any, ...]]:
    """Run; leaf autograd comes from outside of the graph, as in a plain training loop."""
    leaves = {name: latent.clone().requires_grad_() for name, latent in of.latents.items()}
    return value, (leaves, *of.arguments[1:])


def grad(value: Value, of: Mapped) -> tuple[Value, tuple[Any, ...]]:
    return torch.func.grad(value, has_aux=True), of.arguments


def grad_and_value(value: Value, of: Mapped) -> tuple[Value, tuple[Any, ...]]:
    return torch.func.grad_and_value(value, has_aux=True), of.arguments


def vmap(value: Value, of: Mapped) -> tuple[Value, tuple[Any, ...]]:
    over = torch.vmap(value, in_dims=(0, None, 0, None), randomness="different")
    return over, of.members


def vmap_grad_and_value(value: Value, of: Mapped) -> tuple[Value, tuple[Any, ...]]:
    return vmap(torch.func.grad_and_value(value, has_aux=True), of)


def backward(value: Value, of: Mapped) -> tuple[Value, tuple[Any, ...]]:
    """A whole train step: leaf autograd and plain SGD inside of the graph."""

    def step(latents: Any, *frozen: Any) -> tuple[Any, Any]:
        leaves = {name: latent.detach().requires_grad_() for name, latent in latents.items()}
        total, state = value(leaves, *frozen)
        total.backward()
        return {name: leaf.detach() - 0.1 * leaf.grad for name, leaf in leaves.items()}, state

    return step, of.arguments


TRANSFORMS = {
    each.__name__: each
    for each in (forward, grad, grad_and_value, vmap, vmap_grad_and_value, backward)
}


@contextmanager
def settings() -> Iterator[None]:
    """What torch asks of the caller: for ``backward`` in a graph, and for LSTMs on the CPU."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = False
    try:
        with torch._dynamo.config.patch(trace_autograd_ops=True, allow_rnn=True):
            yield
    finally:
        torch.backends.mkldnn.enabled = before


class Cell(NamedTuple):
    """One row of the table."""

    function: str
    mapper: str
    strategy: str
    target: str
    transform: str

    @property
    def possible(self) -> bool:
        """Whether torch has this transform for this target."""
        return self.function == "generate" or self.transform not in ZOO[self.target].refuses

    def check(self, **options: Any) -> list[Any]:
        of = mapped(self.target, self.strategy, self.mapper)
        fn, arguments = TRANSFORMS[self.transform](FUNCTIONS[self.function](of), of)
        with settings():
            return assert_fullgraph(fn, *arguments, seed=0, **{"calls": 2} | options)


def named(cell: Cell) -> str:
    return "-".join(cell)
