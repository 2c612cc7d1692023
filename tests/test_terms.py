"""The terms of the mapping loss against matrices that are built in full, in float64."""

import itertools
from collections import OrderedDict

import pytest
import torch
from strategies_for_tests import ACTIVATIONS, MAPPERS, MODULATIONS, Tied, built, materialised
from torch import nn
from torch.func import functional_call, grad, jacrev

import mapfn
from mapfn import losses, raw, transform
from mapfn.groups import LAYER, MODULATION
from mapfn.moments import has_closed_form, mapped_groups, moments
from mapfn.testing import assert_fullgraph

MAPS = tuple(mapper for mapper in MAPPERS if not isinstance(mapper, mapfn.identity))
MODULATED = tuple(itertools.product(MAPS, MODULATIONS))


def named(value):
    return value if isinstance(value, str) else type(value).__name__


def made(strategy="layerwise", latent_dim=3, **options):
    """Map a float64 target whose leaves differ in scale, with latents away from any special point.

    Tied leaves, a norm layer and a scalar among them.
    """
    target = built(Tied).double()
    spec = mapfn.make_spec(target, strategy=strategy, latent_dim=latent_dim, **options)
    latents, buffers = mapfn.init(spec, seed=3)
    random = torch.Generator().manual_seed(0)
    latents = {name: torch.randn(len(z), generator=random).double() for name, z in latents.items()}
    return spec, latents, buffers, moments(spec, buffers)


def frobenius(spec, latents, buffers):
    """Sum ``||d theta / d z||_F^2 / d`` over the groups from the whole Jacobian."""
    jacobian = jacrev(lambda z: mapfn.generate(spec, z, buffers))(latents)
    total = torch.zeros((), dtype=torch.float64)
    for leaf in jacobian.values():
        for group in mapped_groups(spec):
            total += leaf[group.name].square().sum() / group.latent_dim
    return total


def unit_probes(spec):
    """Make probes over which the estimate is exact: the axes, each as long as a normal vector."""
    dims = {group.name: group.latent_dim for group in mapped_groups(spec)}
    return {name: dim**0.5 * torch.eye(dim, dtype=torch.float64) for name, dim in dims.items()}


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("mapper", "modulation"), MODULATED, ids=named)
def test_smoothness_is_the_squared_norm_of_the_jacobian(mapper, modulation, activation):
    spec, *where = made(mapper=mapper, modulation=modulation, activation=activation)
    latents, buffers, _ = where
    got = losses.smoothness(spec, *where, unit_probes(spec))
    # The sums over the rows are kept in float32.
    torch.testing.assert_close(got, frobenius(spec, latents, buffers), rtol=1e-6, atol=0)


def test_closed_forms_are_those_of_one_layer_with_additive_or_no_modulation():
    for mapper, modulation in MODULATED:
        spec, *_ = made(mapper=mapper, modulation=modulation)
        one_layer = mapper in (mapfn.hadamard(), mapfn.orthogonal(), mapfn.hashed())
        simple = modulation is None or isinstance(modulation, mapfn.additive)
        assert {has_closed_form(group) for group in spec.trained_groups} == {one_layer and simple}


@pytest.mark.parametrize("latent_dim", [1, 5, 40])
@pytest.mark.parametrize("mapper", MAPS[:3], ids=named)
def test_closed_form_equals_the_probed_one(mapper, latent_dim):
    """One formula each way: affine without its gain is additive, and is probed."""
    for activation in ACTIVATIONS:
        options = {"strategy": "slvt", "latent_dim": latent_dim, "activation": activation}
        closed = made(mapper=mapper, modulation=mapfn.additive(0.3), **options)
        probed = made(mapper=mapper, modulation=mapfn.affine(0.0, 0.3), **options)
        wanted = losses.smoothness(*probed, unit_probes(probed[0]))
        torch.testing.assert_close(losses.smoothness(*closed), wanted, rtol=1e-6, atol=0)


def test_probes_estimate_without_bias():
    spec, *where = made(mapper=mapfn.mlp((6,)), modulation=mapfn.affine(0.4, 0.2))
    random = torch.Generator().manual_seed(1)
    dims = {group.name: group.latent_dim for group in mapped_groups(spec)}
    probes = {name: torch.randn(150, dim, generator=random) for name, dim in dims.items()}
    got = losses.smoothness(spec, *where, probes)
    assert float(got) == pytest.approx(float(frobenius(spec, *where[:2])), rel=0.15)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradient_of_smoothness(activation):
    spec, latents, buffers, sums = made(activation=activation, modulation=mapfn.additive(0.3))

    def total(z):
        return losses.smoothness(spec, {**latents, "norm": z}, buffers, sums)

    def wanted(z):
        return frobenius(spec, {**latents, "norm": z}, buffers)

    z = latents["norm"]
    torch.testing.assert_close(grad(total)(z), grad(wanted)(z), rtol=1e-5, atol=1e-9)


def matrix_of(group, buffers, hidden):
    """Build the modulated matrix of a group's last layer in full, as DESIGN's formulas have it."""
    layer = len(group.layer_dims) - 1
    width, rows = len(hidden), group.num_numbers
    own, zero = raw.layer_buffers(group, layer, buffers), hidden.new_zeros(())
    fixed = materialised(lambda v: group.mapper.generate(own, v, zero, 0, rows), width)
    modulation = group.modulation
    if modulation is None:
        return fixed
    if isinstance(modulation, mapfn.additive):
        return fixed + modulation.alpha / width * hidden
    if isinstance(modulation, mapfn.affine):
        gained = fixed * (1 + modulation.scale * hidden.tanh())
        return gained + modulation.shift / width * hidden
    keys, rank = raw.scoped(buffers, f"{LAYER}{layer}.{MODULATION}"), modulation.rank
    left = materialised(lambda v: transform.rows(keys["left"], v, zero, 0, rows), rank)
    gate, right = (
        materialised(lambda v, n=n: transform.rows(keys[n], v, zero, 0, rank), width)
        for n in ("gate", "right")
    )
    return fixed + modulation.alpha / rank * left @ torch.diag(gate @ hidden) @ right


@pytest.mark.parametrize(("mapper", "modulation"), MODULATED, ids=named)
def test_alignment_is_the_cosine_with_the_mean_row_of_the_modulated_matrix(mapper, modulation):
    spec, *where = made(mapper=mapper, modulation=modulation)
    latents, buffers, _ = where
    wanted = torch.zeros((), dtype=torch.float64)
    for group in mapped_groups(spec):
        hidden = raw.last_input(group, latents[group.name], buffers[group.name])
        row = matrix_of(group, buffers[group.name], hidden).mean(0)
        wanted += 1 - nn.functional.cosine_similarity(hidden, row, dim=0)
    torch.testing.assert_close(losses.alignment(spec, *where), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("mapper", "modulation"), MODULATED, ids=named)
def test_the_matrix_of_the_oracle_makes_the_weights(mapper, modulation):
    """What alignment is compared with is the very map that generates."""
    spec, latents, buffers, _ = made("slvt", mapper=mapper, modulation=modulation, base="auto")
    (group,) = spec.groups
    hidden = raw.last_input(group, latents["all"], buffers["all"])
    scales = torch.cat([torch.full((n,), s) for n, s in group.leaf_scales])
    bases = torch.cat([leaf.reshape(-1) for leaf in mapfn.base_params(spec, buffers).values()])
    wanted = bases + scales * (matrix_of(group, buffers["all"], hidden) @ hidden)
    got = torch.cat([leaf.reshape(-1) for leaf in mapfn.generate(spec, latents, buffers).values()])
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-7)


def test_a_large_map_is_summed_in_stretches():
    """More rows than are made at once; the mean row of the whole."""
    spec = mapfn.make_spec(nn.Linear(1030, 1030), strategy="slvt", latent_dim=4)
    _, buffers = mapfn.init(spec)
    zero, (group,) = torch.zeros((), dtype=torch.float64), spec.groups
    own = raw.layer_buffers(group, 0, buffers["all"])
    fixed = materialised(lambda v: group.mapper.generate(own, v, zero, 0, group.num_numbers), 4)
    torch.testing.assert_close(
        moments(spec, buffers)["all"].row_mean.double(), fixed.mean(0), rtol=1e-5, atol=1e-8
    )


@pytest.mark.parametrize("mapper", MAPS, ids=named)
def test_alignment_where_latents_are_zero(mapper):
    """A base that is a start point has latents of 0: no direction, and still a gradient."""
    spec, latents, buffers, sums = made("slvt", mapper=mapper, base="init")
    zeros = {name: torch.zeros_like(z) for name, z in latents.items()}
    assert float(losses.alignment(spec, zeros, buffers, sums)) == pytest.approx(1.0)
    slope = grad(lambda z: losses.alignment(spec, z, buffers, sums))(zeros)
    assert all(bool(part.isfinite().all()) for part in slope.values())


def test_groups_without_a_map_have_no_terms():
    target = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    groups = mapfn.grouped(
        {"head": ["2.*"], "still": ["1.*"], "rest": ...},
        {"head": {"mapper": mapfn.identity()}, "still": {"mapper": mapfn.frozen()}},
    )
    spec = mapfn.make_spec(target, strategy=groups, latent_dim=2)
    latents, buffers = mapfn.init(spec, target=target)
    sums = moments(spec, buffers)
    assert list(sums) == ["rest"]
    whole = losses.smoothness(spec, latents, buffers, sums)
    alone = mapfn.make_spec(target[:1], strategy=mapfn.grouped({"rest": ...}), latent_dim=2)
    own = {"rest": latents["rest"]}
    lone = losses.smoothness(alone, own, {"rest": buffers["rest"]}, sums)
    torch.testing.assert_close(whole, lone)


def test_spec_without_any_map():
    spec = mapfn.make_spec(nn.Linear(2, 1), mapper=mapfn.identity())
    latents, buffers = mapfn.init(spec)
    assert moments(spec, buffers) == {}
    assert losses.smoothness(spec, latents, buffers, {}) == 0
    assert losses.alignment(spec, latents, buffers, {}) == 0


def test_smoothness_that_needs_probes_says_so():
    spec, *where = made(mapper=mapfn.mlp((5,)))
    with pytest.raises(ValueError, match=r"smoothness\(probes=\).*expected.*embed"):
        losses.smoothness(spec, *where)


def test_stability_of_outputs_of_every_kind():
    one, other = torch.zeros(4, 3), torch.full((4, 3), 2.0)
    assert losses.stability(one, other) == 12
    pair = {"a": one, "b": (one, None, 7)}, {"a": other, "b": (other, None, 8)}
    assert losses.stability(*pair) == 24
    assert losses.stability(OrderedDict(pair[0]), OrderedDict(pair[1])) == 24
    assert losses.stability(torch.tensor(1.0), torch.tensor(3.0)) == 4
    indices = torch.arange(4)
    assert losses.stability((one, indices), (other, indices + 1)) == 12
    half = losses.stability(one.bfloat16(), other.bfloat16())
    assert (half.dtype, float(half)) == (torch.float32, 12)


def test_stability_of_a_huggingface_output():
    from transformers.modeling_outputs import SequenceClassifierOutput

    outputs = [SequenceClassifierOutput(logits=torch.full((4, 3), v)) for v in (0.0, 2.0)]
    assert losses.stability(*outputs) == 12


@pytest.mark.parametrize("outputs", [None, torch.arange(3), {"a": 1}], ids=["none", "int", "dict"])
def test_stability_without_outputs(outputs):
    with pytest.raises(TypeError, match=r"stability.*expected outputs.*floating-point"):
        losses.stability(outputs, outputs)


@pytest.mark.parametrize(
    "mapper",
    [mapfn.hadamard(), pytest.param(mapfn.mlp((5,)), marks=pytest.mark.slow)],
    ids=named,
)
def test_terms_are_one_graph(mapper):
    spec, *where = made(mapper=mapper, activation="tanh", modulation=mapfn.additive(0.3))
    module = built(Tied).double()

    def terms(latents, buffers, sums, probes, index):
        params = mapfn.generate(spec, latents, buffers)
        outputs = functional_call(module, params, index)
        smooth = losses.smoothness(spec, latents, buffers, sums, probes)
        return (
            smooth,
            losses.alignment(spec, latents, buffers, sums),
            losses.stability(outputs, outputs + 1),
        )

    def both(*arguments):
        gradient = grad(lambda *given: sum(terms(*given)))(*arguments)
        return terms(*arguments), gradient

    assert_fullgraph(both, *where, unit_probes(spec), torch.tensor([[0, 1], [2, 3]]), calls=2)
