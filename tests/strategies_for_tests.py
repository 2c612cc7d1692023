"""Small random specs for the laws, and comparisons of trees of tensors."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import optree
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

import mapfn
from mapfn.layout import layout

LINEAR_MAPPERS = (mapfn.hadamard(), mapfn.orthogonal(), mapfn.hashed())
MAPPERS = (*LINEAR_MAPPERS, mapfn.mlp((5, 4)), mapfn.residual_mlp(6, 1), mapfn.identity())
MODULATIONS = (
    None,
    mapfn.additive(0.3),
    mapfn.affine(0.4, 0.2),
    mapfn.modulate_low_rank(2, 0.5),
)
ACTIVATIONS = ("identity", "tanh", "sin")
DECODERS = (mapfn.full(),)
STRATEGIES = ("slvt", "layerwise", "grouped")


class Pair(NamedTuple):
    """A part of a tree target."""

    left: Any
    right: Any


class Tied(nn.Module):
    """An embedding whose weight is also the head's, a norm layer and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, index: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(index))) * self.gain


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))


def tree() -> Any:
    return {
        "z": [torch.randn(3, 2), torch.randn(())],
        7: Pair(torch.randn(4), (torch.randn(1, 2, 3), None)),
        "a": torch.randn(5, dtype=torch.float64),
    }


def half() -> nn.Module:
    return nn.Linear(4, 3, dtype=torch.bfloat16)


TARGETS: tuple[Callable[[], Any], ...] = (perceptron, convolutional, Tied, tree, half)


def built(target: Callable[[], Any]) -> Any:
    """Build a target with the same values every time, the global generator left alone."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return target()


class Case(NamedTuple):
    """A target, a spec of it, and a seed."""

    target: Any
    spec: mapfn.Spec
    seed: int

    def init(self) -> tuple[Any, Any]:
        return mapfn.init(self.spec, self.seed, target=self.target)

    def random(self) -> tuple[Any, Any]:
        """Return what init makes, with latents away from any special point."""
        latents, buffers = self.init()
        numbers = torch.Generator().manual_seed(self.seed % 2**31)
        return {k: torch.randn(z.shape, generator=numbers) for k, z in latents.items()}, buffers


def strategy_for(name: str, target: Any) -> Any:
    if name != "grouped":
        return name
    return mapfn.grouped({"first": [layout(target).leaves[0].name], "rest": ...})


@st.composite
def cases(draw: st.DrawFn, **fixed: Any) -> Case:
    """Draw a target, a spec of it and a seed; keywords are arguments of make_spec held fixed."""
    target = built(draw(st.sampled_from(TARGETS)))
    names = {
        "mapper": MAPPERS,
        "modulation": MODULATIONS,
        "activation": ACTIVATIONS,
        "decoder": DECODERS,
        "scale": ("auto", "he", "target"),
        "base": ("auto", "init", "target"),
        "latent_dim": (1, 2, 3, 5, 8, mapfn.budget(11)),
        "strategy": STRATEGIES,
    }
    drawn = {name: draw(st.sampled_from(values)) for name, values in names.items()} | fixed
    drawn["strategy"] = strategy_for(drawn["strategy"], target)
    seed = draw(st.integers(-(2**40), 2**70))
    return Case(target, mapfn.make_spec(target, **drawn), seed)


def tensors(tree: Any) -> list[Tensor]:
    return optree.tree_leaves(tree)


def copied(tree: Any) -> Any:
    return optree.tree_map(lambda tensor: tensor.detach().clone(), tree)


def assert_same(left: Any, right: Any) -> None:
    """Fail unless two trees have one structure, dtypes and bits."""
    assert optree.tree_structure(left) == optree.tree_structure(right)
    for a, b in zip(tensors(left), tensors(right), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert torch.equal(a, b)


def assert_close(left: Any, right: Any, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    """Fail unless two trees have one structure, shapes, and nearly equal numbers."""
    assert optree.tree_structure(left) == optree.tree_structure(right)
    for a, b in zip(tensors(left), tensors(right), strict=True):
        coarse = torch.bfloat16 in (a.dtype, b.dtype)
        own = 1e-2 if coarse else rtol
        torch.testing.assert_close(a, b, rtol=own, atol=own if coarse else atol, check_dtype=False)


def by_name(case: Case, params: Any) -> Mapping[str, Tensor]:
    """Name the leaves of generated params as the layout does."""
    if case.spec.layout.structure is None:
        return params
    from mapfn.trees import describe

    every = describe(params)[1]
    return {leaf.name: every[leaf.name] for leaf in case.spec.layout.leaves}


def materialised(rows: Callable[[Tensor], Tensor], latent_dim: int) -> Tensor:
    """Build the matrix of a linear function, float64 ``[P, d]``, from unit vectors."""
    unit = torch.eye(latent_dim, dtype=torch.float64)
    return torch.stack([rows(vector) for vector in unit], dim=1)
