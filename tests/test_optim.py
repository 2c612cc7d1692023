"""Optimizers against torch's own, step by step; as pure functions, compiled and batched."""

from typing import NamedTuple

import pytest
import torch
from strategies_for_tests import assert_close, assert_same, copied, tensors
from torch import nn
from torch.func import grad

import mapfn
from mapfn import optim, rates
from mapfn.testing import assert_fullgraph

STEPS = 20


class Pair(NamedTuple):
    """A part of the tree."""

    left: torch.Tensor
    right: torch.Tensor


def start(dtype=torch.float64):
    """Make a tree of every kind of node; the last tensor is a scalar."""
    random = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=random).to(dtype) for shape in ((3, 2), (4,), (2,), ())]
    return {"b": {"x": made[0]}, "a": (made[1], Pair(*made[2:]))}


def loss(tree):
    """Couple all numbers in a curved valley, as Rosenbrock's function does."""
    x = torch.cat([tensor.flatten() for tensor in tensors(tree)])
    return (3 * (x[1:] - x[:-1].square()).square() + (1 - x[:-1]).square()).mean()


def trace(optimizer, params):
    state = optimizer.init(params)
    for _ in range(STEPS):
        updates, state = optimizer.update(grad(loss)(params), state, params)
        params = optim.apply_updates(params, updates)
        yield params


def torch_trace(make, params, max_norm=None):
    params = copied(params)
    leaves = [leaf.requires_grad_() for leaf in tensors(params)]
    theirs = make(leaves)
    for _ in range(STEPS):
        theirs.zero_grad()
        loss(params).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(leaves, max_norm)
        theirs.step()
        yield copied(params)


def assert_equal_traces(ours, theirs, dtype):
    rtol = 1e-12 if dtype == torch.float64 else 1e-5
    for one, other in zip(ours, theirs, strict=True):
        assert_close(one, other, rtol=rtol, atol=rtol)
        assert {leaf.dtype for leaf in tensors(one)} == {dtype}
    assert float(loss(one)) < 0.95 * float(loss(start(dtype)))


SGD = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"weight_decay": 0.1},
    {"momentum": 0.5, "nesterov": True, "weight_decay": 0.2},
]
ADAM = [{}, {"betas": (0.5, 0.8), "eps": 1e-3}, {"weight_decay": 0.3}, {"betas": (0.0, 0.0)}]
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


@DTYPES
@pytest.mark.parametrize("options", SGD, ids=str)
def test_sgd_is_torch_sgd(options, dtype):
    theirs = torch_trace(lambda leaves: torch.optim.SGD(leaves, lr=0.02, **options), start(dtype))
    assert_equal_traces(trace(optim.sgd(0.02, **options), start(dtype)), theirs, dtype)


@DTYPES
@pytest.mark.parametrize("options", ADAM, ids=str)
def test_adam_is_torch_adamw_and_without_decay_adam(options, dtype):
    kind = torch.optim.AdamW if "weight_decay" in options else torch.optim.Adam
    theirs = torch_trace(lambda leaves: kind(leaves, lr=0.05, **options), start(dtype))
    assert_equal_traces(trace(optim.adam(0.05, **options), start(dtype)), theirs, dtype)


@DTYPES
def test_a_chain_clips_and_then_steps(dtype):
    ours = optim.chain(optim.clip_by_global_norm(1.5), optim.sgd(0.05, momentum=0.9))
    theirs = torch_trace(
        lambda leaves: torch.optim.SGD(leaves, lr=0.05, momentum=0.9), start(dtype), max_norm=1.5
    )
    assert_equal_traces(trace(ours, start(dtype)), theirs, dtype)
    assert optim.global_norm(grad(loss)(start())) > 1.5


@pytest.mark.parametrize("max_norm", [0.1, 1e3], ids=["above", "below"])
def test_clipping_is_that_of_torch(max_norm):
    gradients = start()
    leaves = [torch.zeros_like(leaf).requires_grad_() for leaf in tensors(gradients)]
    for leaf, gradient in zip(leaves, tensors(gradients), strict=True):
        leaf.grad = gradient.clone()
    norm = nn.utils.clip_grad_norm_(leaves, max_norm)
    clipped, state = optim.clip_by_global_norm(max_norm).update(gradients, (), None)
    torch.testing.assert_close(optim.global_norm(gradients), norm)
    assert_close(tensors(clipped), [leaf.grad for leaf in leaves], rtol=1e-14, atol=0)
    assert state == ()
    if max_norm > norm:
        assert_same(clipped, gradients)
    else:
        torch.testing.assert_close(float(optim.global_norm(clipped)), max_norm, rtol=1e-5, atol=0)


def test_global_norm_is_that_of_all_numbers():
    flat = torch.cat([leaf.flatten() for leaf in tensors(start())])
    torch.testing.assert_close(optim.global_norm(start()), flat.norm())
    assert optim.global_norm({}) == 0
    mixed = {"a": torch.tensor([3.0]), "b": torch.tensor(4.0, dtype=torch.float64)}
    assert optim.global_norm(mixed) == 5


def test_updates_are_added_in_the_dtype_of_the_params():
    params = {"a": torch.ones(2, dtype=torch.bfloat16), "b": (torch.zeros(()),)}
    updates = {"a": torch.tensor([0.5, -3.0]), "b": (torch.tensor(2.0, dtype=torch.float64),)}
    wanted = {"a": torch.tensor([1.5, -2.0]).bfloat16(), "b": (torch.tensor(2.0),)}
    assert_same(optim.apply_updates(params, updates), wanted)


OPTIMIZERS = {
    "sgd": optim.sgd(0.02, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": optim.adam(optim.one_cycle(0.05, 30), weight_decay=0.1),
    "chain": optim.chain(optim.clip_by_global_norm(0.5), optim.adam(optim.cosine(0.05, 8))),
    "clip": optim.clip_by_global_norm(0.5),
}
EACH = pytest.mark.parametrize("name", OPTIMIZERS)


@EACH
def test_nothing_is_changed_in_place(name):
    optimizer, params = OPTIMIZERS[name], start()
    for _ in range(2):  # The second state has moments away from 0.
        state, gradients = optimizer.init(params), grad(loss)(params)
        _, state = optimizer.update(gradients, state, params)
        before = copied((gradients, state, params))
        updates, _ = optimizer.update(gradients, state, params)
        moved = optim.apply_updates(params, updates)
        assert_same((gradients, state, params), before)
        params = moved


@EACH
def test_one_graph_equal_to_eager(name):
    optimizer = OPTIMIZERS[name]
    gradients = grad(loss)(start())
    args = gradients, optimizer.update(gradients, optimizer.init(start()), start())[1], start()
    assert_fullgraph(optimizer.update, *args, calls=3)


@EACH
def test_step_and_learning_rate_recompile_nothing(name):
    optimizer, params, graphs = OPTIMIZERS[name], start(), []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(optimizer.update, backend=counting, fullgraph=True, dynamic=False)
    state = wanted = optimizer.init(params)
    for step in range(10):
        if name != "clip":
            state, wanted = (
                optim.with_learning_rate(own, 0.01 * (step + 1)) for own in (state, wanted)
            )
        gradients = grad(loss)(params)
        updates, state = compiled(gradients, state, params)
        also, wanted = optimizer.update(gradients, wanted, params)
        assert_close((updates, state), (also, wanted), rtol=1e-12, atol=1e-12)
        params = optim.apply_updates(params, updates)
    torch.compiler.reset()
    assert len(graphs) == 1


RATES = (0.01, 0.02, 0.1)


def at_rate(optimizer, params, rate):
    return optim.with_learning_rate(optimizer.init(params), rate)


@pytest.mark.parametrize("name", ["sgd", "adam", "chain"])
def test_members_with_their_own_rates_are_members_alone(name):
    optimizer = OPTIMIZERS[name]
    alone = [
        optim.apply_updates(start(), {"b": {"x": start()["b"]["x"] * i}, "a": start()["a"]})
        for i in range(3)
    ]
    together = mapfn.stack(alone)
    state = mapfn.stack([at_rate(optimizer, p, r) for p, r in zip(alone, RATES, strict=True)])
    states = mapfn.unstack(state)
    for _ in range(3):
        gradients = torch.vmap(grad(loss))(together)
        updates, state = torch.vmap(optimizer.update)(gradients, state, together)
        together = optim.apply_updates(together, updates)
        for index, params in enumerate(alone):
            own, states[index] = optimizer.update(grad(loss)(params), states[index], params)
            alone[index] = optim.apply_updates(params, own)
    assert_close(together, mapfn.stack(alone), rtol=1e-10, atol=1e-10)
    assert_close(state, mapfn.stack(states), rtol=1e-10, atol=1e-10)


def test_a_member_that_is_nan_leaves_the_others_alone():
    optimizer = OPTIMIZERS["chain"]
    good = mapfn.stack([start(), start()])
    bad = copied(good)
    bad["a"][0][1] = torch.nan
    after = [
        torch.vmap(optimizer.update)(
            torch.vmap(grad(loss))(p), torch.vmap(lambda p: optimizer.init(p))(p), p
        )
        for p in (good, bad)
    ]
    ours, theirs = (mapfn.unstack(each) for each in after)
    assert_same(ours[0], theirs[0])
    assert theirs[1][0]["a"][0].isnan().all()


def test_the_rate_of_a_chain_is_replaced_where_it_stands():
    optimizer = optim.chain(optim.sgd(0.5), optim.clip_by_global_norm(1.0))
    state = optim.with_learning_rate(optimizer.init(start()), 0.25)
    assert (float(state[0].learning_rate), state[1]) == (0.25, ())
    rates = torch.tensor([0.1, 0.2])
    stacked = mapfn.stack([optim.adam(0.1).init(start())] * 2)
    assert optim.with_learning_rate(stacked, rates).learning_rate.tolist() == pytest.approx(
        [0.1, 0.2]
    )


def test_one_rate_for_all_members_is_one_for_each():
    stacked = mapfn.stack([optim.adam(0.1).init(start())] * 2)
    assert optim.with_learning_rate(stacked, 0.5).learning_rate.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("parts", [["clip"], ["clip", "clip"], ["adam", "adam"], ["adam", "sgd"]])
def test_a_chain_that_would_climb_is_refused(parts):
    makers = {"clip": optim.clip_by_global_norm, "adam": optim.adam, "sgd": optim.sgd}
    with pytest.raises(ValueError, match=r"one learning rate in all, got [02].*chain\(clip_by"):
        rates.check_descends(optim.chain(*(makers[part](1.0) for part in parts)).init(start()))


@pytest.mark.parametrize("state", [(), {}, None, ((), ())], ids=repr)
def test_a_state_without_a_rate(state):
    with pytest.raises(ValueError, match=r"with_learning_rate.*expected the state of sgd, adam"):
        optim.with_learning_rate(state, 0.1)


def mapped():
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    spec = mapfn.make_spec(module, latent_dim=6)
    x = torch.linspace(-1, 1, 32).view(8, 4)
    return spec, module, x, x.sum(1, keepdim=True).sin()


def objective(spec, module, latents, buffers, x, y):
    outputs, _ = mapfn.apply(module, mapfn.generate(spec, latents, buffers), {}, x)
    return nn.functional.mse_loss(outputs, y)


THEIRS = {
    "Adam": lambda leaves: torch.optim.Adam(leaves, lr=0.05),
    "SGD": lambda leaves: torch.optim.SGD(leaves, lr=0.05, momentum=0.9),
    "RMSprop": lambda leaves: torch.optim.RMSprop(leaves, lr=0.01),
    "LBFGS": lambda leaves: torch.optim.LBFGS(leaves, max_iter=2),
}


@pytest.mark.parametrize("name", THEIRS)
def test_any_optimizer_of_torch_takes_the_latents(name):
    spec, module, x, y = mapped()
    latents, buffers = mapfn.init(spec)
    optimizer = THEIRS[name]([z.requires_grad_() for z in latents.values()])
    losses = []

    def closure():
        optimizer.zero_grad()
        value = objective(spec, module, latents, buffers, x, y)
        value.backward()
        losses.append(value.item())
        return value

    for _ in range(15):
        optimizer.step(closure)
    assert losses[-1] < 0.7 * losses[0]


def test_torchopt_takes_the_latents():
    import torchopt

    spec, module, x, y = mapped()
    latents, buffers = mapfn.init(spec)
    theirs, ours = torchopt.adam(0.05), optim.adam(0.05)
    state, own_state, own = theirs.init(latents), ours.init(latents), latents
    slope = grad(lambda z: objective(spec, module, z, buffers, x, y))
    for _ in range(10):
        updates, state = theirs.update(slope(latents), state, params=latents, inplace=False)
        latents = torchopt.apply_updates(latents, updates, inplace=False)
        updates, own_state = ours.update(slope(own), own_state, own)
        own = optim.apply_updates(own, updates)
    assert_close(latents, own)
    assert objective(spec, module, own, buffers, x, y) < 0.7 * objective(
        spec, module, mapfn.init(spec)[0], buffers, x, y
    )


BAD = {
    r"sgd\(learning_rate\).*expected.*got 0": lambda: optim.sgd(0.0),
    r"sgd\(learning_rate\).*got '0.1'": lambda: optim.sgd("0.1"),
    r"sgd\(momentum=\).*expected 0 to below 1, got 1": lambda: optim.sgd(0.1, momentum=1.0),
    r"sgd\(nesterov=\).*expected a momentum": lambda: optim.sgd(0.1, nesterov=True),
    r"sgd\(weight_decay=\).*got -1": lambda: optim.sgd(0.1, weight_decay=-1.0),
    r"adam\(learning_rate\).*got nan": lambda: optim.adam(float("nan")),
    r"adam\(betas=\).*got 1.0": lambda: optim.adam(0.1, betas=(0.9, 1.0)),
    r"adam\(eps=\).*got 0": lambda: optim.adam(0.1, eps=0.0),
    r"clip_by_global_norm\(max_norm\).*got 0": lambda: optim.clip_by_global_norm(0),
}


@pytest.mark.parametrize("reason", BAD)
def test_bad_numbers_are_named(reason):
    with pytest.raises(ValueError, match=reason):
        BAD[reason]()
