"""batches, evaluate and find_lr: data in a portable order, and runs that touch nothing."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies_for_tests import assert_same, copied
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mapfn
from mapfn import losses, optim, train


@given(
    size=st.integers(1, 40),
    batch=st.integers(1, 40),
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 9),
    drop_last=st.booleans(),
)
def test_an_epoch_has_every_sample_once(size, batch, seed, epoch, drop_last):
    batch = min(batch, size)
    of_epoch = train.batches(torch.arange(size), batch, seed=seed, drop_last=drop_last)
    parts = list(of_epoch(epoch))
    flat = [int(i) for part in parts for i in part]
    assert len(set(flat)) == len(flat) == (size // batch * batch if drop_last else size)
    assert all(len(part) == batch for part in parts[:-1])
    assert flat == [int(i) for part in of_epoch(epoch) for i in part]


def test_orders_differ_by_epoch_and_seed_and_are_golden():
    def order(seed, epoch):
        return next(train.batches(torch.arange(8), 8, seed=seed)(epoch)).tolist()

    assert order(0, 3) == [1, 7, 5, 0, 2, 4, 6, 3]
    assert order(7, 3) == [7, 0, 3, 4, 2, 6, 1, 5]
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_trees_are_cut_together():
    data = {"x": torch.arange(6), "y": (torch.arange(6) * 10,)}
    for part in train.batches(data, 4, drop_last=False)(2):
        assert torch.equal(part["x"] * 10, part["y"][0])


def test_each_member_in_its_own_order():
    of_epoch = train.batches(torch.arange(6), 3, seed=[4, 9])
    alone = [train.batches(torch.arange(6), 3, seed=seed) for seed in (4, 9)]
    for got, *wanted in zip(of_epoch(1), alone[0](1), alone[1](1), strict=True):
        assert torch.equal(got, torch.stack(wanted))


def test_no_seed_is_the_order_of_the_data():
    assert [part.tolist() for part in train.batches(torch.arange(4), 2, seed=None)(3)] == [
        [0, 1],
        [2, 3],
    ]


@pytest.mark.parametrize("size", [0, 5, True, 2.0, None])
def test_a_batch_size_that_does_not_fit(size):
    with pytest.raises(ValueError, match=r"batches\(batch_size=\): expected an int from 1 to 4"):
        train.batches(torch.arange(4), size)


def test_data_of_different_lengths():
    with pytest.raises(ValueError, match=r"batches\(data\): expected samples, got lengths \[3, 4]"):
        train.batches((torch.arange(4), torch.arange(3)), 2)


def problem(target=None):
    torch.manual_seed(0)
    module = target or nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    spec = mapfn.make_spec(module, latent_dim=4)
    init, step = train.make_step(spec, module, nn.functional.mse_loss, optim.adam(0.05))
    inputs = torch.randn(10, 3)
    return spec, module, init, step, (inputs, inputs.sum(1, keepdim=True))


@pytest.mark.parametrize("size", [10, 4, 3])
def test_evaluation_is_the_mean_over_samples_in_eval_mode(size):
    spec, module, init, step, data = problem()
    state, _ = step(init(0), data)
    before, mode = copied(state), module.training
    params = mapfn.generate(spec, state.latents, state.buffers)
    own = mapfn.bake(module, params, state.target_state).eval()
    wanted = nn.functional.mse_loss(own(data[0]), data[1]).detach()
    loader = train.batches(data, size, seed=None, drop_last=False)(0)
    got = train.evaluate(spec, module, state, loader, nn.functional.mse_loss)
    assert got == {"loss": pytest.approx(float(wanted), rel=1e-5)}
    assert_same(state, before)
    assert module.training is mode


def test_evaluation_names_the_parts():
    spec, module, init, _, data = problem()

    def loss(outputs, targets):
        return nn.functional.mse_loss(outputs, targets), {"bias": (outputs - targets).mean()}

    assert list(train.evaluate(spec, module, init(0), [data], loss)) == ["loss", "bias"]
    composite = losses.mapping_loss(loss, stability=0.1)
    got = train.evaluate(spec, module, init(0), [data], composite)
    assert got == train.evaluate(spec, module, init(0), [data], loss)
    scaled = data[0], {"scale": torch.tensor(2.0), "targets": data[1]}
    got = train.evaluate(
        spec, module, init(0), [scaled], lambda out, t: loss(out, t["targets"])[0] * t["scale"]
    )
    assert got["loss"] > 0


def test_batches_are_weighed_by_their_samples_whatever_stands_beside_them():
    spec, module, init, _, (x, y) = problem()
    state = init(0)

    def loss(outputs, targets):
        return nn.functional.mse_loss(outputs, targets["y"]) * targets["a"].mean()

    def mean(*sizes):
        stop, cut = 0, []
        for size in sizes:
            stop += size
            part = slice(stop - size, stop)
            cut.append((x[part], {"a": torch.full((1,), 2.0), "y": y[part]}))
        return train.evaluate(spec, module, state, cut, loss)["loss"]

    count = len(x)
    assert mean(1, count - 1) == pytest.approx(mean(count), rel=1e-5)
    assert mean(count, 0) == mean(count)
    with pytest.raises(ValueError, match="expected batches, got none"):
        train.evaluate(spec, module, init(0), [], loss)


def test_the_range_test_finds_a_rate_and_touches_nothing():
    spec, module, init, _, data = problem()
    state = init(0)
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(TensorDataset(*data), batch_size=5, shuffle=True, generator=generator)

    def everything():
        drawn = torch.from_numpy(np.random.get_state()[1]), torch.tensor(random.getstate()[1])
        return state, module.state_dict(), generator.get_state(), torch.get_rng_state(), drawn

    def draws(batch):
        np.random.rand(), random.random(), torch.rand(1)
        return (batch[0],), {}, batch[1]

    _, drawing = train.make_step(
        spec, module, nn.functional.mse_loss, optim.adam(1.0), unpack=draws
    )
    before = copied(everything())
    curve = train.find_lr(drawing, state, loader, rates=(1e-4, 10.0, 40))
    assert_same(everything(), before)
    assert 1e-3 < curve.suggestion < 3.0
    assert len(curve.rates) == len(curve.losses) <= 40
    assert curve.rates[0] == 1e-4
    ratios = [b / a for a, b in zip(curve.rates, curve.rates[1:], strict=False)]
    assert ratios == pytest.approx([ratios[0]] * len(ratios))


def test_the_curve_is_the_losses_of_a_hand_written_loop():
    spec, module, init, step, data = problem()
    curve = train.find_lr(step, init(0), [data], rates=(1e-3, 1e-2, 5))
    state, average, wanted = init(0), 0.0, []
    for index, rate in enumerate(torch.logspace(-3, -2, 5).tolist(), start=1):
        _, step = train.make_step(spec, module, nn.functional.mse_loss, optim.adam(rate))
        fresh = optim.adam(rate).init((state.latents, state.coefficients))
        assert type(fresh) is type(state.optimizer_state)
        state = state._replace(
            optimizer_state=optim.with_learning_rate(state.optimizer_state, rate)
        )
        state, info = step(state, data)
        average = 0.9 * average + 0.1 * float(info.loss)
        wanted.append(average / (1 - 0.9**index))
    assert curve.losses == pytest.approx(wanted, rel=1e-4)


RATES = (1e-4, 1.0, 40)


def test_a_loss_below_zero_is_no_divergence():
    spec, module, _, _, data = problem()

    def loss(outputs, targets):
        return nn.functional.mse_loss(outputs, targets) - 10

    init, step = train.make_step(spec, module, loss, optim.adam(1.0))
    above = train.make_step(spec, module, nn.functional.mse_loss, optim.adam(1.0))[1]
    wanted, found = (train.find_lr(own, init(0), [data], rates=RATES) for own in (above, step))
    assert found.suggestion == wanted.suggestion


def test_the_curve_ends_where_the_loss_diverges_and_can_be_drawn(tmp_path):
    spec, module, _, _, data = problem(nn.Linear(3, 1))
    init, step = train.make_step(spec, module, nn.functional.mse_loss, optim.sgd(1.0))
    curve = train.find_lr(step, init(0), [data], rates=(1e-4, 1e3, 60))
    assert len(curve.rates) < 60
    assert all(math.isfinite(loss) for loss in curve.losses)
    curve.plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("rates", [(1.0, 0.1, 9), (0.0, 1.0, 9), (0.1, 1.0, 2)])
def test_rates_that_cannot_be(rates):
    _, _, init, step, data = problem()
    with pytest.raises(ValueError, match=r"find_lr\(rates=\): expected 0 < lowest < highest"):
        train.find_lr(step, init(0), [data], rates=rates)


def test_a_range_test_without_batches():
    _, _, init, step, _ = problem()
    with pytest.raises(ValueError, match=r"find_lr\(loader\): expected batches, got none"):
        train.find_lr(step, init(0), [])
