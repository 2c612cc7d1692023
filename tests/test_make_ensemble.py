"""make_ensemble and predict: members trained together are members trained alone."""

import math
from collections import OrderedDict

import pytest
import torch
from contract import settings
from strategies_for_tests import assert_close, assert_same, built, copied, tensors
from torch import nn
from zoo import ZOO

import mapfn
from mapfn import optim, train
from mapfn.ensemble import make_ensemble, predict
from mapfn.losses import mapping_loss, trained
from mapfn.testing import assert_fullgraph

FULL = {"stability": 0.1, "smoothness": 0.01, "alignment": trained(0.01)}
METHODS = pytest.mark.parametrize("method", ["vmap", "loop"])


def network(dropout=0.0):
    return nn.Sequential(
        nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Dropout(dropout), nn.Linear(12, 2)
    )


def recurrent():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(3, 4, batch_first=True)
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.lstm(x[:, 0])[0][:, -1])

    return Last()


def batch(count=8, seed=1):
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=random)
    return torch.randn(count, 1, 3, 3, generator=random), labels


def training(target=network, optimizer=None, weights=None, base="auto"):
    module = built(target)
    spec = mapfn.make_spec(module, latent_dim=5, base=base)
    loss = mapping_loss(nn.functional.cross_entropy, **weights or {})
    return spec, module, train.make_step(spec, module, loss, optimizer or optim.adam(0.05))


def run(step, state, data, steps=4):
    infos = []
    for _ in range(steps):
        state, info = step(state, data)
        infos.append(info)
    return state, infos


@METHODS
@pytest.mark.parametrize("weights", [{}, FULL], ids=["task", "full"])
@pytest.mark.parametrize("base", ["auto", "init", "target"])
def test_members_are_what_they_are_alone(method, weights, base):
    """T1: each with its own seed, map, latents and BatchNorm statistics."""
    _, _, alone = training(weights=weights, base=base)
    init, step, members = make_ensemble(alone, method=method)
    states, infos = run(step, init([3, 1, 4]), batch())
    for seed, member, index in zip([3, 1, 4], members(states), range(3), strict=True):
        wanted, losses = run(alone.step, alone.init(seed), batch())
        assert_close(member, wanted)
        assert member.target_state["1.num_batches_tracked"] == 4
        for info, one in zip(infos, losses, strict=True):
            assert_close(info.loss[index], one.loss)
            assert_close({name: part[index] for name, part in info.aux.items()}, one.aux)


def test_a_member_goes_on_alone():
    _, _, alone = training()
    init, step, members = make_ensemble(alone)
    states, _ = run(step, init(range(2)), batch(), steps=2)
    wanted, _ = run(step, states, batch(), steps=2)
    for member, together in zip(members(states), members(wanted), strict=True):
        assert_close(run(alone.step, member, batch(), steps=2)[0], together)


@METHODS
def test_a_step_changes_nothing_that_it_was_given(method):
    _, _, alone = training(weights=FULL, base="target")
    init, step, members = make_ensemble(alone, method=method)
    states = init(range(2))
    before = copied(states)
    taken = members(states)
    step(states, batch())
    for member in taken:
        for tensor in tensors(member):
            tensor.zero_()
    assert_same(states, before)


def test_a_base_that_all_members_share_stands_there_once():
    _, module, alone = training(base="target")
    states = make_ensemble(alone).init(range(3))
    held = [tensor for own in states.buffers.values() for tensor in own.values()]
    weights = dict(module.named_parameters())
    assert sum(tensor.shape == weights["0.weight"].shape for tensor in held) == 1
    assert any(tensor.data_ptr() == weights["0.weight"].data_ptr() for tensor in held)


@METHODS
def test_one_map_for_all_members(method):
    _, _, alone = training(weights=FULL)
    init, step, members = make_ensemble(alone, method=method, shared_map=True)
    first, second = members(run(step, init([3, 4]), batch())[0])
    assert_same(first.buffers, second.buffers)
    map_of_first = alone.init(3)
    start = alone.init(4)._replace(buffers=map_of_first.buffers, moments=map_of_first.moments)
    assert_close(second, run(alone.step, start, batch())[0])


@METHODS
def test_each_member_with_its_own_data(method):
    _, _, alone = training()
    init, step, members = make_ensemble(alone, method=method, shared_data=False)
    data = [batch(seed=seed) for seed in (5, 6)]
    states, _ = run(step, init([3, 4]), mapfn.stack(data))
    for seed, own, member in zip([3, 4], data, members(states), strict=True):
        assert_close(member, run(alone.step, alone.init(seed), own)[0])


@METHODS
@pytest.mark.parametrize(
    "make",
    [
        optim.sgd,
        optim.adam,
        lambda rate: optim.chain(optim.clip_by_global_norm(0.5), optim.adam(rate)),
    ],
    ids=["sgd", "adam", "clipped"],
)
def test_a_learning_rate_for_each_member(method, make):
    """T7: the rate, and clipping by the norm of each member alone."""
    init, step, members = make_ensemble(training(optimizer=make(0.3))[2], method=method)
    states, _ = run(step, init([7, 7, 7], learning_rates=[0.01, 0.1, 1.0]), batch())
    for rate, member in zip([0.01, 0.1, 1.0], members(states), strict=True):
        alone = training(optimizer=make(rate))[2]
        wanted = run(alone.step, alone.init(7), batch())[0]
        assert_close(member.latents, wanted.latents, rtol=1e-4, atol=1e-5)


@METHODS
def test_a_member_that_is_not_finite_touches_no_other(method):
    """T7."""
    init, step, members = make_ensemble(training(weights=FULL)[2], method=method)
    states = init(range(3))
    wanted = members(run(step, states, batch())[0])
    broken = {name: z.clone() for name, z in states.latents.items()}
    for z in broken.values():
        z[1] = torch.nan
    states, infos = run(step, states._replace(latents=broken), batch())
    got = members(states)
    for index in (0, 2):
        assert_same(got[index], wanted[index])
    assert infos[-1].loss.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("chunk_size", [1, 2, 5])
def test_members_in_chunks(chunk_size):
    alone = training()[2]
    whole, parts = (make_ensemble(alone, chunk_size=size) for size in (None, chunk_size))
    assert_close(
        run(parts.step, parts.init(range(5)), batch()),
        run(whole.step, whole.init(range(5)), batch()),
    )


@pytest.mark.parametrize("method", ["vmap", "loop"])
def test_dropout_is_refused_until_its_randomness_is_said(method):
    """T2: the error names our argument, not torch's; a loop is no way around it."""
    alone = training(lambda: network(dropout=0.5))[2]
    init, step, _ = make_ensemble(alone, method=method)
    with pytest.raises(
        RuntimeError,
        match=r"make_ensemble\(randomness='error'\): expected a target without random numbers.*"
        r'pass randomness="different", each member its own, or "same"',
    ):
        step(init(range(2)), batch())


@pytest.mark.parametrize("rate", [-0.1, 0.0, math.nan, math.inf])
def test_learning_rates_that_cannot_be(rate):
    init = make_ensemble(training()[2]).init
    with pytest.raises(ValueError, match=r"learning_rates=\): expected a number above 0"):
        init(range(2), learning_rates=[0.1, rate])


@pytest.mark.parametrize("method", ["vmap", "loop"])
def test_a_module_may_be_called_shared(method):
    parts = OrderedDict(shared=nn.Sequential(nn.Linear(4, 3)), head=nn.Linear(3, 1))
    module = nn.Sequential(parts)
    spec = mapfn.make_spec(module, latent_dim=3)
    assert [group.name for group in spec.groups] == ["shared.0", "head"]
    loss = mapping_loss(lambda out, _: out.square().mean(), smoothness=0.1, alignment=0.1)
    init, step, _ = make_ensemble(
        train.make_step(spec, module, loss, optim.adam(0.1)), method=method
    )
    _, info = step(init(range(2)), (torch.ones(2, 4), None))
    assert info.loss.isfinite().all()


@pytest.mark.parametrize("randomness", ["different", "same"])
def test_dropout_of_members(randomness):
    """T2: equal members see equal losses where, and only where, they drop the same."""
    alone = training(lambda: network(dropout=0.5))[2]
    init, step, _ = make_ensemble(alone, randomness=randomness)
    torch.manual_seed(0)
    _, info = step(init([3, 3]), batch(64))
    assert bool(info.loss[0] == info.loss[1]) is (randomness == "same")


def test_dropout_in_a_loop_is_that_of_members_in_turn():
    alone = training(lambda: network(dropout=0.5))[2]
    init, step, members = make_ensemble(alone, method="loop", randomness="different")
    torch.manual_seed(0)
    got = members(step(init([3, 4]), batch())[0])
    torch.manual_seed(0)
    assert_close(got, [alone.step(alone.init(seed), batch())[0] for seed in (3, 4)])


# Without a graph torch runs its LSTM member by member under vmap, and says so.
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_what_torch_cannot_batch_trains_in_a_loop():
    """The way round that the doctor names, chosen by name, with the same results."""
    spec, module, alone = training(recurrent)
    init, step, members = make_ensemble(alone, method="loop")
    states, infos = run(step, init([3, 4]), batch(), steps=20)
    for seed, member in zip([3, 4], members(states), strict=True):
        assert_close(member, run(alone.step, alone.init(seed), batch(), steps=20)[0])
    assert (infos[-1].loss < infos[0].loss).all()
    assert predict(spec, module, states, batch()[0], method="loop").mean.shape == (8, 2)
    assert_close(make_ensemble(alone).step(states, batch()), step(states, batch()))


@pytest.mark.parametrize(
    ("method", "weights"),
    [
        ("vmap", {}),
        ("loop", {}),
        pytest.param("vmap", FULL, marks=pytest.mark.slow),
        pytest.param("loop", FULL, marks=pytest.mark.slow),
    ],
    ids=["vmap-task", "loop-task", "vmap-full", "loop-full"],
)
def test_a_step_of_all_members_is_one_graph(method, weights):
    alone = training(lambda: network(dropout=0.2), weights=weights, base="target")[2]
    init, step, _ = make_ensemble(alone, method=method, randomness="different")
    assert_fullgraph(step, init(range(2)), batch(), seed=0, calls=2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", [name for name in ZOO if "vmap" not in ZOO[name].refuses])
def test_members_of_every_target_are_one_graph_and_equal_to_alone(name):
    tree, target = ZOO[name].built()
    spec = mapfn.make_spec(tree, latent_dim=4)
    alone = train.make_step(
        spec, target, lambda out, wanted: ((out - wanted) ** 2).mean(), optim.sgd(0.1)
    )
    own = {} if isinstance(target, nn.Module) else {"tensors": tree}
    init, step, members = make_ensemble(
        (lambda seed: alone.init(seed, **own), alone.step), randomness="different"
    )
    x, states = ZOO[name].inputs(2), init(range(2))
    params = mapfn.generate(spec, *mapfn.unstack((states.latents, states.buffers))[0])
    first = alone.init(0, **own)
    data = x, torch.zeros_like(mapfn.apply(target, params, first.target_state, x)[0])
    with settings():
        assert_fullgraph(step, states, data, seed=0, calls=2)
    if name != "dropout":
        assert_close(members(step(states, data)[0])[0], alone.step(first, data)[0])


@METHODS
def test_prediction_is_mean_and_spread_of_members_alone(method):
    spec, module, alone = training(lambda: network(dropout=0.5))
    init, _, members = make_ensemble(alone)
    states, x = init(range(3)), batch()[0]
    outputs = torch.stack(
        [
            mapfn.call(
                module,
                mapfn.generate(spec, own.latents, own.buffers),
                own.target_state,
                x,
                training=False,
            )[0]
            for own in members(states)
        ]
    )
    before, mode = copied(states), module.training
    got = predict(spec, module, states, x, method=method)
    assert_close(got, type(got)(outputs.mean(0), outputs.std(0), outputs))
    assert_same(states, before)
    assert module.training is mode


def test_prediction_in_the_structure_of_the_outputs():
    from transformers.modeling_outputs import SequenceClassifierOutput

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(9, 2)

        def forward(self, x):
            return SequenceClassifierOutput(logits=self.linear(x.flatten(1)))

    spec, module, alone = training(Model)
    got = predict(spec, module, make_ensemble(alone).init([0]), batch()[0])
    assert got.mean["logits"].shape == (8, 2)
    assert got.outputs["logits"].shape == (1, 8, 2)
    assert not got.spread["logits"].any()


BAD = {
    r"make_ensemble\(method=\): expected \('vmap', 'loop'\), got 'pmap'": {"method": "pmap"},
    r"make_ensemble\(randomness=\): expected .*, got 'yes'": {"randomness": "yes"},
    r"make_ensemble\(randomness=\): expected 'different', got 'same' in a loop": {
        "method": "loop",
        "randomness": "same",
    },
}


@pytest.mark.parametrize("reason", BAD)
def test_bad_options_are_named(reason):
    with pytest.raises(ValueError, match=reason):
        make_ensemble(training()[2], **BAD[reason])


@pytest.mark.parametrize(("seeds", "rates"), [([], None), ([], []), ([1, 2], [0.1])])
def test_members_without_seeds_or_rates(seeds, rates):
    init = make_ensemble(training()[2]).init
    with pytest.raises(ValueError, match=r"make_ensemble.init: expected at least one member, got"):
        init(seeds, rates)


def test_own_data_that_is_not_there_for_each_member():
    init, step, _ = make_ensemble(training()[2], shared_data=False)
    with pytest.raises(ValueError, match=r"make_ensemble.step\(batch\): expected .*\[3, batch"):
        step(init(range(3)), batch())
