"""Schedules against those of torch, and as tensors of the step."""

import pytest
import torch
from strategies_for_tests import assert_close
from torch.optim import lr_scheduler

import mapfn
from mapfn import optim
from mapfn.testing import assert_fullgraph

NUM_STEPS = 40


def torch_rates(make):
    """Return the rate of each update; torch's schedulers live on an optimizer."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    scheduler, rates = make(optimizer), []
    for _ in range(NUM_STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return torch.tensor(rates, dtype=torch.float64)


def own_rates(schedule):
    return schedule.peak * schedule.factor(torch.arange(NUM_STEPS))


PAIRS = {
    "one_cycle": (
        optim.one_cycle(0.3, NUM_STEPS),
        lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=NUM_STEPS),
    ),
    "one_cycle options": (
        optim.one_cycle(0.3, NUM_STEPS, warmup=0.1, start_divisor=4.0, end_divisor=10.0),
        lambda o: lr_scheduler.OneCycleLR(
            o, 0.3, total_steps=NUM_STEPS, pct_start=0.1, div_factor=4.0, final_div_factor=10.0
        ),
    ),
    "cosine": (
        optim.cosine(0.3, NUM_STEPS, floor=0.02),
        lambda o: lr_scheduler.CosineAnnealingLR(o, NUM_STEPS, eta_min=0.02),
    ),
    "constant": (optim.constant(0.3), lambda o: lr_scheduler.ConstantLR(o, factor=1.0)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_rates_are_those_of_torch(name):
    schedule, theirs = PAIRS[name]
    torch.testing.assert_close(own_rates(schedule), torch_rates(theirs), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", PAIRS)
def test_after_the_end_the_last_rate_stays(name):
    schedule = PAIRS[name][0]
    late = schedule.factor(torch.tensor([NUM_STEPS, NUM_STEPS + 1, 10**9]))
    assert late.unique().numel() == 1
    assert bool((late <= own_rates(schedule)[-1] / schedule.peak + 1e-12).all())


@pytest.mark.parametrize("name", PAIRS)
def test_one_graph_and_batched(name):
    factor = PAIRS[name][0].factor
    assert_fullgraph(lambda step, one: factor(step) * one, torch.tensor(3), torch.ones(()))
    steps = torch.arange(5)
    assert_close(torch.vmap(factor)(steps), torch.stack([factor(step) for step in steps]))


def test_an_optimizer_follows_its_schedule():
    optimizer, params = optim.sgd(optim.cosine(0.5, 4)), {"z": torch.zeros(1)}
    state, moved = optimizer.init(params), []
    for _ in range(5):
        updates, state = optimizer.update({"z": torch.ones(1)}, state, params)
        moved.append(-updates["z"].item())
    assert moved == pytest.approx([0.5, 0.4267767, 0.25, 0.0732233, 0.0])


BAD = {
    r"one_cycle\(peak\).*above 0, got -1": lambda: optim.one_cycle(-1.0, 10),
    r"one_cycle\(num_steps\).*int >= 2, got 1\.": lambda: optim.one_cycle(1.0, 1),
    r"one_cycle\(warmup=\).*got 1.5": lambda: optim.one_cycle(1.0, 10, warmup=1.5),
    r"one_cycle\(warmup=\).*got 0.0": lambda: optim.one_cycle(1.0, 10, warmup=0.0),
    r"one_cycle\(start_divisor=\).*got 0": lambda: optim.one_cycle(1.0, 9, start_divisor=0),
    r"one_cycle\(end_divisor=\).*got nan": lambda: optim.one_cycle(1, 9, end_divisor=float("nan")),
    r"cosine\(peak\).*got True": lambda: optim.cosine(True, 10),
    r"cosine\(num_steps\).*got 2.0": lambda: optim.cosine(1.0, 2.0),
    r"cosine\(floor=\).*got 2.0": lambda: optim.cosine(1.0, 10, floor=2.0),
    r"constant\(value\).*got inf": lambda: optim.constant(float("inf")),
}


@pytest.mark.parametrize("reason", BAD)
def test_bad_numbers_are_named(reason):
    with pytest.raises(ValueError, match=reason):
        BAD[reason]()


def test_names():
    assert mapfn.optim.Schedule is type(optim.constant(1.0))
