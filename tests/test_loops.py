"""fit, fit_epoch and callbacks: what they return whatever ends the training."""

import builtins
import math
import sys

import pytest
import torch
from strategies_for_tests import assert_same, copied
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mapfn
from mapfn import ensemble, optim, train
from mapfn.errors import NonFiniteError


def made(rate=0.05, loss=nn.functional.mse_loss, optimizer=None):
    target = nn.Linear(3, 1)
    spec = mapfn.make_spec(target, latent_dim=2)
    return train.make_step(spec, target, loss, optimizer or optim.adam(rate))


def data(count=4, size=4):
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, size, 3, generator=random)
    return [(x, x.sum(1, keepdim=True)) for x in inputs]


def test_fit_epoch_is_a_loop_of_steps():
    init, step = made()
    state, infos = init(0), []
    for batch in data():
        state, info = step(state, batch)
        infos.append(info)
    got, metrics = train.fit_epoch(step, init(0), data())
    assert_same(got, state)
    for name in ("loss", "gradient_norm", "latent_norm", "update_ratio"):
        mean = sum(float(getattr(info, name)) for info in infos) / len(infos)
        assert metrics[name] == pytest.approx(mean, rel=1e-5)


def test_the_named_parts_of_a_loss_stand_in_the_metrics():
    def loss(outputs, targets):
        error = outputs - targets
        return error.square().mean(), {"error": error.abs().mean(), "all": error}

    init, step = made(loss=loss)
    _, metrics = train.fit_epoch(step, init(0), data())
    assert list(metrics) == ["loss", "error", "gradient_norm", "latent_norm", "update_ratio"]


def test_fit_is_its_epochs():
    init, step = made()
    state = init(0)
    for _ in range(3):
        state, metrics = train.fit_epoch(step, state, data())
    result = train.fit(step, init(0), data(), epochs=3)
    assert_same(result.state, state)
    assert [row["epoch"] for row in result.history] == [0, 1, 2]
    assert result.history[-1].items() >= metrics.items()
    assert all(row["seconds"] > 0 for row in result.history)
    assert result.stopped == ""


def test_the_state_given_stays_as_it_is():
    init, step = made()
    state = init(0)
    before = copied(state)
    train.fit(step, state, data(), epochs=1)
    assert_same(state, before)


def test_validation_goes_into_the_history():
    init, step = made()
    seen = []

    def validate(state):
        seen.append(int(state.step))
        return {"loss": float(len(seen))}

    history = train.fit(step, init(0), data(), epochs=2, validate=validate).history
    assert seen == [4, 8]
    assert [row["val_loss"] for row in history] == [1.0, 2.0]


def test_going_on_is_as_if_never_stopped():
    init, step = made()
    inputs = torch.randn(12, 3)
    of_epoch = train.batches((inputs, inputs.sum(1, keepdim=True)), 4)
    whole = train.fit(step, init(0), of_epoch, epochs=5).state
    half = train.fit(step, init(0), of_epoch, epochs=2).state
    assert_same(train.fit(step, half, of_epoch, epochs=range(2, 5)).state, whole)


def test_a_distributed_sampler_is_told_the_epoch():
    init, step = made()
    dataset = TensorDataset(torch.randn(8, 3), torch.randn(8, 1))
    sampler = DistributedSampler(dataset, num_replicas=2, rank=0)
    told = []
    sampler.set_epoch = told.append
    train.fit(step, init(0), DataLoader(dataset, batch_size=2, sampler=sampler), epochs=3)
    assert told == [0, 1, 2]


def test_a_loss_that_is_not_finite_keeps_the_last_good_state():
    init, step = made()
    good = data(3)
    bad = [*good[:2], (torch.full((4, 3), math.nan), torch.ones(4, 1)), good[2]]
    # The last whose loss was seen: of the one after it nobody knows whether it is good.
    wanted, _ = train.fit_epoch(step, init(0), good[:1])
    result = train.fit(step, init(0), bad, epochs=3)
    assert_same(result.state, wanted)
    assert "step 2: expected a finite loss and gradient, got loss nan" in result.stopped
    assert "lower the learning rate" in result.stopped
    assert result.history == []
    with pytest.raises(NonFiniteError, match="step 2: expected a finite loss") as caught:
        train.fit_epoch(step, init(0), bad)
    assert_same(caught.value.state, wanted)


def test_a_gradient_that_is_not_finite_is_seen_too():
    def loss(outputs, targets):
        return (outputs * 0 + 1e-40).sqrt().mean() + (outputs - outputs.detach()).abs().sqrt().sum()

    init, step = made(loss=loss)
    result = train.fit(step, init(0), data(), epochs=1)
    assert "gradient norm" in result.stopped
    assert int(result.state.step) == 0


def test_a_training_that_diverges_keeps_no_ruined_state():
    for rate, batches in ((1e20, data(4)), (1e38, data(1))):
        init, step = made(optimizer=optim.sgd(rate))
        first = init(0)
        result = train.fit(step, first, batches, epochs=1)
        assert "expected a finite loss and gradient" in result.stopped
        assert_same(result.state, first)


def test_a_dead_member_hides_no_other_and_the_training_goes_on():
    init, step = made()
    init, step, _ = ensemble.make_ensemble((init, step))
    state = init(range(2))
    for latent in state.latents.values():
        latent[1] = math.inf
    result = train.fit(step, state, data(2), epochs=2)
    assert result.stopped == ""
    alone, wanted = made()[0](0), made()[1]
    history = train.fit(wanted, alone, data(2), epochs=2).history
    assert [row["loss"] for row in result.history] == pytest.approx([r["loss"] for r in history])


@pytest.mark.parametrize("epochs", [-2, True, 2.0, None])
def test_epochs_that_cannot_be(epochs):
    init, step = made()
    with pytest.raises(ValueError, match=r"fit\(epochs=\): expected a number of epochs"):
        train.fit(step, init(0), data(1), epochs=epochs)


@pytest.mark.parametrize("name", ["loss", "epoch", "gradient_norm", "seconds"])
def test_an_aux_that_takes_the_name_of_a_column(name):
    def loss(outputs, targets):
        return outputs.sum(), {name: outputs.sum()}

    init, step = made(loss=loss)
    with pytest.raises(ValueError, match=f"fit: aux.*'{name}'"):
        train.fit(step, init(0), data(1), epochs=1)


def test_modes_that_are_none():
    for make in (train.early_stopping, lambda name, mode: train.keep_best(name, print, mode=mode)):
        with pytest.raises(ValueError, match=r"mode=\): expected 'min' or 'max', got 'Min'"):
            make("val_loss", mode="Min")


def test_an_interrupt_returns_the_state_so_far():
    init, step = made()
    wanted, _ = train.fit_epoch(step, init(0), data()[:3])

    def loader(epoch):
        yield from data()[:3]
        raise KeyboardInterrupt

    result = train.fit(step, init(0), loader, epochs=2)
    assert_same(result.state, wanted)
    assert result.stopped == "interrupted after step 3"


def test_an_interrupted_epoch_hands_its_state_over():
    init, step = made()
    wanted, _ = train.fit_epoch(step, init(0), data()[:3])

    def loader():
        yield from data()[:3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="interrupted after step 3") as caught:
        train.fit_epoch(step, init(0), loader())
    assert_same(caught.value.state, wanted)


def test_an_interrupt_while_validating_keeps_the_epoch():
    init, step = made()

    def validate(state):
        raise KeyboardInterrupt

    result = train.fit(step, init(0), data(), epochs=2, validate=validate)
    assert int(result.state.step) == 4


def test_callbacks_see_every_step_and_every_epoch():
    init, step = made()
    events = []
    train.fit(step, init(0), data(2), epochs=2, callbacks=[events.append])
    assert [(e.epoch, e.position, e.epoch_over) for e in events] == [
        (0, 0, False),
        (0, 1, False),
        (0, 1, True),
        (1, 0, False),
        (1, 1, False),
        (1, 1, True),
    ]
    assert [int(e.state.step) for e in events] == [1, 2, 2, 3, 4, 4]


def test_a_callback_that_says_why_ends_the_training():
    init, step = made()
    result = train.fit(
        step,
        init(0),
        data(),
        epochs=9,
        callbacks=[lambda event: "enough" if int(event.state.step) == 6 else None],
    )
    assert int(result.state.step) == 6
    assert result.stopped == "enough"
    assert len(result.history) == 1


def of_losses(losses, stop):
    """Fit with a validation that returns these, one an epoch."""
    init, step = made()
    values = iter(losses)
    return train.fit(
        step,
        init(0),
        data(1),
        epochs=len(losses),
        validate=lambda state: {"score": next(values)},
        callbacks=stop,
    )


@pytest.mark.parametrize(
    ("mode", "losses", "epochs"),
    [
        ("min", [3.0, 2.0, 2.5, 2.1, 1.0, 1.0], 4),
        ("max", [3.0, 4.0, 3.5, 5.0, 4.0, 4.5, 9.0], 6),
        ("min", [math.nan, 2.0, math.nan, 2.0, 0.0], 4),
        ("min", [3.0, 2.0, 1.0], 3),
    ],
)
def test_early_stopping(mode, losses, epochs):
    result = of_losses(losses, [train.early_stopping("val_score", patience=2, mode=mode)])
    assert len(result.history) == epochs
    if epochs < len(losses):
        assert result.stopped.startswith("val_score has not improved for 2 epochs; the best was")


def test_early_stopping_can_be_used_twice():
    stop = train.early_stopping("val_score", patience=2)
    for _ in range(2):
        assert len(of_losses([3.0, 4.0, 4.0, 4.0], [stop]).history) == 3


def test_keep_best_hands_on_what_is_best_so_far():
    kept = []
    of_losses([3.0, 2.0, 2.5, 1.0], [train.keep_best("val_score", kept.append)])
    assert [int(state.step) for state in kept] == [1, 2, 4]
    kept = []
    of_losses([3.0, 2.0, 2.5, 4.0], [train.keep_best("val_score", kept.append, mode="max")])
    assert [int(state.step) for state in kept] == [1, 4]


def test_the_progress_bar_shows_the_row(capsys):
    of_losses([3.0, 2.25], [train.progress_bar(num_steps=1)])
    shown = capsys.readouterr().out
    assert "epoch 1" in shown
    assert "score 2.25" in shown


def test_the_progress_bar_without_rich_says_so(monkeypatch):
    def without(name, *args, real=builtins.__import__, **kwargs):
        if name.startswith("rich"):
            raise ModuleNotFoundError("No module named 'rich'")
        return real(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.split(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match="rich"):
        of_losses([3.0], [train.progress_bar()])


def test_errors_say_what_to_do():
    init, step = made()
    with pytest.raises(ValueError, match=r"loader: expected batches, got none.*an iterator"):
        train.fit_epoch(step, init(0), [])
    with pytest.raises(ValueError, match=r"loader: expected batches"):
        train.fit(step, init(0), iter(data()), epochs=2)
    state = init(0)
    broken = state._replace(latents={"(root)": torch.tensor([1.0, math.inf])})
    with pytest.raises(ValueError, match=r"fit\(state\): expected finite latents.*\(root\)"):
        train.fit(step, broken, data(), epochs=1)
    for patience in (0, -1, 1.5, True, None):
        with pytest.raises(ValueError, match=r"early_stopping\(patience=\): expected an int >= 1"):
            train.early_stopping("loss", patience=patience)
    with pytest.raises(ValueError, match=r"callback\(metric\): expected one of.*got 'lots'"):
        train.fit(step, init(0), data(), epochs=1, callbacks=[train.early_stopping("lots")])
