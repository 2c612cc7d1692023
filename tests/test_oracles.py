"""Generation against modulated matrices built in full, and its derivatives against theirs."""

from itertools import pairwise

import pytest
import torch
from strategies_for_tests import MAPPERS, MODULATIONS, materialised
from torch import nn
from torch.func import hessian, jacfwd, jacrev

import mapfn
from mapfn import transform
from mapfn.groups import fixed_numbers

pytestmark = pytest.mark.usefixtures("path")
SIZE = 13
TANH_GAIN = (
    1 / torch.distributions.Normal(0, 1).icdf(torch.linspace(5e-7, 1 - 5e-7, 10**6)).tanh().std()
)

each_mapper = pytest.mark.parametrize("mapper", MAPPERS, ids=lambda m: type(m).__name__)
each_modulation = pytest.mark.parametrize("modulation", MODULATIONS, ids=lambda m: type(m).__name__)
each_activation = pytest.mark.parametrize("activation", ["identity", "tanh", "sin"])
ACTIVATE = {"identity": lambda raw: raw, "tanh": torch.tanh, "sin": torch.sin}


def one_leaf(mapper, modulation, activation="identity", latent_dim=5, **arguments):
    """Return the spec of one float64 leaf whose theta is the activated raw numbers."""
    size = latent_dim if isinstance(mapper, mapfn.identity) else SIZE
    target = {"w": torch.zeros(size, dtype=torch.float64)}
    arguments = {"scale": {"w": 1.0}} | arguments
    return mapfn.make_spec(
        target,
        mapper=mapper,
        modulation=modulation,
        activation=activation,
        latent_dim=latent_dim,
        **arguments,
    )


def generated(spec, buffers):
    """Return theta as a function of the one latent."""
    name = spec.groups[0].name
    return lambda z: mapfn.generate(spec, {name: z}, buffers)["w"]


def latent(spec, seed=0):
    (z,) = mapfn.init(spec, seed)[0].values()
    return z.double()


def dense(mapper, buffers, layer, inputs, outputs):
    """Build one layer's unmodulated matrix."""
    prefix = f"layer{layer}."
    own = {name.removeprefix(prefix): t for name, t in buffers.items() if name.startswith(prefix)}
    zero = torch.zeros((), dtype=torch.float64)
    return materialised(lambda z: mapper.generate(own, z, zero, 0, outputs), inputs)


def fixed_map(key, rows, columns):
    zero = torch.zeros((), dtype=torch.float64)
    return materialised(lambda z: transform.rows(key, z, zero, 0, rows), columns)


def modulated(modulation, matrix, z, buffers, layer):
    """Build the modulated matrix in full, entry by entry as the mathematics says."""
    dim = z.shape[0]
    if modulation is None:
        return matrix
    if isinstance(modulation, mapfn.additive):
        # (W' + alpha 1 z'^T) z' with z' = z / sqrt(d) and W' = sqrt(d) W, as a matrix on z.
        wide = dim**0.5 * matrix + modulation.alpha * torch.ones(len(matrix), 1).double() * (
            z / dim**0.5
        )
        return wide / dim**0.5
    if isinstance(modulation, mapfn.affine):
        gained = matrix * (1 + modulation.scale * z.tanh())
        return gained + modulation.shift * z.expand(len(matrix), dim) / dim
    own = f"layer{layer}.modulation."
    left = fixed_map(buffers[own + "left"], len(matrix), modulation.rank)
    gate = fixed_map(buffers[own + "gate"], modulation.rank, dim)
    right = fixed_map(buffers[own + "right"], modulation.rank, dim)
    return matrix + modulation.alpha / modulation.rank * left @ torch.diag(gate @ z) @ right


def expected_raw(group, buffers, z):
    """Return the raw numbers through full matrices, layer after layer."""
    mapper = group.mapper
    # From the mapper: a group that forgot the hidden layers must not be its own witness.
    widths = (group.latent_dim, *getattr(mapper, "hidden_dims", ()), group.num_numbers)
    last = len(widths) - 2
    for layer, (inputs, outputs) in enumerate(pairwise(widths)):
        matrix = dense(mapper, buffers, layer, inputs, outputs)
        raw = modulated(group.modulation, matrix, z, buffers, layer) @ z
        if layer == last:
            return raw
        step = TANH_GAIN.double() * raw.tanh()
        residual = isinstance(mapper, mapfn.residual_mlp) and inputs == outputs
        z = (z + step) / 2**0.5 if residual else step
    raise AssertionError


@each_mapper
@each_modulation
@pytest.mark.parametrize(
    ("activation", "latent_dim"), [("identity", 1), ("tanh", 5), ("sin", 8), ("identity", 8)]
)
def test_theta_is_the_full_matrix_times_the_latent(mapper, modulation, activation, latent_dim):
    spec = one_leaf(mapper, modulation, activation, latent_dim)
    group = spec.groups[0]
    latents, buffers = mapfn.init(spec, 3)
    z = latents[group.name].double()
    direct = isinstance(mapper, mapfn.identity)
    raw = z if direct else expected_raw(group, buffers[group.name], z)
    expected = raw if direct else ACTIVATE[activation](raw)
    got = mapfn.generate(spec, {group.name: z}, buffers)["w"]
    # The gain is a rounded constant.
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@each_mapper
@each_activation
def test_theta_is_base_plus_scale_times_activated(mapper, activation):
    target = nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)).double()
    common = {"mapper": mapper, "activation": activation, "strategy": "slvt", "latent_dim": 5}
    scales = {"0.weight": 0.5, "0.bias": 2.0, "1.weight": 0.25, "1.bias": 1.5}
    plain = mapfn.make_spec(target, scale=dict.fromkeys(scales, 1.0), **common)
    scaled = mapfn.make_spec(target, scale=scales, base="init", **common)
    latents, buffers = mapfn.init(plain, 1)
    bases = mapfn.init(scaled, 1)[1]
    raw = mapfn.generate(plain, latents, buffers)
    raw["1.weight"] -= 1.0  # the base of a norm's weight
    got, base = mapfn.generate(scaled, latents, bases), mapfn.base_params(scaled, bases)
    for name, scale in scales.items():
        torch.testing.assert_close(got[name], base[name] + scale * raw[name], rtol=1e-5, atol=1e-6)


@each_mapper
@each_modulation
def test_first_derivatives_are_right(mapper, modulation):
    spec = one_leaf(mapper, modulation, "sin", latent_dim=3)
    theta = generated(spec, mapfn.init(spec)[1])
    z = latent(spec).requires_grad_()
    assert torch.autograd.gradcheck(theta, z, check_forward_ad=True)


@each_mapper
@each_modulation
def test_second_derivatives_are_right(mapper, modulation):
    spec = one_leaf(mapper, modulation, "tanh", latent_dim=3)
    theta = generated(spec, mapfn.init(spec)[1])
    assert torch.autograd.gradgradcheck(theta, latent(spec).requires_grad_())


@pytest.mark.parametrize(
    "mapper",
    [m for m in MAPPERS if hasattr(m, "linear") and not hasattr(m, "hidden_dims")],
    ids=lambda m: type(m).__name__,
)
def test_jacobians_of_linear_maps_are_the_matrix(mapper):
    spec = one_leaf(mapper, None)
    buffers = mapfn.init(spec)[1]
    theta, z = generated(spec, buffers), latent(spec)
    matrix = dense(mapper, buffers[spec.groups[0].name], 0, 5, len(theta(z)))
    for jacobian in (
        jacrev(theta)(z),
        jacfwd(theta)(z),
        torch.autograd.functional.jacobian(theta, z),
    ):
        torch.testing.assert_close(jacobian, matrix, rtol=1e-9, atol=1e-9)


@each_mapper
@each_modulation
def test_jacobians_of_all_maps_agree(mapper, modulation):
    spec = one_leaf(mapper, modulation, "sin")
    theta, z = generated(spec, mapfn.init(spec)[1]), latent(spec)
    torch.testing.assert_close(jacrev(theta)(z), jacfwd(theta)(z), rtol=1e-9, atol=1e-9)


@each_mapper
@each_modulation
def test_hessian_of_a_loss_is_the_oracles(mapper, modulation):
    spec = one_leaf(mapper, modulation, latent_dim=4)
    group, buffers = spec.groups[0], mapfn.init(spec)[1]
    theta, z = generated(spec, buffers), latent(spec)
    weights = torch.linspace(-1, 1, len(theta(z)), dtype=torch.float64)

    def oracle(z):
        direct = isinstance(mapper, mapfn.identity)
        return z if direct else expected_raw(group, buffers[group.name], z)

    got = hessian(lambda z: (theta(z) ** 3 * weights).sum())(z)
    expected = hessian(lambda z: (oracle(z) ** 3 * weights).sum())(z)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_the_fixed_numbers_are_those_of_the_groups_name():
    target = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    spec = mapfn.make_spec(target, latent_dim=2)
    keys = [int(fixed_numbers(group, 0)["layer0.key"]) for group in spec.groups]
    assert len(set(keys)) == 2
    assert keys == [int(own["layer0.key"]) for own in mapfn.init(spec, 0)[1].values()]


def small_cnn():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10)
    )


def small_mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


@pytest.mark.parametrize("build", [small_cnn, small_mlp])
@pytest.mark.parametrize("strategy", ["slvt", "layerwise"])
def test_first_loss_is_the_standard_networks(build, strategy):
    numbers = torch.Generator().manual_seed(0)
    images = 5 * torch.randn(64, 1, 8, 8, generator=numbers)
    labels = torch.randint(10, (64,), generator=numbers)

    def standard(seed):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return build()(images)

    target = build()
    spec = mapfn.make_spec(target, strategy=strategy, latent_dim=128)

    def mapped(seed):
        return mapfn.apply(target, mapfn.generate(spec, *mapfn.init(spec, seed)), {}, images)[0]

    with torch.no_grad():
        outputs = [torch.stack([run(seed) for seed in range(12)]) for run in (mapped, standard)]
    ours, theirs = (
        nn.functional.cross_entropy(o.flatten(0, 1), labels.repeat(12)) for o in outputs
    )
    assert float(ours) == pytest.approx(float(theirs), rel=0.1)
    # At inputs of this size the spread of the outputs shows in the loss; it agrees by itself too.
    assert float(outputs[0].std()) == pytest.approx(float(outputs[1].std()), rel=0.2)
