"""Laws of init and generate, over every mapper, modulation, activation, strategy and decoder."""

import random
from collections import OrderedDict

import numpy as np
import optree
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies_for_tests import (
    MAPPERS,
    MODULATIONS,
    STRATEGIES,
    Case,
    assert_close,
    assert_same,
    built,
    by_name,
    cases,
    convolutional,
    copied,
    strategy_for,
    tensors,
)
from torch import nn

import mapfn

each_mapper = pytest.mark.parametrize("mapper", MAPPERS, ids=lambda m: type(m).__name__)


@each_mapper
@given(data=st.data())
def test_same_seed_same_bits(mapper, data):
    case = data.draw(cases(mapper=mapper))
    first, second = case.init(), case.init()
    assert_same(first, second)
    assert_same(mapfn.generate(case.spec, *first), mapfn.generate(case.spec, *second))


@each_mapper
@given(data=st.data())
def test_another_seed_gives_other_numbers(mapper, data):
    case = data.draw(cases(mapper=mapper, base="auto"))
    first = case.init()
    second = mapfn.init(case.spec, case.seed + 1)
    for group in case.spec.trained_groups:
        assert not torch.equal(first[0][group.name], second[0][group.name])
        kept = zip(first[1][group.name].values(), second[1][group.name].values(), strict=True)
        # An orthogonal matrix of one number is 1 or -1, whatever the seed.
        assert all(
            not torch.equal(a, b) for a, b in kept if a.numel() > 1 or a.dtype == torch.int64
        )


@each_mapper
@given(data=st.data())
def test_global_generators_are_untouched(mapper, data):
    case = data.draw(cases(mapper=mapper))
    before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
    mapfn.generate(case.spec, *case.init())
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (random.getstate(), repr(np.random.get_state())) == before[1:]


@each_mapper
@given(data=st.data())
def test_inputs_are_unchanged(mapper, data):
    case = data.draw(cases(mapper=mapper))
    latents, buffers = case.random()
    names = list(latents), {group: list(own) for group, own in buffers.items()}
    objects = [id(tensor) for tensor in tensors((latents, buffers))]
    before = copied((latents, buffers))
    mapfn.generate(case.spec, latents, buffers)
    assert_same((latents, buffers), before)
    assert [id(tensor) for tensor in tensors((latents, buffers))] == objects
    assert (list(latents), {group: list(own) for group, own in buffers.items()}) == names


@each_mapper
@given(data=st.data())
def test_params_are_what_the_layout_says(mapper, data):
    case = data.draw(cases(mapper=mapper))
    params = mapfn.generate(case.spec, *case.random())
    had = {name: (tuple(t.shape), t.dtype) for name, t in by_name(case, params).items()}
    assert had == {leaf.name: (leaf.shape, leaf.torch_dtype) for leaf in case.spec.layout.leaves}
    if isinstance(case.target, nn.Module):
        own = {name: (tuple(t.shape), t.dtype) for name, t in case.target.named_parameters()}
        assert had == own
        assert list(params) == list(own)
    else:
        assert optree.tree_structure(params) == optree.tree_structure(case.target)
        assert list(params) == list(case.target)
        for mine, theirs in zip(tensors(params), tensors(case.target), strict=True):
            assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)


@each_mapper
@given(data=st.data())
def test_dict_order_does_not_matter(mapper, data):
    case = data.draw(cases(mapper=mapper))
    latents, buffers = case.random()
    turned = OrderedDict(reversed(latents.items()))
    around = {g: dict(reversed(own.items())) for g, own in reversed(buffers.items())}
    assert_same(
        mapfn.generate(case.spec, turned, around), mapfn.generate(case.spec, latents, buffers)
    )


@each_mapper
@pytest.mark.parametrize("map_buffers", [False, True], ids=["latents", "latents and buffers"])
@given(data=st.data())
def test_vmap_equals_stacked(mapper, map_buffers, data):
    case = data.draw(cases(mapper=mapper))
    members = [Case(case.target, case.spec, case.seed + k).random() for k in range(3)]
    if not map_buffers:
        members = [(latents, members[0][1]) for latents, _ in members]
    latents = mapfn.stack([latents for latents, _ in members])
    buffers = mapfn.stack([own for _, own in members]) if map_buffers else members[0][1]
    dims = (0, 0 if map_buffers else None)

    def generate(z, b):
        # torch.vmap refuses the None in a tree, so the leaves alone.
        return dict(by_name(case, mapfn.generate(case.spec, z, b)))

    together = torch.vmap(generate, in_dims=dims)(latents, buffers)
    alone = [generate(*member) for member in members]
    assert_close(together, optree.tree_map(lambda *parts: torch.stack(parts), *alone))


@each_mapper
@given(data=st.data())
def test_float64_agrees_with_float32(mapper, data):
    case = data.draw(cases(mapper=mapper))
    latents, buffers = case.random()
    wide = {name: z.double() for name, z in latents.items()}
    assert_close(
        mapfn.generate(case.spec, wide, buffers), mapfn.generate(case.spec, latents, buffers)
    )


@each_mapper
@given(data=st.data())
def test_bfloat16_latents_are_only_values(mapper, data):
    case = data.draw(cases(mapper=mapper))
    latents, buffers = case.random()
    short = {name: z.bfloat16() for name, z in latents.items()}
    same = {name: z.float() for name, z in short.items()}
    assert_same(mapfn.generate(case.spec, short, buffers), mapfn.generate(case.spec, same, buffers))


@each_mapper
@given(data=st.data())
def test_autocast_changes_no_bit(mapper, data):
    case = data.draw(cases(mapper=mapper, latent_dim=64))
    latents, buffers = case.random()
    expected = mapfn.generate(case.spec, latents, buffers)
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(mapfn.generate(case.spec, latents, buffers), expected)
        assert torch.is_autocast_enabled("cpu")


@pytest.fixture
def medium_precision():
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


@each_mapper
def test_matmul_precision_changes_no_bit(mapper, medium_precision):
    target = nn.Linear(40, 50)
    spec = mapfn.make_spec(target, mapper=mapper, latent_dim=64)
    latents, buffers = mapfn.init(spec)
    got = mapfn.generate(spec, latents, buffers)
    assert torch.get_float32_matmul_precision() == "medium"
    with pytest.raises(ValueError, match="latents"):
        mapfn.generate(spec, {}, buffers)
    assert torch.get_float32_matmul_precision() == "medium"
    torch.set_float32_matmul_precision("highest")
    assert_same(got, mapfn.generate(spec, latents, buffers))


@each_mapper
@pytest.mark.parametrize("base", ["init", "target"])
@given(data=st.data())
def test_zero_latents_give_exactly_the_base(mapper, base, data):
    case = data.draw(cases(mapper=mapper, base=base))
    latents, buffers = case.init()
    assert all(not z.any() for z in latents.values())
    params = mapfn.generate(case.spec, latents, buffers)
    assert_same(params, mapfn.base_params(case.spec, buffers))
    if base == "target":
        own = case.target
        own = dict(own.named_parameters()) if isinstance(own, nn.Module) else own
        assert_same(params, own)


@each_mapper
@given(data=st.data())
def test_base_tensors_are_held_by_reference(mapper, data):
    case = data.draw(cases(mapper=mapper, base="target"))
    held = mapfn.base_params(case.spec, case.init()[1])
    own = case.target
    own = dict(own.named_parameters()) if isinstance(own, nn.Module) else own
    pointers = [tensor.data_ptr() for tensor in tensors(held)]
    assert pointers == [tensor.data_ptr() for tensor in tensors(own)]


@each_mapper
@pytest.mark.parametrize("modulation", MODULATIONS, ids=lambda m: type(m).__name__)
def test_adding_a_layer_leaves_the_others(mapper, modulation):
    short = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    long = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 6))
    arguments = {"mapper": mapper, "modulation": modulation, "latent_dim": 5}
    for base in ("auto", "init"):
        specs = [mapfn.make_spec(target, base=base, **arguments) for target in (short, long)]
        (few, few_buffers), (many, many_buffers) = (mapfn.init(spec, 7) for spec in specs)
        before = mapfn.generate(specs[0], few, few_buffers)
        after = mapfn.generate(specs[1], many, many_buffers)
        assert len(after) == len(before) + 2
        assert_same({name: many[name] for name in few}, few)
        assert_same({name: many_buffers[name] for name in few_buffers}, few_buffers)
        assert_same({name: after[name] for name in before}, before)


@each_mapper
@given(data=st.data())
def test_count_is_what_autograd_and_init_say(mapper, data):
    case = data.draw(cases(mapper=mapper))
    latents, buffers = case.random()
    for z in latents.values():
        z.requires_grad_()
    sum(t.double().sum() for t in tensors(mapfn.generate(case.spec, latents, buffers))).backward()
    total = mapfn.count(case.spec)
    assert total.trainable == sum(z.grad.numel() for z in latents.values())
    assert total.generated == sum(leaf.numel for leaf in case.spec.layout.leaves)
    fixed = [t for own in buffers.values() for n, t in own.items() if not n.startswith("base.")]
    assert total.stored == sum(t.numel() * t.element_size() for t in fixed)
    assert total.compression_ratio == total.generated / total.trainable


@given(cases())
def test_every_latent_gets_a_gradient(case):
    latents, buffers = case.random()
    for z in latents.values():
        z.requires_grad_()
    params = tensors(mapfn.generate(case.spec, latents, buffers))
    # No plain sum, where gradients could cancel.
    weighted = [(t.double() * torch.linspace(0.5, 1.7, t.numel()).view(t.shape)) for t in params]
    sum(t.sum() for t in weighted).backward()
    if not any(isinstance(group.mapper, mapfn.hashed) for group in case.spec.groups):
        assert all(z.grad.abs().min() > 0 for z in latents.values())


@given(cases())
def test_specs_built_twice_are_equal(case):
    again = mapfn.make_spec(
        case.target,
        strategy=strategy_for("layerwise", case.target),
        mapper=mapfn.mlp((3,)),
        latent_dim=4,
    )
    twin = mapfn.make_spec(case.target, mapper=mapfn.mlp([3]), latent_dim=4)
    assert again == twin
    assert hash(again) == hash(twin)
    assert again != case.spec
    assert {again: 1}[twin] == 1


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("change", [{"latent_dim": 3}, {"mapper": mapfn.hashed()}, {"scale": "he"}])
def test_specs_differ_by_any_argument(strategy, change):
    target = built(convolutional)
    same = {"strategy": strategy_for(strategy, target), "latent_dim": 2}
    assert mapfn.make_spec(target, **same) != mapfn.make_spec(target, **(same | change))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.float16])
def test_leaf_dtypes_are_cast_last(dtype):
    mixed = {"own": torch.zeros(4, 3, dtype=dtype), "single": torch.zeros(4, 3)}
    # The same map and the same numbers in both: the first leaf alone, in two dtypes.
    spec = mapfn.make_spec({"own": mixed["own"]}, latent_dim=3)
    single = mapfn.make_spec({"own": mixed["single"]}, latent_dim=3)
    latents, buffers = mapfn.init(spec, 1)
    got = mapfn.generate(spec, latents, buffers)["own"]
    assert got.dtype == dtype
    assert torch.equal(got, mapfn.generate(single, latents, buffers)["own"].to(dtype))
    both = mapfn.make_spec(mixed, latent_dim=3, strategy="slvt")
    params = mapfn.generate(both, *mapfn.init(both))
    assert (params["own"].dtype, params["single"].dtype) == (dtype, torch.float32)
