"""Mapped: the one module, and the functions behind it."""

import copy
import pickle

import pytest
import torch
from strategies_for_tests import assert_close, assert_same
from torch import nn
from zoo import ZOO

import mapfn
from mapfn.nn import Mapped, functions, unwrapped


class Net(nn.Module):
    """BatchNorm, dropout, a buffer that is in no file, and a tied head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, index):
        return self.head(self.drop(self.norm(self.embed(index) + self.table)))


INDEX = torch.arange(7)


def made(target=None, **options):
    target = target or Net()
    return target, Mapped(mapfn.make_spec(target, latent_dim=3, **options), target, seed=4)


def test_forward_is_generate_and_apply():
    target, mapped = made()
    latents, buffers = mapfn.init(mapped.spec, 4)
    params, state = mapfn.generate(mapped.spec, latents, buffers), mapfn.init_state(target)
    for _ in range(2):
        torch.manual_seed(0)
        wanted, state = mapfn.apply(target, params, state, INDEX)
        torch.manual_seed(0)
        assert_same(mapped(INDEX), wanted)
    got = functions(mapped)
    assert_same((got.latents, got.buffers, got.state), (latents, buffers, state))
    assert_same(mapped.params(), params)


@pytest.mark.parametrize("name", sorted(ZOO))
def test_every_target_of_the_zoo_trains_as_a_module(name):
    case = ZOO[name]
    tree, target = case.built()
    mapped = Mapped(mapfn.make_spec(tree, latent_dim=3), target, tensors=tree)
    outputs = mapped(case.inputs(2))
    tensors = list(mapfn.trees.tensors(outputs))
    sum(t.square().mean() for t in tensors if t.is_floating_point()).backward()
    assert all(latent.grad is not None for latent in mapped.latents)


def test_modes_and_names_are_those_of_a_module():
    target, mapped = made()
    assert mapped.training
    mapped.eval()
    assert not mapped.target.norm.training
    assert target.norm.training  # The target that was passed is nobody's but its owner's.
    assert_same(mapped(INDEX), mapped(INDEX))
    assert [name for name, _ in mapped.named_parameters()] == ["latents.0", "latents.1"]
    wanted = ["latents.0", "latents.1", "state.norm.running_mean", "state.norm.running_var"]
    assert list(mapped.state_dict()) == [*wanted, "state.norm.num_batches_tracked"]
    assert not any(isinstance(child, nn.Embedding) for child in mapped.modules())
    assert mapped.target.embed.weight.is_meta


def test_a_state_dict_goes_to_another_process():
    _, mapped = made()
    mapped(INDEX)
    other = made()[1]
    other.load_state_dict(mapped.state_dict())
    assert_same(other.eval()(INDEX), mapped.eval()(INDEX))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_are_independent_and_small(copied):
    """D8: after a forward pass too."""
    _, mapped = made()
    mapped(INDEX).sum().backward()
    other = copied(mapped)
    assert_same(other.eval()(INDEX), mapped.eval()(INDEX))
    other.latents[0].data.zero_()
    assert mapped.latents[0].abs().sum() > 0
    big = Mapped(mapfn.make_spec(nn.Linear(999, 999), latent_dim=3), nn.Linear(999, 999))
    assert len(pickle.dumps(big)) < 20_000


def test_one_graph_in_training_with_its_state():
    _, mapped = made(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    other = copy.deepcopy(mapped)
    graph = torch.compile(mapped, fullgraph=True, backend="aot_eager")
    for step in range(3):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
        got, wanted = graph(x), other(x)
        assert_close(got, wanted)
        got.sum().backward(), wanted.sum().backward()
    assert_close(dict(mapped.state.named_buffers()), dict(other.state.named_buffers()))
    assert_close([z.grad for z in mapped.latents], [z.grad for z in other.latents])


@pytest.mark.parametrize("base", ["auto", "init", "target"])
def test_to_moves_everything_and_keeps_the_maps_bits(base):
    _, mapped = made(nn.Linear(30, 20), base=base)
    before = functions(copy.deepcopy(mapped))
    mapped.to(torch.float64).to(torch.float32)
    assert_same(functions(mapped), before)
    mapped.to("meta")
    assert {t.device.type for t in mapfn.trees.tensors(functions(mapped))} == {"meta"}


def test_counts():
    _, mapped = made(nn.Linear(30, 10), strategy="slvt")
    assert mapped.trainable_parameter_count == 3
    assert mapped.target_parameter_count == 310
    assert mapped.compression_ratio == pytest.approx(310 / 3)
    assert sum(p.numel() for p in mapped.parameters()) == 3


def test_a_base_is_held_once():
    target, mapped = made(nn.Linear(30, 20), base="target")
    (base,) = (b for b in functions(mapped).buffers["(root)"].values() if b.shape == (20, 30))
    assert base.data_ptr() == target.weight.data_ptr()
    assert_same(mapped.params(), {n: p.detach() for n, p in target.named_parameters()})


def test_a_function_is_a_target_too():
    tree = {"w": torch.randn(3, 2), "steps": [torch.randn(2)]}

    def target(params, state, x):
        return x @ params["w"] + params["steps"][0], {"calls": state["calls"] + 1}

    spec = mapfn.make_spec(tree, strategy="slvt", latent_dim=4, base="target")
    state = {"calls": torch.zeros(())}
    mapped = Mapped(spec, target, tensors=tree, target_state=state)
    x = torch.ones(1, 3)
    assert_close(mapped(x), x @ tree["w"] + tree["steps"][0])
    assert (int(mapped.state.calls), int(state["calls"])) == (1, 0)


def test_any_optimizer_trains_it():
    _, mapped = made(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)))
    optimizer = torch.optim.Adam(mapped.parameters(), lr=0.1)
    x = torch.randn(32, 3, generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(mapped(x), x.sum(1, keepdim=True))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] / 4


def test_wrappers_are_looked_through():
    _, mapped = made()
    for wrapper in (nn.DataParallel(mapped), torch.compile(mapped)):
        assert unwrapped(wrapper) is mapped
    with pytest.raises(TypeError, match="mapped: expected a Mapped, got Linear"):
        functions(nn.Linear(1, 1))


def test_bad_arguments_are_those_of_init():
    spec = mapfn.make_spec(nn.Linear(3, 2), latent_dim=2, base="target")
    with pytest.raises(ValueError, match=r"init\(target=\)"):
        Mapped(spec, nn.Linear(3, 3))
    with pytest.raises(TypeError, match=r"init\(seed=\)"):
        Mapped(spec, nn.Linear(3, 2), seed=1.5)
