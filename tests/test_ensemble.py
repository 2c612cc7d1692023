"""Ensembles: members stacked, run together and taken apart."""

import pytest
import torch
from strategies_for_tests import MAPPERS, assert_close, assert_same
from torch import nn
from torch.func import grad, vmap

import mapfn


def target():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))


@pytest.mark.parametrize("mapper", MAPPERS, ids=lambda m: type(m).__name__)
def test_members_equal_single_inits(mapper):
    spec = mapfn.make_spec(target(), latent_dim=4, mapper=mapper)
    members = [mapfn.init(spec, seed) for seed in range(3)]
    stacked = mapfn.stack(members)
    for index, (member, alone) in enumerate(zip(mapfn.unstack(stacked), members, strict=True)):
        assert_same(member, alone)
        assert_same(torch.utils._pytree.tree_map(lambda t, i=index: t[i], stacked), alone)


def test_stacked_latents_are_leaves_that_an_optimizer_takes():
    spec = mapfn.make_spec(target(), latent_dim=4)
    trained = [mapfn.init(spec, seed)[0] for seed in range(2)]
    for latents in trained:
        for z in latents.values():
            z.requires_grad_()
    stacked = mapfn.stack([{n: 1 * z for n, z in latents.items()} for latents in trained])
    assert all(z.is_leaf and not z.requires_grad for z in stacked.values())
    torch.optim.SGD([z.requires_grad_() for z in stacked.values()], lr=0.1)


def test_stack_copies():
    member = {"w": torch.zeros(2)}
    stacked = mapfn.stack([member, member])
    stacked["w"].add_(1)
    assert not member["w"].any()
    apart = mapfn.unstack(stacked)
    apart[0]["w"].add_(1)
    assert torch.equal(stacked["w"], torch.ones(2, 2))


def test_one_member_and_an_empty_tree():
    assert_same(mapfn.stack([{"w": torch.ones(2)}]), {"w": torch.ones(1, 2)})
    assert mapfn.unstack({}) == []
    assert mapfn.stack([{}, {}]) == {}


def test_an_ensemble_runs_as_its_members_do():
    module = target()
    spec = mapfn.make_spec(module, latent_dim=4)
    members = [mapfn.init(spec, seed) for seed in range(3)]
    state, images = mapfn.init_state(module), torch.randn(5, 1, 3, 3)

    def run(latents, buffers, state):
        return mapfn.apply(module, mapfn.generate(spec, latents, buffers), state, images)

    latents, buffers = mapfn.stack(members)
    together = vmap(run)(latents, buffers, mapfn.stack([state] * 3))
    alone = mapfn.stack([run(*member, state) for member in members])
    assert_close(together, alone)
    assert together[1]["1.num_batches_tracked"].tolist() == [1] * 3


def test_gradients_of_an_ensemble_are_its_members():
    module = target().eval()
    spec = mapfn.make_spec(module, latent_dim=4)
    members = [mapfn.init(spec, seed) for seed in range(3)]
    buffers, state, images = members[0][1], mapfn.init_state(module), torch.randn(5, 1, 3, 3)

    def loss(latents):
        params = mapfn.generate(spec, latents, buffers)
        return mapfn.apply(module, params, state, images)[0].square().sum()

    latents = [latents for latents, _ in members]
    together = vmap(grad(loss))(mapfn.stack(latents))
    assert_close(together, mapfn.stack([grad(loss)(z) for z in latents]), rtol=1e-4, atol=1e-4)


def test_chunks_change_nothing():
    spec = mapfn.make_spec(target(), latent_dim=4)
    buffers = mapfn.init(spec)[1]
    latents = mapfn.stack([mapfn.init(spec, seed)[0] for seed in range(5)])

    def run(z):
        return mapfn.generate(spec, z, buffers)

    assert_close(vmap(run, chunk_size=2)(latents), vmap(run)(latents))


def test_a_latent_for_each_sample():
    module = nn.Linear(3, 2)
    spec = mapfn.make_spec(module, latent_dim=4)
    _, buffers = mapfn.init(spec)
    latents, inputs = torch.randn(6, 4), torch.randn(6, 3)

    def run(z, x):
        return mapfn.apply(module, mapfn.generate(spec, {"(root)": z}, buffers), {}, x)[0]

    alone = torch.stack([run(z, x) for z, x in zip(latents, inputs, strict=True)])
    torch.testing.assert_close(vmap(run)(latents, inputs), alone)
