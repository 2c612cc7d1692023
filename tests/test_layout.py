"""Layouts: one leaf a tensor, under plain names, whatever the target is built or wrapped with."""

from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from strategies_for_tests import assert_same
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations

import mapfn
from mapfn.layout import ROOT, layout, tensors_by_name


def names(target):
    return [leaf.name for leaf in layout(target).leaves]


def owners(target):
    return {leaf.name: leaf.owner for leaf in layout(target).leaves}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def test_names_shapes_dtypes_and_sizes():
    found = layout(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2).double()))
    assert [(leaf.name, leaf.shape, leaf.dtype, leaf.numel) for leaf in found.leaves] == [
        ("0.weight", (4, 3), "float32", 12),
        ("0.bias", (4,), "float32", 4),
        ("1.weight", (2, 4), "float64", 8),
        ("1.bias", (2,), "float64", 2),
    ]
    assert found.numel == 26
    assert found.structure is None


def test_root_leaves_belong_to_the_root():
    assert owners(nn.Linear(2, 2)) == {"weight": ROOT, "bias": ROOT}
    target = nn.Sequential(nn.Linear(2, 2))
    target.register_parameter("gain", nn.Parameter(torch.tensor(1.0)))
    assert owners(target) == {"gain": ROOT, "0.weight": "0", "0.bias": "0"}


def test_tied_tensors_are_one_leaf():
    target = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    target["head"].weight = target["embed"].weight
    (leaf,) = layout(target).leaves
    assert leaf.names == ("embed.weight", "head.weight")
    assert leaf.aliases == ("head.weight",)


def test_a_module_at_two_paths_is_one_set_of_leaves():
    shared = nn.Linear(2, 2)
    target = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    assert [leaf.names for leaf in layout(target).leaves] == [
        ("a.weight", "b.0.weight"),
        ("a.bias", "b.0.bias"),
    ]


def test_equal_values_are_not_tied():
    target = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(2)])
    target[1].weight.data = target[0].weight.data
    assert names(target) == ["0.weight", "1.weight"]


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("wrap", "expected"),
    [
        (
            parametrizations.weight_norm,
            ["bias", "parametrizations.weight.original0", "parametrizations.weight.original1"],
        ),
        (nn.utils.weight_norm, ["bias", "weight_g", "weight_v"]),
        (parametrizations.orthogonal, ["bias", "parametrizations.weight.original"]),
        (parametrizations.spectral_norm, ["bias", "parametrizations.weight.original"]),
        (nn.utils.spectral_norm, ["bias", "weight_orig"]),
    ],
)
def test_parametrized_tensors_have_their_own_names(wrap, expected):
    target = wrap(nn.Linear(4, 4))
    assert names(target) == expected == [name for name, _ in target.named_parameters()]
    assert set(owners(target).values()) == {ROOT}
    inside = nn.Sequential(target)
    assert set(owners(inside).values()) == {"0"}
    assert [group.name for group in mapfn.make_spec(inside, latent_dim=2).groups] == ["0"]


@pytest.mark.parametrize(
    "wrap",
    [
        torch.compile,
        nn.DataParallel,
        checkpoint_wrapper,
        lambda m: nn.DataParallel(torch.compile(m)),
        lambda m: torch.compile(checkpoint_wrapper(m)),
        lambda m: nn.DataParallel(nn.DataParallel(checkpoint_wrapper(m))),
    ],
    ids=["compiled", "parallel", "checkpoint", "both", "compiled checkpoint", "three"],
)
def test_wrappers_leave_no_trace(wrap):
    plain = mapfn.make_spec(network(), latent_dim=4)
    wrapped = mapfn.make_spec(wrap(network()), latent_dim=4)
    assert wrapped == plain
    assert hash(wrapped) == hash(plain)
    assert_same(
        mapfn.generate(wrapped, *mapfn.init(wrapped, 1)),
        mapfn.generate(plain, *mapfn.init(plain, 1)),
    )


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, checkpoint_wrapper])
def test_wrappers_inside_leave_no_trace(wrap):
    inside = network()
    inside[0] = wrap(inside[0])
    inside[2] = nn.DataParallel(wrap(inside[2]))
    assert layout(inside) == layout(network())
    assert list(tensors_by_name(inside)) == list(tensors_by_name(network()))


class Owner(nn.Module):
    def __init__(self):
        super().__init__()
        self.module = nn.Linear(2, 3)
        self._orig_mod = nn.Linear(3, 1)


def test_a_users_own_attribute_called_module_stays():
    expected = ["module.weight", "module.bias", "_orig_mod.weight", "_orig_mod.bias"]
    assert names(Owner()) == expected
    assert names(nn.DataParallel(Owner())) == expected


def test_meta_targets_have_the_same_layout():
    with torch.device("meta"):
        hollow = network()
    assert layout(hollow) == layout(network())
    assert mapfn.make_spec(hollow, latent_dim=3) == mapfn.make_spec(network(), latent_dim=3)


def test_absent_biases_scalars_empty_tensors_and_five_dimensions():
    target = nn.ParameterDict({"scalar": nn.Parameter(torch.tensor(2.0))})
    target["empty"] = nn.Parameter(torch.zeros(0, 3))
    whole = nn.ModuleDict(
        {"own": target, "conv": nn.Conv3d(2, 4, 3, bias=False), "list": nn.ModuleList([network()])}
    )
    shapes = {leaf.name: leaf.shape for leaf in layout(whole).leaves}
    assert shapes["own.scalar"] == ()
    assert shapes["own.empty"] == (0, 3)
    assert shapes["conv.weight"] == (4, 2, 3, 3, 3)
    assert "conv.bias" not in shapes
    assert shapes["list.0.2.bias"] == (2,)
    params = mapfn.generate(*(lambda s: (s, *mapfn.init(s)))(mapfn.make_spec(whole, latent_dim=4)))
    assert {name: tuple(t.shape) for name, t in params.items()} == shapes
    assert all(tensor.isfinite().all() for tensor in params.values())


def test_a_module_of_empty_leaves_alone_makes_a_spec():
    target = nn.ModuleDict({"fc": nn.Linear(2, 2), "none": nn.ParameterList([torch.zeros(0, 3)])})
    spec = mapfn.make_spec(target, latent_dim=4)
    assert {g.name: g.latent_dim for g in spec.groups} == {"fc": 4, "none": 0}
    params = mapfn.generate(spec, *mapfn.init(spec))
    assert params["none.0"].shape == (0, 3)


def test_parameter_list_and_parameter_dict():
    target = nn.ModuleDict({"list": nn.ParameterList([torch.zeros(2), torch.zeros(3)])})
    target["dict"] = nn.ParameterDict({"b": torch.zeros(1), "a": torch.zeros(1)})
    assert names(target) == [name for name, _ in target.named_parameters()]
    assert set(names(target)) == {"list.0", "list.1", "dict.b", "dict.a"}
    assert set(owners(target).values()) == {"list", "dict"}


def test_buffers_are_no_leaves():
    assert names(nn.BatchNorm1d(3)) == ["weight", "bias"]


def test_parameters_without_gradient_are_leaves():
    target = network()
    target[0].weight.requires_grad_(False)
    assert "0.weight" in names(target)


class Pair(NamedTuple):
    left: object
    right: object


def nested():
    shared = torch.zeros(2)
    return {
        "b": {1: torch.zeros(1), 0: [torch.zeros(2), (torch.zeros(3), None)]},
        "a": Pair(OrderedDict(z=torch.zeros(4), y=shared), shared),
        "none": None,
        "empty": [],
    }


def test_trees_have_dotted_names_in_their_own_order():
    found = layout(nested())
    assert [leaf.names for leaf in found.leaves] == [
        ("b.1",),
        ("b.0.0",),
        ("b.0.1.0",),
        ("a.left.z",),
        ("a.left.y", "a.right"),
    ]
    assert owners(nested())["b.0.1.0"] == "b.0.1"
    assert owners({"x": torch.zeros(1)}) == {"x": ROOT}
    assert names([torch.zeros(3)]) == ["0"]


def test_trees_are_put_together_again():
    spec = mapfn.make_spec(nested(), latent_dim=2)
    params = mapfn.generate(spec, *mapfn.init(spec))
    assert list(params) == ["b", "a", "none", "empty"]
    assert list(params["b"]) == [1, 0]
    assert type(params["a"]) is Pair
    assert type(params["a"].left) is OrderedDict
    assert list(params["a"].left) == ["z", "y"]
    assert type(params["b"][0]) is list
    assert type(params["b"][0][1]) is tuple
    assert params["b"][0][1][1] is None
    assert params["none"] is None
    assert params["empty"] == []
    assert params["a"].left["y"] is params["a"].right
    assert params["b"][0][1][0].shape == (3,)


def test_a_single_tensor_is_a_tree():
    spec = mapfn.make_spec(torch.zeros(3, 2), latent_dim=2)
    assert mapfn.generate(spec, *mapfn.init(spec)).shape == (3, 2)


def test_dict_order_is_part_of_a_tree_and_not_of_its_numbers():
    one = {"a": torch.zeros(3), "b": torch.zeros(2)}
    other = {"b": torch.zeros(2), "a": torch.zeros(3)}
    params = []
    for target in (one, other):
        groups = mapfn.grouped({"one": ["a"], "two": ["b"]})
        spec = mapfn.make_spec(target, strategy=groups, latent_dim=2)
        params.append(mapfn.generate(spec, *mapfn.init(spec, 1)))
    assert [list(p) for p in params] == [["a", "b"], ["b", "a"]]
    assert torch.equal(params[0]["a"], params[1]["a"])
    assert torch.equal(params[0]["b"], params[1]["b"])
