"""Running the target: strict, pure, any method, and baked."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import mapfn


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def params_of(target):
    return {name: 2 * p.detach() for name, p in target.named_parameters()}


def images():
    return torch.arange(15.0).view(5, 3).sin()


def snapshot(target):
    places = [(m, n, p) for m in target.modules() for n, p in m._parameters.items()]
    return {n: t.clone() for n, t in target.state_dict().items()}, places


def assert_untouched(target, before):
    values, places = before
    after = target.state_dict()
    assert list(after) == list(values)
    assert all(torch.equal(after[name], value) for name, value in values.items())
    assert all(module._parameters[name] is p for module, name, p in places)


def loaded(target, params):
    """Return the module with other weights: the oracle."""
    own = copy.deepcopy(target)
    own.load_state_dict(params, strict=False)
    return own


@pytest.mark.parametrize("training", [True, False])
def test_apply_equals_the_module_and_touches_nothing(training):
    target = network().train(training)
    params, state = params_of(target), mapfn.init_state(target)
    before, kept = snapshot(target), {n: t.clone() for n, t in state.items()}
    oracle = loaded(target, params)
    outputs, new = mapfn.apply(target, params, state, images())
    torch.testing.assert_close(outputs, oracle(images()))
    assert_untouched(target, before)
    assert all(torch.equal(state[name], kept[name]) for name in kept)
    assert {n: t.tolist() for n, t in new.items()} == {
        n: t.tolist() for n, t in oracle.named_buffers()
    }
    assert new["1.num_batches_tracked"].dtype == torch.int64
    assert int(new["1.num_batches_tracked"]) == int(training)


BAD = [
    (
        lambda p: {n: t for n, t in p.items() if n != "0.bias"},
        ValueError,
        "params: .*missing '0.bias'",
    ),
    (lambda p: p | {"3.bias": torch.zeros(1)}, ValueError, "params: .*extra '3.bias'"),
    (lambda p: {n.replace("0.b", "0.B"): t for n, t in p.items()}, ValueError, "extra '0.Bias'"),
    (lambda p: p | {"0.bias": torch.zeros(1)}, ValueError, r"'0.bias'\].*\(4,\), got shape \(1,\)"),
    (lambda p: p | {"0.weight": torch.zeros(1, 3)}, ValueError, r"shape \(4, 3\)"),
    (lambda p: p | {"0.bias": 0.0}, TypeError, r"params\['0.bias'\].*a tensor, got float"),
    (lambda p: list(p.values()), TypeError, "params: expected a dict, got list"),
]


@pytest.mark.parametrize(("change", "error", "words"), BAD)
def test_params_are_checked_exactly(change, error, words):
    target = network()
    for function in (
        lambda p: mapfn.apply(target, p, mapfn.init_state(target), images()),
        lambda p: mapfn.bake(target, p, mapfn.init_state(target)),
    ):
        with pytest.raises(error, match=words):
            function(change(params_of(target)))


def test_state_is_checked_exactly():
    target = network()
    with pytest.raises(ValueError, match=r"state: .*missing '1.running_mean'"):
        mapfn.apply(target, params_of(target), {}, images())
    wrong = mapfn.init_state(target) | {"1.running_mean": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"state\['1.running_mean'\]"):
        mapfn.apply(target, params_of(target), wrong, images())


class Counter(nn.Module):
    """Buffers changed in place, reassigned, and not saved; other methods; odd argument names."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("inplace", torch.zeros(()))
        self.register_buffer("reassigned", torch.zeros(()))
        self.register_buffer("unsaved", torch.ones(()), persistent=False)

    def forward(self, x, *, method=0, params=0, state=0, target=0, training=0, kwargs=0):
        self.inplace += 1
        self.reassigned = self.reassigned + 2
        return self.fc(x) + method + params + state + target + training + kwargs

    def encode(self, x, scale=1.0):
        return self.drop(self.fc(x)) * scale * self.unsaved

    def fail(self):
        raise RuntimeError("own error")


def test_both_kinds_of_buffers_come_out_and_stay_in():
    target = Counter()
    state = mapfn.init_state(target)
    assert list(state) == ["inplace", "reassigned", "unsaved"]
    for step in (1, 2):
        _, state = mapfn.apply(target, params_of(target), state, images())
        assert [float(t) for t in state.values()] == [step, 2 * step, 1]
    assert [float(b) for b in target.buffers()] == [0, 0, 1]


@pytest.mark.parametrize("name", ["method", "params", "state", "target", "training", "kwargs"])
def test_the_targets_own_keywords_reach_it(name):
    target = Counter()
    params, state = params_of(target), mapfn.init_state(target)
    plain, _ = mapfn.apply(target, params, state, images())
    moved, _ = mapfn.apply(target, params, state, x=images(), **{name: 5.0})
    torch.testing.assert_close(moved, plain + 5.0)


def test_call_runs_another_method_in_another_mode():
    target = Counter()
    params, state = params_of(target), mapfn.init_state(target)
    target.drop.eval()
    modes = [m.training for m in target.modules()]
    outputs, _ = mapfn.call(
        target, params, state, images(), method="encode", training=False, kwargs={"scale": 3.0}
    )
    torch.testing.assert_close(outputs, 3 * loaded(target, params).fc(images()))
    dropped, _ = mapfn.call(target, params, state, images(), method="encode", training=True)
    assert (dropped == 0).any()
    assert [m.training for m in target.modules()] == modes
    before = snapshot(target)
    with pytest.raises(RuntimeError, match="own error"):
        mapfn.call(target, params, state, method="fail", training=False)
    assert [m.training for m in target.modules()] == modes
    assert_untouched(target, before)


def test_a_module_at_two_paths_is_put_back_exactly():
    shared = nn.Linear(3, 3)
    target = nn.Sequential(shared, nn.Tanh(), nn.Sequential(shared))
    before, params = snapshot(target), params_of(target)
    outputs, _ = mapfn.apply(target, params, {}, images())
    torch.testing.assert_close(outputs, loaded(target, params)(images()))
    assert_untouched(target, before)


def test_tied_weights_get_one_tensor():
    target = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    target[1].weight = target[0].weight
    params = params_of(target)
    assert "1.weight" not in params
    outputs, _ = mapfn.apply(target, params, {}, images())
    torch.testing.assert_close(outputs, loaded(target, params)(images()))
    baked = mapfn.bake(target, params, {})
    assert baked[0].weight is baked[1].weight
    torch.testing.assert_close(baked(images()), outputs)


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, nn.DataParallel])
@torch.no_grad()  # A child that checkpoints has no right gradients, and is refused.
def test_wrapped_targets_run(wrap):
    inside, plain = network(), network()
    inside[2] = wrap(inside[2])
    params, state = params_of(plain), mapfn.init_state(plain)
    expected = mapfn.apply(plain, params, state, images())
    for target in (wrap(plain), inside, wrap(inside)):
        outputs, new = mapfn.apply(target, params, state, images())
        torch.testing.assert_close(outputs, expected[0])
        assert list(new) == list(expected[1])


def test_function_targets():
    def run(params, state, x, *, bias=0.0):
        state["calls"] += 1
        return x @ params["w"] + bias, state

    params, state = {"w": torch.ones(3, 2)}, {"calls": torch.zeros(())}
    outputs, new = mapfn.apply(run, params, state, images(), bias=1.0)
    torch.testing.assert_close(outputs, images() @ torch.ones(3, 2) + 1)
    assert (float(new["calls"]), float(state["calls"])) == (1, 0)
    torch.testing.assert_close(mapfn.bake(run, params, state)(images(), bias=1.0)[0], outputs)
    assert mapfn.init_state(run) == {}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_baked_modules_are_plain_and_independent(device):
    target = network()
    params, state = params_of(target), mapfn.init_state(target)
    state["1.running_mean"] += 3
    expected, _ = mapfn.call(target, params, state, images(), training=False)
    baked = mapfn.bake(target.to(device), params, state).eval()
    torch.testing.assert_close(baked(images()), expected)
    pointers = {p.data_ptr() for p in baked.state_dict().values()}
    assert not pointers & {p.data_ptr() for p in (*params.values(), *state.values())}
    assert {name for name, _ in baked.named_parameters()} == set(params)
    params["0.weight"].zero_()
    torch.testing.assert_close(baked(images()), expected)


def test_baked_parametrizations_stay():
    target = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    params = params_of(target)
    baked = mapfn.bake(target, params, {})
    assert nn.utils.parametrize.is_parametrized(baked[0], "weight")
    torch.testing.assert_close(baked(images()), mapfn.apply(target, params, {}, images())[0])


def test_meta_targets_need_values_for_their_buffers():
    hollow = network().to("meta")
    with pytest.raises(ValueError, match=r"'1\.running_mean'.*on meta"):
        mapfn.init_state(hollow)
    state = mapfn.init_state(hollow, mapfn.init_state(network()))
    params = params_of(network())
    expected = mapfn.apply(network(), params, state, images())
    torch.testing.assert_close(mapfn.apply(hollow, params, state, images()), expected)
    hollow.table = torch.zeros(3, device="meta")
    with pytest.raises(ValueError, match="plain tensors 'table' on meta"):
        mapfn.init_state(hollow, state)
