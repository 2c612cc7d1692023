"""Scales and bases against the spread that torch's own initialisation really has."""

import pytest
import torch
from torch import nn

import mapfn
from mapfn.layout import layout


def leaf_of(target, name):
    return next(leaf for leaf in layout(target).leaves if name in leaf.names)


# Leaves of at least a thousand numbers, so that chance alone is within a few per cent.
OWN = [
    (lambda: nn.Linear(64, 2048), ["weight", "bias"]),
    (lambda: nn.Conv1d(16, 2048, 3), ["weight", "bias"]),
    (lambda: nn.Conv2d(4, 2048, 3), ["weight", "bias"]),
    (lambda: nn.Conv3d(2, 2048, 2), ["weight", "bias"]),
    (lambda: nn.Conv2d(64, 2048, 3, groups=16), ["weight", "bias"]),
    (lambda: nn.ConvTranspose1d(4, 2048, 3), ["weight", "bias"]),
    (lambda: nn.ConvTranspose2d(8, 2048, 2), ["weight", "bias"]),
    (lambda: nn.ConvTranspose2d(32, 2048, 2, groups=16), ["weight", "bias"]),
    (lambda: nn.ConvTranspose3d(2, 2048, 2), ["weight", "bias"]),
    (
        lambda: nn.LSTM(8, 300, num_layers=2, bidirectional=True),
        ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l1_reverse", "weight_ih_l1"],
    ),
    (lambda: nn.LSTM(8, 400, proj_size=16), ["weight_ih_l0", "weight_hr_l0", "bias_hh_l0"]),
    (lambda: nn.GRU(8, 400), ["weight_ih_l0", "weight_hh_l0", "bias_ih_l0"]),
    (lambda: nn.RNN(8, 1200), ["weight_ih_l0", "bias_ih_l0"]),
    (lambda: nn.LSTMCell(8, 300), ["weight_ih", "weight_hh", "bias_ih"]),
    (lambda: nn.GRUCell(8, 400), ["weight_ih", "weight_hh", "bias_hh"]),
    (lambda: nn.MultiheadAttention(64, 4), ["in_proj_weight", "out_proj.weight"]),
    (
        lambda: nn.MultiheadAttention(64, 4, kdim=32, vdim=16),
        ["q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"],
    ),
    (lambda: nn.TransformerEncoderLayer(32, 4), ["self_attn.in_proj_weight", "linear1.weight"]),
    (lambda: nn.Bilinear(9, 4, 1500), ["weight", "bias"]),
]


@pytest.mark.parametrize(("build", "leaves"), OWN, ids=lambda v: str(v) if type(v) is list else "")
def test_auto_is_the_spread_of_torchs_own_initialisation(build, leaves):
    torch.manual_seed(0)
    target = build()
    own = dict(target.named_parameters())
    for name in leaves:
        assert own[name].numel() >= 1000
        initial = leaf_of(target, name).initial
        assert initial.std == pytest.approx(float(own[name].detach().std()), rel=0.1), name
        assert initial.mean == 0.0


@pytest.mark.parametrize(
    "target",
    [
        nn.LayerNorm(4),
        nn.BatchNorm2d(4),
        nn.GroupNorm(2, 4),
        nn.InstanceNorm1d(4, affine=True),
        nn.RMSNorm(4),
    ],
    ids=lambda m: type(m).__name__,
)
def test_norm_layers_start_at_one(target):
    assert leaf_of(target, "weight").initial[:2] == (0.1, 1.0)
    if getattr(target, "bias", None) is not None:
        assert leaf_of(target, "bias").initial[:2] == (0.1, 0.0)


class MyRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


class Conv1D(nn.Module):
    """The transposed linear layer that HuggingFace has under this name."""

    def __init__(self):
        super().__init__()
        self.nf = 6
        self.weight = nn.Parameter(torch.zeros(4, 6))
        self.bias = nn.Parameter(torch.zeros(6))


def test_layers_that_are_known_by_name():
    assert leaf_of(MyRMSNorm(), "scale").initial[:2] == (0.1, 1.0)
    assert leaf_of(Conv1D(), "weight").initial[:2] == (0.02, 0.0)
    assert leaf_of(nn.Embedding(5, 3), "weight").initial[:2] == (0.02, 0.0)
    assert leaf_of(nn.EmbeddingBag(5, 3), "weight").initial[:2] == (0.02, 0.0)
    assert leaf_of(nn.PReLU(), "weight").initial.mean == 0.25


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_weight_norm_magnitudes_start_at_one():
    new = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    old = nn.utils.weight_norm(nn.Linear(4, 3))
    for target, magnitude, direction in [
        (new, "parametrizations.weight.original0", "parametrizations.weight.original1"),
        (old, "weight_g", "weight_v"),
    ]:
        assert leaf_of(target, magnitude).initial[:2] == (0.1, 1.0)
        assert leaf_of(target, direction).initial.std == pytest.approx(1 / 12**0.5)


def test_a_bias_of_a_parametrized_layer_has_the_layers_fan_in():
    target = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(12, 3)))
    assert leaf_of(target, "0.bias").initial.fan_in == 12


def test_shapes_decide_where_no_module_is():
    leaves = {
        leaf.name: leaf.initial
        for leaf in layout({"m": torch.zeros(5, 12), "s": torch.zeros(())}).leaves
    }
    assert leaves["m"].std == pytest.approx(1 / 6)
    assert leaves["s"] == (pytest.approx(3**-0.5), 0.0, 1)
    assert layout([torch.zeros(0, 3)]).leaves[0].initial.fan_in == 3


def scales_of(target, **arguments):
    spec = mapfn.make_spec(target, latent_dim=2, **arguments)
    return {
        leaf.name: scale
        for group in spec.groups
        for leaf, scale in zip(group.leaves, group.scales, strict=True)
    }


def target():
    return nn.ModuleDict({"fc": nn.Linear(8, 3), "norm": nn.LayerNorm(3)})


def test_he_scales():
    scales = scales_of(target(), scale="he")
    assert scales["fc.weight"] == 0.5
    assert scales["norm.weight"] == 0.1


def test_target_scales_are_the_targets_own_spread():
    module = target()
    scales = scales_of(module, scale="target")
    weight = module["fc"].weight.detach().double()
    assert scales["fc.weight"] == pytest.approx(float(weight.std(correction=0)))
    # A norm's weight is all ones, so that auto takes over.
    assert scales["norm.weight"] == 0.1


def test_scales_by_name_and_glob():
    scales = scales_of(target(), scale={"fc.*": 3.0, "fc.bias": 7, "norm.bias": 0.5})
    auto = scales_of(target())
    assert scales == {
        "fc.weight": 3.0,
        "fc.bias": 7.0,
        "norm.weight": auto["norm.weight"],
        "norm.bias": 0.5,
    }


def test_a_scale_of_an_alias_is_the_leafs():
    module = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    module["b"].weight = module["a"].weight
    assert scales_of(module, scale={"b.*": 9.0}) == {"a.weight": 9.0}


def test_bases():
    module = target()
    auto = mapfn.make_spec(module, latent_dim=2)
    base = mapfn.base_params(auto, mapfn.init(auto)[1])
    assert torch.equal(base["norm.weight"], torch.ones(3))
    assert not base["fc.weight"].any()
    assert not base["norm.bias"].any()
    drawn = mapfn.make_spec(module, latent_dim=2, base="init")
    base = mapfn.base_params(drawn, mapfn.init(drawn)[1])
    bound = 8**-0.5
    assert 0 < float(base["fc.weight"].abs().max()) <= bound
    assert float((base["norm.weight"] - 1).abs().max()) <= 0.1 * 3**0.5
    other = mapfn.base_params(drawn, mapfn.init(drawn, 1)[1])
    assert not torch.equal(other["fc.weight"], base["fc.weight"])
    held = mapfn.make_spec(module, latent_dim=2, base="target")
    base = mapfn.base_params(held, mapfn.init(held, target=module)[1])
    assert base["fc.weight"].data_ptr() == module["fc"].weight.data_ptr()
    assert not any(tensor.requires_grad for tensor in base.values())


def test_a_base_follows_the_seed_and_the_leaf_and_not_the_strategy():
    bases = []
    for strategy in ("slvt", "layerwise"):
        spec = mapfn.make_spec(target(), latent_dim=2, base="init", strategy=strategy)
        bases.append(mapfn.base_params(spec, mapfn.init(spec, 4)[1]))
    assert all(torch.equal(bases[0][name], bases[1][name]) for name in bases[0])
