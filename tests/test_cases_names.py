"""Cases from users of neighbouring tools: names, wrappers, ties, trees, parametrizations."""

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, parametrize

import mapfn


@pytest.fixture(scope="module")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Be the only rank of a process group, for DDP."""
    path: Path = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", store=dist.FileStore(str(path), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "compile": compiled,
    "DataParallel": nn.DataParallel,
    "DDP": nn.parallel.DistributedDataParallel,
    "checkpoint": checkpoint_wrapper,
}


class Net(nn.Module):
    """Has a child, a buffer, and attributes that are called as wrappers call theirs."""

    def __init__(self, wrap: Callable[[nn.Module], Any] = lambda module: module) -> None:
        super().__init__()
        self.module = wrap(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
        self._orig_mod = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self._orig_mod(self.module(x))


def wrapped(order: str) -> Any:
    """Wrap at the root in the order of the names; what stands before a slash wraps the child."""
    inner, _, outer = order.rpartition("/")
    net: Any = Net(WRAPPERS[inner]) if inner else Net()
    for name in outer.split("+"):
        net = WRAPPERS[name](net)
    return net


@pytest.mark.parametrize(
    "order",
    [
        *WRAPPERS,
        "DDP+compile",
        "compile+DDP",
        "checkpoint+DDP+compile",
        "DataParallel+checkpoint+compile",
        "compile/DDP",
        "checkpoint/DDP+compile",
        "DataParallel/checkpoint",
    ],
)
@pytest.mark.usefixtures("process_group")
def test_wrapper_changes_no_name_and_no_bit(order: str) -> None:
    """C15: a wrapped module's spec, bits and outputs are the plain one's, in any nesting."""
    torch.compiler.reset()
    plain, net, x = Net(), wrapped(order), torch.randn(5, 3)
    spec = mapfn.make_spec(net, latent_dim=4)
    assert spec == mapfn.make_spec(plain, latent_dim=4)
    assert [leaf.name for leaf in spec.layout.leaves] == [n for n, _ in plain.named_parameters()]
    params, state = mapfn.generate(spec, *mapfn.init(spec, seed=2)), mapfn.init_state(net)
    assert list(state) == [name for name, _ in plain.named_buffers()]
    expected, after = mapfn.apply(plain, params, mapfn.init_state(plain), x)
    with torch.no_grad():  # A child that checkpoints has no right gradients, and is refused.
        outputs, new = mapfn.apply(net, params, state, x)
    torch.testing.assert_close((outputs, new), (expected, after), rtol=0, atol=0)


@pytest.mark.usefixtures("process_group")
def test_base_of_a_wrapped_target_is_the_plain_ones() -> None:
    """C15: the target's own tensors are found under their plain names too."""
    plain = Net()
    spec = mapfn.make_spec(plain, base="target", latent_dim=4)
    for wrap in WRAPPERS.values():
        params = mapfn.generate(spec, *mapfn.init(spec, target=wrap(plain)))
        torch.testing.assert_close(params, dict(plain.named_parameters()), rtol=0, atol=0)


class Pair(NamedTuple):
    weight: Tensor
    bias: Tensor | None


def tree(names: str = "ab") -> dict[str, Any]:
    values = {"a": Pair(torch.ones(3, 2), None), "b": [torch.full((2,), 2.0), (torch.zeros(()),)]}
    return {name: values[name] for name in names}


def test_dict_order_decides_nothing() -> None:
    """C20: latents, buffers, params, state and bases go by name, in whatever order they come."""
    target = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Linear(4, 2))
    spec = mapfn.make_spec(target, latent_dim=4)
    latents, buffers = mapfn.init(spec)
    params, state, x = (
        mapfn.generate(spec, latents, buffers),
        mapfn.init_state(target),
        torch.eye(3),
    )

    def turned(tensors: Any) -> Any:
        return dict(reversed(tensors.items()))

    again = mapfn.generate(
        spec, turned(latents), {name: turned(own) for name, own in turned(buffers).items()}
    )
    torch.testing.assert_close(again, params, rtol=0, atol=0)
    torch.testing.assert_close(
        mapfn.apply(target, turned(params), OrderedDict(turned(state)), x),
        mapfn.apply(target, params, state, x),
        rtol=0,
        atol=0,
    )


def test_order_of_a_tree_decides_nothing() -> None:
    """C20: a base is found by name in a tree whose dicts were filled in another order."""
    spec = mapfn.make_spec(tree("ab"), base="target", strategy="slvt", latent_dim=3)
    for target in (tree("ab"), tree("ba")):
        params = mapfn.generate(spec, *mapfn.init(spec, target=target))
        assert list(params) == ["a", "b"]
        assert type(params["a"]) is Pair
        assert (params["a"].weight.tolist(), params["a"].bias) == ([[1.0, 1.0]] * 3, None)
        assert (params["b"][0].tolist(), params["b"][1][0].tolist()) == ([2.0, 2.0], 0.0)
    with pytest.raises(ValueError, match=r"missing 'b.0', 'b.1.0'"):
        mapfn.init(spec, target=tree("a"))


@pytest.mark.parametrize(
    "target",
    [
        nn.Linear(3, 2, bias=False),
        nn.LayerNorm(2, bias=False),
        nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.BatchNorm2d(2, affine=False)),
        nn.MultiheadAttention(4, 2, bias=False),
    ],
    ids=lambda target: type(target).__name__,
)
def test_bias_that_is_none_is_absent(target: nn.Module) -> None:
    """C20: None is no leaf, and no bias appears from anywhere."""
    spec = mapfn.make_spec(target, latent_dim=3)
    assert [leaf.name for leaf in spec.layout.leaves] == [n for n, _ in target.named_parameters()]
    assert not any("bias" in name for name in mapfn.generate(spec, *mapfn.init(spec)))


class Tied(nn.Module):
    """A head, an embedding and a third place that share one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 7, bias=False)
        self.again = nn.ParameterDict({"third": self.embedding.weight})
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(tokens))) + self.again["third"].sum()


@pytest.mark.parametrize(
    "pattern", ["embedding.weight", "head.*", "again.third", "*.weight", "h?ad.weight", "[a]gain.*"]
)
def test_globs_match_every_name_of_a_tie(pattern: str) -> None:
    """C22: any name of a tied tensor finds it, in groups and in scales."""
    groups = {"tied": [pattern], "rest": ["norm.bias"]}
    if pattern != "*.weight":
        groups["rest"].append("norm.weight")
    spec = mapfn.make_spec(Tied(), strategy=mapfn.grouped(groups), scale={pattern: 0.125})
    (first, *_), scale = spec.groups[0].leaves, spec.groups[0].scales[0]
    assert (first.name, scale) == ("embedding.weight", 0.125)
    assert first.aliases == ("head.weight", "again.third")
    assert "embedding.weight is also head.weight, again.third" in mapfn.summary(spec)
    assert mapfn.count(spec).generated == sum(leaf.numel() for leaf in Tied().parameters()) == 27


@pytest.mark.parametrize("pattern", ["lm_head.*", "head", "HEAD.*", ""])
def test_a_glob_that_matches_nothing_is_an_error(pattern: str) -> None:
    """C22: a misspelt glob never means nothing, wherever globs are taken."""
    groups = mapfn.grouped({"tied": [pattern], "rest": ...})
    overrides = mapfn.layerwise({pattern + "x": {"latent_dim": 2}})
    for arguments in ({"strategy": groups}, {"scale": {pattern: 1.0}}, {"strategy": overrides}):
        with pytest.raises(ValueError, match="match"):
            mapfn.make_spec(Tied(), **arguments)


def test_a_tie_has_one_group_and_one_value() -> None:
    """C22: two names of one tensor in two groups are refused; apply gives all places one value."""
    groups = {"one": ["embedding.*"], "two": ["head.*"], "rest": ...}
    with pytest.raises(ValueError, match=r"'embedding.weight' in 'one' and 'two'"):
        mapfn.make_spec(Tied(), strategy=mapfn.grouped(groups))
    target, weight = Tied(), torch.arange(21.0).view(7, 3)
    params = {"embedding.weight": weight, "norm.weight": torch.zeros(3), "norm.bias": torch.ones(3)}
    outputs, _ = mapfn.apply(target, params, {}, torch.tensor([4]))
    assert outputs.tolist() == [(weight.sum(1) + weight.sum()).tolist()]


class Positive(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp()


PARAMETRIZED: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Tensor], Any]] = {
    "orthogonal": (
        lambda: parametrizations.orthogonal(nn.Linear(3, 3, bias=False)),
        lambda weight: weight @ weight.T,
        torch.eye(3),
    ),
    "weight_norm": (
        lambda: parametrizations.weight_norm(nn.Linear(3, 3, bias=False)),
        lambda weight: weight.norm(dim=1, keepdim=True),
        "parametrizations.weight.original0",
    ),
    "positive": (
        lambda: parametrize.register_parametrization(
            nn.Linear(3, 3, bias=False), "weight", Positive()
        ),
        lambda weight: weight.log(),
        "parametrizations.weight.original",
    ),
    "spectral_norm": (
        lambda: parametrizations.spectral_norm(nn.Linear(3, 3, bias=False), n_power_iterations=200),
        lambda weight: torch.linalg.matrix_norm(weight, 2),
        torch.ones(()),
    ),
}


@pytest.mark.parametrize("kind", PARAMETRIZED)
def test_generated_values_pass_through_the_parametrization(kind: str) -> None:
    """C14: the weight that is used fulfils its constraint, and the plain name is refused."""
    build, constraint, expected = PARAMETRIZED[kind]
    torch.manual_seed(0)
    target = build()
    spec = mapfn.make_spec(target, latent_dim=4)
    params, state = mapfn.generate(spec, *mapfn.init(spec)), mapfn.init_state(target)
    outputs, _ = mapfn.apply(target, params, state, torch.eye(3))
    right = params[expected] if isinstance(expected, str) else expected
    torch.testing.assert_close(constraint(outputs.T), right, atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match=r"missing 'parametrizations.*extra 'weight'"):
        mapfn.apply(target, {"weight": torch.eye(3)}, state, torch.eye(3))


SCRIPTED: dict[str, Callable[[nn.Module], Any]] = {
    "script": torch.jit.script,
    "trace": lambda module: torch.jit.trace(module, torch.ones(1, 3)),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("path", ["(root)", "inner", "outer.inner"])
@pytest.mark.parametrize("how", SCRIPTED)
def test_scripted_module_is_refused_by_its_path(how: str, path: str) -> None:
    """C14: scripted and traced modules refuse the swap: the error says where one stands."""
    target: Any = SCRIPTED[how](nn.Linear(3, 3))
    for name in reversed(path.split(".") if path != "(root)" else []):
        target = nn.ModuleDict({name: target})
    uses: list[Callable[[], Any]] = [
        lambda: mapfn.make_spec(target),
        lambda: mapfn.init_state(target),
        lambda: mapfn.apply(target, {}, {}, torch.ones(1, 3)),
        lambda: mapfn.bake(target, {}, {}),
    ]
    for use in uses:
        with pytest.raises(TypeError, match=rf"{re.escape(repr(path))}.*eager.*ScriptModule"):
            use()
