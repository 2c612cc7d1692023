"""Specs: which leaves share latents, how many, and what a group may have for itself."""

import itertools
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import mapfn
from mapfn.strategies import split


def network():
    return nn.ModuleDict(
        {
            "conv": nn.Conv2d(1, 4, 3),
            "norm": nn.BatchNorm2d(4),
            "fc": nn.Linear(16, 8),
            "head": nn.Linear(8, 3),
        }
    )


def dims(spec):
    return {group.name: group.latent_dim for group in spec.groups}


def members(spec):
    return {group.name: [leaf.name for leaf in group.leaves] for group in spec.groups}


def test_slvt_has_one_group():
    spec = mapfn.make_spec(network(), strategy="slvt", latent_dim=10)
    assert dims(spec) == {"all": 10}
    assert members(spec)["all"] == [name for name, _ in network().named_parameters()]
    assert spec == mapfn.make_spec(network(), strategy=mapfn.slvt(), latent_dim=10)


def test_layerwise_has_one_group_a_module():
    spec = mapfn.make_spec(network(), latent_dim=10)
    assert dims(spec) == {"conv": 10, "norm": 8, "fc": 10, "head": 10}
    assert members(spec)["norm"] == ["norm.weight", "norm.bias"]
    assert spec.groups[1].requested_dim == 10
    assert spec == mapfn.make_spec(network(), strategy=mapfn.layerwise(), latent_dim=10)


def test_groups_of_names_globs_and_the_rest():
    strategy = mapfn.grouped(
        {"ends": ["conv.weight", "head.*"], "others": ..., "bias": ["conv.b*"]}
    )
    spec = mapfn.make_spec(network(), strategy=strategy, latent_dim=5)
    assert members(spec) == {
        "ends": ["conv.weight", "head.weight", "head.bias"],
        "others": ["norm.weight", "norm.bias", "fc.weight", "fc.bias"],
        "bias": ["conv.bias"],
    }
    assert dims(spec) == {"ends": 5, "others": 5, "bias": 4}


def test_a_leaf_that_two_patterns_of_one_group_match_is_there_once():
    spec = mapfn.make_spec(nn.Linear(2, 2), strategy=mapfn.grouped({"a": ["*", "weight"]}))
    assert members(spec) == {"a": ["weight", "bias"]}


def test_globs_match_any_name_of_a_tie_group():
    target = nn.ModuleDict({"embed": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
    target["head"].weight = target["embed"].weight
    spec = mapfn.make_spec(target, strategy=mapfn.grouped({"top": ["head.*"]}), latent_dim=3)
    assert members(spec) == {"top": ["embed.weight"]}


def test_names_with_the_characters_of_a_glob():
    target = {"a[0]": torch.zeros(3), "a0": torch.zeros(2)}
    strategy = mapfn.grouped({"one": ["a[[]0]"], "two": ["a0"]})
    assert members(mapfn.make_spec(target, strategy=strategy)) == {"one": ["a[0]"], "two": ["a0"]}


def test_overrides_by_group_and_glob():
    overrides = {
        "f*": {"latent_dim": 7, "activation": "tanh"},
        "fc": {"mapper": mapfn.hashed(), "activation": "sin", "scale": "he"},
        "norm": {"mapper": mapfn.identity()},
        "conv": {"mapper": mapfn.frozen()},
        "head": {"modulation": None, "base": "init"},
    }
    spec = mapfn.make_spec(network(), strategy=mapfn.layerwise(overrides), latent_dim=5)
    assert dims(spec) == {"conv": 0, "norm": 8, "fc": 7, "head": 5}
    conv, norm, fc, head = spec.groups
    assert (fc.mapper, fc.activation) == (mapfn.hashed(), "sin")  # a later override wins
    assert fc.scales[0] == (2 / 16) ** 0.5
    assert fc.modulation == mapfn.additive(0.01)
    assert (norm.mapper, norm.modulation) == (mapfn.identity(), None)
    assert conv.bases == ("target", "target")
    assert (head.modulation, head.bases) == (None, ("init", "init"))
    assert [group.name for group in spec.trained_groups] == ["norm", "fc", "head"]


def test_frozen_leaves_stay_at_the_targets_tensors():
    target = network()
    spec = mapfn.make_spec(
        target, strategy=mapfn.layerwise({"conv": {"mapper": mapfn.frozen()}}), latent_dim=3
    )
    latents, buffers = mapfn.init(spec, target=target)
    assert set(latents) == {"norm", "fc", "head"}
    params = mapfn.generate(spec, latents, buffers)
    assert torch.equal(params["conv.weight"], target["conv"].weight)
    assert params["conv.weight"].data_ptr() == target["conv"].weight.data_ptr()
    assert not params["conv.weight"].requires_grad


def test_frozen_leaves_at_a_random_base():
    overrides = {"conv": {"mapper": mapfn.frozen(), "base": "init"}}
    spec = mapfn.make_spec(network(), strategy=mapfn.layerwise(overrides), latent_dim=3)
    latents, buffers = mapfn.init(spec)
    kept = mapfn.generate(spec, latents, buffers)["conv.weight"]
    assert torch.equal(kept, mapfn.base_params(spec, buffers)["conv.weight"])
    assert kept.any()


def test_everything_frozen_trains_nothing():
    target = network()
    spec = mapfn.make_spec(target, mapper=mapfn.frozen())
    latents, buffers = mapfn.init(spec, target=target)
    assert latents == {}
    params = mapfn.generate(spec, latents, buffers)
    assert all(torch.equal(params[name], own) for name, own in target.named_parameters())
    assert mapfn.count(spec).trainable == 0
    assert mapfn.count(spec).compression_ratio == float("inf")


def test_identity_leaves_are_trained_directly():
    overrides = {"head": {"mapper": mapfn.identity(), "base": "target"}}
    target = network()
    spec = mapfn.make_spec(target, strategy=mapfn.layerwise(overrides), latent_dim=3)
    latents, buffers = mapfn.init(spec, target=target)
    assert latents["head"].shape == (27,)
    latents["head"] = torch.arange(27.0)
    params = mapfn.generate(spec, latents, buffers)
    head, scale = target["head"], spec.groups[3].scales[0]
    moved = params["head.weight"] - head.weight
    torch.testing.assert_close(moved, scale * torch.arange(24.0).view(3, 8))
    moved = params["head.bias"] - head.bias
    torch.testing.assert_close(moved, scale * torch.arange(24.0, 27.0))


def test_latents_by_group():
    latent_dim = {"conv": 1, "norm": 2, "fc": 3, "head": 400}
    spec = mapfn.make_spec(network(), latent_dim=latent_dim)
    assert dims(spec) == latent_dim | {"head": 27}


def test_latents_by_group_leave_out_frozen_and_own():
    overrides = {"conv": {"mapper": mapfn.frozen()}, "norm": {"latent_dim": 4}}
    strategy = mapfn.layerwise(overrides)
    spec = mapfn.make_spec(network(), strategy=strategy, latent_dim={"fc": 3, "head": 5})
    assert dims(spec) == {"conv": 0, "norm": 4, "fc": 3, "head": 5}


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=12).flatmap(
        lambda sizes: st.tuples(st.just(sizes), st.integers(len(sizes), 2 * sum(sizes) + 10))
    )
)
def test_a_budget_is_spent_exactly(drawn):
    sizes = {str(index): size for index, size in enumerate(drawn[0])}
    parts = split(mapfn.budget(drawn[1]), sizes)
    assert sum(parts.values()) == min(drawn[1], sum(sizes.values()))
    assert all(1 <= parts[name] <= size for name, size in sizes.items())
    by_size = sorted(sizes, key=sizes.get)
    pairs = itertools.pairwise(by_size)
    # A larger group never gets less, but for the one latent that a remainder gives.
    assert all(parts[small] <= parts[large] + 1 for small, large in pairs)


def test_a_budget_follows_the_square_root_of_the_size():
    parts = split(mapfn.budget(1003), {"a": 10_000, "b": 40_000, "c": 490_000})
    assert parts == {"a": 100, "b": 201, "c": 702}


def test_a_budget_of_a_spec_leaves_out_identity_and_frozen_groups():
    overrides = {
        "norm": {"mapper": mapfn.identity()},
        "conv": {"mapper": mapfn.frozen()},
    }
    strategy = mapfn.layerwise(overrides)
    spec = mapfn.make_spec(network(), strategy=strategy, latent_dim=mapfn.budget(30))
    got = dims(spec)
    assert (got["conv"], got["norm"]) == (0, 8)
    assert got["fc"] + got["head"] == 30
    # More than there is: every group is trained as far as it goes.
    full = mapfn.make_spec(network(), strategy=strategy, latent_dim=mapfn.budget(10**9))
    assert dims(full) == {"conv": 0, "norm": 8, "fc": 136, "head": 27}


def test_specs_are_values():
    options = {"latent_dim": mapfn.budget(50), "mapper": mapfn.mlp((4,))}
    spec, twin = (mapfn.make_spec(network(), **options) for _ in range(2))
    assert spec == twin
    assert hash(spec) == hash(twin)
    assert len({spec, twin}) == 1
    assert repr(spec) == repr(twin)
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert not [x for x in vars(spec).values() if isinstance(x, torch.Tensor)]
    with pytest.raises(AttributeError):
        spec.groups = ()


def test_a_spec_is_still_itself_after_use():
    spec, twin = (mapfn.make_spec(network(), latent_dim=3) for _ in range(2))
    mapfn.generate(spec, *mapfn.init(spec))
    mapfn.count(spec)
    assert spec == twin
    assert hash(spec) == hash(twin)


def test_make_spec_touches_nothing():
    target = network()
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    state = torch.get_rng_state()
    mapfn.make_spec(target, latent_dim=3, scale="target", base="init")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
