"""make_step: one pure step for every target, batch, loss and precision."""

from collections import UserDict
from typing import NamedTuple

import optree
import pytest
import torch
from contract import settings
from strategies_for_tests import assert_close, assert_same, built, copied, tensors
from torch import nn
from zoo import ZOO

import mapfn
from mapfn import losses, optim, train
from mapfn.losses import mapping_loss, trained
from mapfn.testing import assert_fullgraph

FULL = {"stability": 0.1, "smoothness": 0.01, "alignment": 0.01}


def network():
    return nn.Sequential(
        nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Flatten(), nn.Dropout(0.2), nn.Linear(12, 2)
    )


def batch(count=8):
    random = torch.Generator().manual_seed(1)
    labels = torch.randint(2, (count,), generator=random)
    return torch.randn(count, 1, 3, 3, generator=random), labels


def perceptron():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def regression(count=16):
    x = torch.linspace(-1, 1, 4 * count).view(count, 4)
    return x, x.sum(1, keepdim=True).sin()


def training(loss=nn.functional.mse_loss, target=perceptron, optimizer=None, **options):
    module = built(target)
    spec = mapfn.make_spec(module, latent_dim=6, **options.pop("spec", {}))
    return train.make_step(spec, module, loss, optimizer or optim.adam(0.05), **options)


def run(made, data, steps=5, seed=0):
    init, step = made
    state, infos = init(seed), []
    for _ in range(steps):
        state, info = step(state, data)
        infos.append(info)
    return state, infos


def test_a_step_is_generate_apply_grad_and_update():
    module, data = built(perceptron), regression()
    spec = mapfn.make_spec(module, latent_dim=6)
    optimizer = optim.adam(0.05)
    init, step = train.make_step(spec, module, nn.functional.mse_loss, optimizer)
    state = init(seed=3)
    assert_same((state.latents, state.buffers), mapfn.init(spec, 3))
    leaves = {name: z.clone().requires_grad_() for name, z in state.latents.items()}
    outputs = mapfn.apply(module, mapfn.generate(spec, leaves, state.buffers), {}, data[0])[0]
    loss = nn.functional.mse_loss(outputs, data[1])
    loss.backward()
    theirs = torch.optim.Adam(leaves.values(), lr=0.05)
    theirs.step()
    after, info = step(state, data)
    torch.testing.assert_close(info.loss, loss.detach())
    assert_close(after.latents, {name: z.detach() for name, z in leaves.items()})
    gradients = torch.cat([z.grad for z in leaves.values()])
    before, moved = (torch.cat(list(t.latents.values())) for t in (state, after))
    torch.testing.assert_close(info.gradient_norm, gradients.norm())
    torch.testing.assert_close(info.latent_norm, before.norm())
    torch.testing.assert_close(info.update_ratio, (moved - before).norm() / before.norm())
    assert int(after.step) == 1


def test_a_step_changes_nothing_that_it_was_given():
    loss = mapping_loss(nn.functional.cross_entropy, **FULL | {"stability": trained(0.1)})
    init, step = training(loss, network)
    state, data = init(0), batch()
    before = copied((state, data))
    after, _ = step(state, data)
    assert_same((state, data), before)
    moved = ["latents", "coefficients", "target_state", "optimizer_state"]
    assert all(
        not torch.equal(a, b)
        for name in moved[:2]
        for a, b in zip(tensors(getattr(state, name)), tensors(getattr(after, name)), strict=True)
    )
    assert after.target_state["1.num_batches_tracked"] == 1
    assert_same(after.buffers, state.buffers)


@pytest.mark.parametrize(
    ("weights", "accumulate"),
    [
        (FULL, 2),
        pytest.param(FULL, 1, marks=pytest.mark.slow),
        pytest.param({}, 1, marks=pytest.mark.slow),
        pytest.param({}, 2, marks=pytest.mark.slow),
    ],
    ids=["full-2", "full-1", "task-1", "task-2"],
)
def test_one_graph_and_no_recompilation_in_50_steps(weights, accumulate):
    loss = mapping_loss(nn.functional.cross_entropy, **weights)
    init, step = training(
        loss, network, optim.adam(optim.one_cycle(0.1, 50)), accumulate=accumulate
    )
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(step, backend=counting, fullgraph=True, dynamic=False)
    torch.manual_seed(0)
    state, first = compiled(init(0), batch())
    for _ in range(49):
        state, info = compiled(state, batch())
    torch.compiler.reset()
    assert (len(graphs), int(state.step)) == (1, 50)
    assert info.loss < first.loss


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("residual", "tree") else pytest.param(name, marks=pytest.mark.slow)
        for name in ZOO
    ],
)
def test_a_step_of_every_target_is_one_graph_equal_to_eager(name):
    tree, target = ZOO[name].built()
    spec = mapfn.make_spec(tree, strategy="slvt", latent_dim=4)
    init, step = train.make_step(
        spec, target, lambda out, wanted: ((out - wanted) ** 2).mean(), optim.sgd(0.1)
    )
    x = ZOO[name].inputs(2)
    state = init(0) if isinstance(target, nn.Module) else init(0, tensors=tree)
    outputs = mapfn.apply(
        target, mapfn.generate(spec, state.latents, state.buffers), state.target_state, x
    )[0]
    with settings():
        assert_fullgraph(step, state, (x, torch.zeros_like(outputs)), seed=0, calls=2)


def test_accumulated_parts_are_the_whole_batch():
    whole, parts = (run(training(accumulate=n), regression()) for n in (1, 4))
    assert_close(whole, parts)


def test_accumulation_hands_the_target_state_on():
    plain = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    init, step = training(target=lambda: plain, accumulate=4)
    state, _ = step(init(0), regression())
    module = nn.BatchNorm1d(4)
    for part in regression()[0].chunk(4):
        module(part)
    torch.testing.assert_close(state.target_state["0.running_mean"], module.running_mean)
    assert state.target_state["0.num_batches_tracked"] == 4


def test_accumulation_refuses_what_it_cannot_cut():
    init, step = training(accumulate=3)
    with pytest.raises(ValueError, match=r"step\(batch\).*cut into 3, got \[16\]"):
        step(init(0), regression(16))
    graph = torch.compile(step, fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"cut into 3, got \[16\]"):
        graph(init(0), regression(16))
    inputs, targets = regression(6)
    with pytest.raises(ValueError, match=r"one number of samples.*got \[3, 6\]"):
        step(init(0), (inputs, {"targets": targets, "class_weights": torch.ones(3)}))


def test_accumulated_aux_may_be_whole_numbers_or_python_ones():
    def loss(outputs, targets):
        near = (outputs - targets).abs() < 0.5
        return outputs.square().mean(), {"near": near.sum(), "weight": 0.5}

    (_, one), (_, two) = (run(training(loss, accumulate=n), regression(), 1) for n in (1, 2))
    assert two[0].aux["near"] == one[0].aux["near"] / 2
    assert two[0].aux["weight"] == one[0].aux["weight"] == 0.5


def test_an_aux_with_the_name_of_a_term_is_refused():
    def loss(outputs, targets):
        return outputs.sum(), {"stability": outputs.sum()}

    with pytest.raises(ValueError, match=r"step: aux.*'stability'"):
        run(training(mapping_loss(loss, stability=0.1)), regression(), 1)


@pytest.mark.parametrize("extra", [({}, 1), torch.ones(3, 2), None])
def test_a_loss_that_returns_something_else(extra):
    def loss(outputs, targets):
        return (outputs.sum(), *extra) if isinstance(extra, tuple) else (outputs.sum(), extra)

    with pytest.raises(ValueError, match="loss_fn: expected a scalar tensor, or one and a dict"):
        run(training(loss), regression(), 1)


def test_the_callers_autocast_holds_where_the_step_has_none():
    def loss(outputs, targets):
        assert outputs.dtype == torch.bfloat16
        return outputs.float().sum()

    with torch.autocast("cpu", torch.bfloat16):
        run(training(loss), regression(), 1)


def test_a_named_tuple_is_one_input():
    """A PackedSequence is one."""

    class Points(NamedTuple):
        x: torch.Tensor
        y: torch.Tensor

    class Line(nn.Linear):
        def forward(self, points):
            return super().forward(points.x) - points.y

    x, y = regression()
    made = training(lambda outputs, _: outputs.square().mean(), lambda: Line(4, 1), accumulate=2)
    assert run(made, (Points(x, y), None), 1)[1][0].loss > 0


def test_a_mapping_of_another_class_is_cut_like_a_dict():
    class Line(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    def loss(outputs, batch):
        assert len(outputs) == 4
        return outputs.square().mean()

    run(training(loss, lambda: Line(4, 1), accumulate=2), UserDict(x=regression(8)[0]), 1)


@pytest.mark.parametrize("kind", ["tuple", "keywords", "positions", "function", "list"])
def test_batches_of_every_kind(kind):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 1)

        def forward(self, x, shift):
            return self.linear(x) + shift

    x, y = regression()
    shift = torch.ones(16, 1)
    forms = {
        "tuple": ((x, shift), y),
        "list": [[x, shift], y],
        "positions": ((x, shift), y),
        "keywords": ({"x": x, "shift": shift}, y),
        "function": {"values": x, "labels": y, "shift": shift},
    }

    def unpack(batch):
        return (batch["values"],), {"shift": batch["shift"]}, batch["labels"]

    options = {"unpack": unpack} if kind == "function" else {}
    assert_same(
        run(training(target=Sum, **options), forms[kind])[0],
        run(training(target=Sum), forms["tuple"])[0],
    )


def test_a_target_with_labels_and_a_model_output():
    from transformers.modeling_outputs import SequenceClassifierOutput

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 2)

        def forward(self, inputs, labels):
            logits = self.linear(inputs)
            loss = nn.functional.cross_entropy(logits, labels)
            return SequenceClassifierOutput(loss=loss, logits=logits)

    data = {"inputs": regression(8)[0], "labels": torch.arange(8) % 2}
    loss = mapping_loss(lambda outputs, batch: outputs.loss, **FULL)
    _, infos = run(training(loss, Model, accumulate=2), data, steps=20)
    assert infos[-1].loss < infos[0].loss
    assert infos[0].aux["stability"] > 0
    made = training(loss, Model)
    assert_fullgraph(made.step, made.init(0), data, calls=2)


def test_a_function_of_a_tree():
    params = {"w": [torch.zeros(4, 3), torch.zeros(3, 1)], "b": torch.zeros(1)}

    def forward(params, state, x):
        hidden = torch.tanh(x @ params["w"][0])
        return hidden @ params["w"][1] + params["b"], {"calls": state["calls"] + 1}

    spec = mapfn.make_spec(params, strategy="slvt", latent_dim=8)
    init, step = train.make_step(spec, forward, nn.functional.mse_loss, optim.adam(0.05))
    state = init(0, target_state={"calls": torch.tensor(0)})
    first = None
    for _ in range(30):
        state, info = step(state, regression())
        first = info.loss if first is None else first
    assert state.target_state["calls"] == 30
    assert info.loss < 0.9 * first


def test_named_parts_of_the_loss():
    def task(outputs, targets):
        error = (outputs - targets).square().mean()
        return error, {"error": error.sqrt()}

    _, (info, *_) = run(training(task), regression())
    assert list(info.aux) == ["error"]
    torch.testing.assert_close(info.aux["error"], info.loss.sqrt())
    loss = mapping_loss(task, **FULL | {"alignment": trained(0.3)})
    _, (info, *_) = run(training(loss), regression())
    names = ["task", "stability", "smoothness", "alignment", "alignment_weight", "error"]
    assert list(info.aux) == names
    aux = info.aux
    weight = float(aux["alignment_weight"])
    assert weight == pytest.approx(0.3)
    wanted = aux["task"] + 0.1 * aux["stability"] + 0.01 * aux["smoothness"]
    wanted = wanted + weight * aux["alignment"] - torch.tensor(weight).log()
    torch.testing.assert_close(info.loss, wanted)


@pytest.mark.parametrize("mapper", [mapfn.hadamard(), mapfn.mlp((5,))], ids=["closed", "probed"])
def test_terms_of_a_step_are_those_of_the_losses(mapper):
    """With the noise and the probes that the seed and the step give."""
    from mapfn.draws import draw_step

    module, data = built(perceptron), regression()
    spec = mapfn.make_spec(module, latent_dim=6, mapper=mapper)
    loss = mapping_loss(nn.functional.mse_loss, **FULL, noise=0.3)
    init, step = train.make_step(spec, module, loss, optim.sgd(0.01))
    state, draws = init(5), []
    for _ in range(2):
        draw = draw_step(spec, loss, state)
        draws.append(draw)
        where = spec, state.latents, state.buffers, state.moments
        outputs = [
            mapfn.apply(module, mapfn.generate(spec, z, state.buffers), {}, data[0])[0]
            for z in (
                state.latents,
                {name: z + 0.3 * draw.noise[name] for name, z in state.latents.items()},
            )
        ]
        wanted = {
            "stability": losses.stability(*outputs),
            "smoothness": losses.smoothness(*where, draw.probes),
            "alignment": losses.alignment(*where),
        }
        state, info = step(state, data)
        for name, value in wanted.items():
            torch.testing.assert_close(info.aux[name], value)
    assert not any(map(torch.equal, *(tensors(draw) for draw in draws)))


def test_noise_and_probes_follow_from_the_seed_and_the_step():
    loss = mapping_loss(nn.functional.mse_loss, **FULL)
    made = training(loss, spec={"mapper": mapfn.mlp((5,))})
    torch.manual_seed(1)
    one = run(made, regression())
    torch.manual_seed(2)
    assert_same(one[0], run(made, regression())[0])
    other = run(made, regression(), seed=1)
    assert one[1][0].aux["stability"] != other[1][0].aux["stability"]


@pytest.mark.parametrize("start", [0.05, 3.0])
@pytest.mark.parametrize("term", [0.2, 5.0])
def test_trained_coefficients_settle_at_one_over_their_term(start, term):
    """They neither collapse to 0 nor run away; the terms are held, for training lowers them too."""
    loss = mapping_loss(nn.functional.mse_loss, alignment=trained(start))
    optimizer, values = optim.adam(0.05), losses.coefficients(loss)
    state = optimizer.init(values)
    for _ in range(1000):
        gradients = torch.func.grad(
            lambda own: losses.weigh(loss, {"alignment": torch.tensor(term)}, own)
        )(values)
        updates, state = optimizer.update(gradients, state, values)
        values = optim.apply_updates(values, updates)
    (weight,) = losses.weights(values).values()
    assert float(weight) == pytest.approx(1 / term, rel=0.01)


def test_trained_coefficients_are_trained_beside_the_latents():
    loss = mapping_loss(nn.functional.mse_loss, alignment=trained(0.05))
    state, infos = run(training(loss, optimizer=optim.adam(0.1)), regression(), steps=20)
    assert set(state.coefficients) == {"alignment"}
    weights = [float(info.aux["alignment_weight"]) for info in infos]
    assert weights == sorted(weights)
    assert weights[-1] > 2 * weights[0]


def test_a_resumed_run_has_the_bits_of_the_whole_one(tmp_path):
    loss = mapping_loss(nn.functional.cross_entropy, **FULL)
    made = training(loss, network, optim.adam(optim.cosine(0.1, 10)))
    whole, _ = run(made, batch(), steps=0)
    torch.manual_seed(4)
    for _ in range(6):
        whole, _ = made.step(whole, batch())
    torch.manual_seed(4)
    half, _ = run(made, batch(), steps=3)
    leaves, structure = optree.tree_flatten(half)
    torch.save((leaves, torch.get_rng_state()), tmp_path / "half.pt")
    torch.manual_seed(9)
    loaded, generator = torch.load(tmp_path / "half.pt", weights_only=True)
    torch.set_rng_state(generator)
    state, again = (
        optree.tree_unflatten(structure, loaded),
        training(loss, network, optim.adam(optim.cosine(0.1, 10))),
    )
    for _ in range(3):
        state, _ = again.step(state, batch())
    assert_same(state, whole)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_mixed_precision(compiled):
    """T11: finite, near to float32, and everything kept stays in float32."""
    loss = mapping_loss(nn.functional.mse_loss, **FULL)
    seen = []

    class Seen(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            if not torch.compiler.is_compiling():
                seen.append(y.dtype)
            return y

    def target():
        return nn.Sequential(Seen(4, 8), nn.Tanh(), Seen(8, 1))

    half = training(loss, target, autocast=torch.bfloat16)
    if compiled:
        state = half.init(0)
        assert_fullgraph(half.step, state, regression(), calls=2, tolerance=(2e-2, 2e-2))
        return
    low, infos = run(half, regression(), steps=10)
    assert set(seen) == {torch.bfloat16}
    full, wanted = run(training(loss, target), regression(), steps=10)
    assert [leaf.dtype for leaf in tensors(low)] == [leaf.dtype for leaf in tensors(full)]
    assert [float(i.loss) for i in infos] == pytest.approx(
        [float(i.loss) for i in wanted], rel=0.05
    )
    assert_close(low.latents, full.latents, rtol=0.1, atol=0.1)


def test_autocast_gradients_of_grad_and_backward_agree():
    """T11: the backward pass has the casts of the forward pass, whichever way it is asked for."""
    module, (x, y) = built(perceptron), regression()
    spec = mapfn.make_spec(module, latent_dim=6)
    latents, buffers = mapfn.init(spec)

    def loss(latents):
        with torch.autocast("cpu", torch.bfloat16):
            params = mapfn.generate(spec, latents, buffers)
            return nn.functional.mse_loss(mapfn.apply(module, params, {}, x)[0].float(), y)

    leaves = {name: z.clone().requires_grad_() for name, z in latents.items()}
    loss(leaves).backward()
    got = torch.func.grad(loss)(latents)
    assert_same(got, {name: z.grad for name, z in leaves.items()})
    assert all(bool(g.isfinite().all()) and bool(g.any()) for g in got.values())


def test_init_on_meta_and_with_a_state_of_its_own():
    with torch.device("meta"):
        target = network()
    spec = mapfn.make_spec(target, latent_dim=3)
    init, step = train.make_step(spec, target, nn.functional.cross_entropy, optim.adam(0.1))
    own = mapfn.init_state(network())
    own["1.running_mean"] += 5
    state = init(0, target_state=own)
    assert_same(state.target_state, own)
    assert step(state, batch())[1].loss.isfinite()


BAD = {
    r"mapping_loss\(task\).*expected a function, got str": lambda: training("mse"),
    r"make_step\(accumulate=\).*int >= 1, got 0": lambda: training(accumulate=0),
    r"mapping_loss\(stability=\).*got -1": lambda: mapping_loss(print, stability=-1),
    r"mapping_loss\(smoothness=\).*got nan": lambda: mapping_loss(print, smoothness=float("nan")),
    r"mapping_loss\(alignment=\).*trained\(\)": lambda: mapping_loss(print, alignment="x"),
    r"mapping_loss\(noise=\).*got None": lambda: mapping_loss(print, noise=None),
    r"mapping_loss\(num_probes=\).*got 0": lambda: mapping_loss(print, num_probes=0),
    r"trained\(value=\).*above 0.*got 0": lambda: trained(0.0),
    r"step\(batch\).*got tuple of 3": lambda: run(training(), (1, 2, 3)),
    r"step\(batch\).*got Tensor": lambda: run(training(), torch.ones(2)),
    r"make_step\(autocast=\).*got 'bf16'": lambda: training(autocast="bf16"),
    r"make_step\(optimizer\).*got Adam": lambda: training(
        optimizer=torch.optim.Adam([torch.zeros(1, requires_grad=True)])
    ),
    r"step.*loss_fn.*scalar.*got.*\[16, 1\]": lambda: run(
        training(lambda out, y: (out - y).square()), regression()
    ),
}


@pytest.mark.parametrize("reason", BAD)
def test_bad_arguments_are_named(reason):
    with pytest.raises((ValueError, TypeError), match=reason):
        BAD[reason]()
