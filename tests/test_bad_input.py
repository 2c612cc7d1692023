"""Bad input is refused before any work, in words that say what to do."""

import pytest
import torch
from torch import nn

import mapfn

GROUPED = mapfn.grouped


def network():
    return nn.ModuleDict({"fc": nn.Linear(3, 4), "head": nn.Linear(4, 2)})


def tied(*overrides):
    return mapfn.layerwise(dict(overrides))


ARGUMENTS = [
    ({"strategy": "perlayer"}, ValueError, r"strategy.*'slvt', 'layerwise'.*'perlayer'"),
    ({"strategy": None}, ValueError, r"strategy.*got None"),
    ({"strategy": mapfn.slvt}, ValueError, r"make_spec\(strategy=\)"),
    ({"mapper": "hadamard"}, TypeError, r"mapper=.*'hadamard'.*mapfn.hadamard\(\)"),
    ({"mapper": mapfn.hadamard}, TypeError, r"mapper=.*the class hadamard"),
    ({"modulation": "additive"}, TypeError, r"modulation=.*'additive'"),
    ({"modulation": mapfn.additive}, TypeError, r"modulation=.*the class additive"),
    ({"decoder": "full"}, TypeError, r"decoder=.*'full'"),
    ({"activation": "relu"}, ValueError, r"activation=.*'tanh'.*'relu'"),
    ({"scale": "xavier"}, ValueError, r"scale=.*'auto', 'he'.*'xavier'"),
    ({"scale": {"nothing.*": 1.0}}, ValueError, r"scale=.*'nothing.\*', which matches none"),
    ({"scale": {"fc.weight": 0.0}}, ValueError, r"'fc.weight'.*a number > 0, got 0.0"),
    ({"scale": {"fc.weight": -1}}, ValueError, "a number > 0, got -1"),
    ({"scale": {"fc.weight": True}}, ValueError, "a number > 0, got True"),
    ({"scale": {"fc.weight": "big"}}, ValueError, "a number > 0, got 'big'"),
    ({"scale": {"fc.weight": float("nan")}}, ValueError, "a number > 0, got nan"),
    ({"scale": {"fc.weight": float("inf")}}, ValueError, "fc.weight.*got inf"),
    ({"base": "zeros"}, ValueError, r"base=.*'target'.*'zeros'"),
    ({"latent_dim": 0}, ValueError, r"latent_dim=.*int >= 1, got 0"),
    ({"latent_dim": -4}, ValueError, r"latent_dim=.*int >= 1, got -4"),
    ({"latent_dim": True}, TypeError, r"latent_dim=.*int >= 1, got True"),
    ({"latent_dim": 8.0}, TypeError, r"latent_dim=.*int >= 1, got 8.0"),
    ({"latent_dim": "8"}, TypeError, r"latent_dim=.*int >= 1, got '8'"),
    ({"latent_dim": None}, TypeError, r"latent_dim=.*int >= 1, got None"),
    ({"latent_dim": {"fc": 3}}, ValueError, r"latent_dim=.*missing 'head'"),
    ({"latent_dim": {"fc": 3, "head": 2, "x": 1}}, ValueError, r"latent_dim=.*extra 'x'"),
    ({"latent_dim": {"fc": 3, "head": 0}}, ValueError, r"'head'.*int >= 1, got 0"),
    ({"latent_dim": mapfn.budget(1)}, ValueError, r"budget.*each of 2 groups, got 1"),
    ({"latent_dim": mapfn.budget(0)}, ValueError, r"budget\(total=\).*got 0"),
    ({"latent_dim": mapfn.budget(9.0)}, TypeError, r"budget\(total=\).*got 9.0"),
    ({"strategy": GROUPED({"a": ["fc.*"]})}, ValueError, "'head.weight', 'head.bias' in none"),
    ({"strategy": GROUPED({"a": ["*"], "b": ["fc.bias"]})}, ValueError, "'fc.bias' in 'a' and 'b'"),
    ({"strategy": GROUPED({"a": ["cf.*"], "b": ...})}, ValueError, r"group 'a'.*'cf.\*'.*none"),
    ({"strategy": GROUPED({"a": [], "b": ...})}, ValueError, "group 'a'.*no pattern"),
    ({"strategy": GROUPED({"a": "fc.*", "b": ...})}, TypeError, r"group 'a'.*write \[\"name\"\]"),
    ({"strategy": GROUPED({"a": [3], "b": ...})}, TypeError, "group 'a'.*list of leaf names"),
    ({"strategy": GROUPED({"a": ..., "b": ...})}, ValueError, "exactly one group"),
    ({"strategy": GROUPED({"a": ["*"], "b": ...})}, ValueError, r"leaves for each `...`"),
    ({"strategy": GROUPED({})}, ValueError, "every leaf in a group"),
    ({"strategy": tied(("f", {"base": "init"}))}, ValueError, "overrides 'f'.*'fc', 'head'"),
    ({"strategy": tied(("fc", {"dim": 3}))}, ValueError, "overrides of group 'fc'.*'dim'"),
    ({"strategy": tied(("fc", {"latent_dim": 0}))}, ValueError, "'fc'.*int >= 1, got 0"),
    ({"strategy": tied(("fc", {"mapper": "mlp"}))}, TypeError, "group 'fc'.*mapper="),
    ({"strategy": tied(("fc", 5))}, TypeError, r"layerwise\(overrides=\).*'fc': 5"),
    ({"strategy": tied((4, {"latent_dim": 5}))}, TypeError, r"layerwise\(overrides=\)"),
    ({"strategy": GROUPED(None)}, TypeError, r"grouped\(groups=\).*got None"),
    ({"strategy": GROUPED([1])}, TypeError, r"grouped\(groups=\).*got \[1\]"),
    ({"strategy": GROUPED({3: ...})}, TypeError, r"grouped\(groups=\).*got \{3"),
    ({"strategy": GROUPED({"a": ...}, 7)}, TypeError, r"grouped\(overrides=\).*got 7"),
]


@pytest.mark.parametrize(("arguments", "error", "words"), ARGUMENTS, ids=str)
def test_arguments_of_make_spec(arguments, error, words):
    with pytest.raises(error, match=words):
        mapfn.make_spec(network(), **arguments)


TARGETS = [
    (nn.ReLU, ValueError, "at least one parameter, got none in ReLU"),
    (dict, ValueError, "at least one parameter"),
    (lambda: nn.LazyLinear(3), ValueError, "'weight'.*uninitialised lazy.*one batch"),
    (lambda: {"c": torch.zeros(2, dtype=torch.complex64)}, TypeError, "complex64.*'c'"),
    (lambda: {"i": torch.zeros(2, dtype=torch.int64)}, TypeError, "int64 in 'i'"),
    (lambda: nn.Linear(2, 2, dtype=torch.complex64), TypeError, "real floating-point"),
    (lambda: {"a": 3}, TypeError, "int at 'a'"),
    (lambda: {"a": torch.eye(2).to_sparse()}, TypeError, r"'a'.*sparse_coo.*to_dense"),
    (lambda: "model", TypeError, r"an nn.Module or a tree.*str at '\(root\)'"),
    (lambda: {(1, 2): torch.zeros(1)}, TypeError, "keys str or int"),
    (
        lambda: {"a": {"b": torch.zeros(1)}, "a.b": torch.zeros(1)},
        ValueError,
        "unique leaf names.*'a.b'",
    ),
    (lambda: {"1": torch.zeros(1), 1: torch.zeros(1)}, ValueError, "unique leaf names.*'1'"),
]


@pytest.mark.parametrize(("build", "error", "words"), TARGETS)
def test_targets(build, error, words):
    with pytest.raises(error, match=words):
        mapfn.make_spec(build())


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: mapfn.mlp(()), r"mlp\(hidden_dims=\)"),
        (lambda: mapfn.mlp((4, 0)), r"mlp\(hidden_dims=\)"),
        (lambda: mapfn.mlp((4.0,)), r"mlp\(hidden_dims=\)"),
        (lambda: mapfn.residual_mlp(0), "residual_mlp"),
        (lambda: mapfn.residual_mlp(4, True), "residual_mlp"),
        (lambda: mapfn.modulate_low_rank(0), r"modulate_low_rank\(rank=\).*got 0"),
        (lambda: mapfn.modulate_low_rank(2.0), r"modulate_low_rank\(rank=\).*got 2.0"),
    ],
)
def test_constructors(build, words):
    with pytest.raises(ValueError, match=words):
        build()


@pytest.mark.parametrize(
    "seed",
    [1.0, True, None, "1", torch.tensor(1), torch.Generator()],
)
def test_seeds(seed):
    with pytest.raises(TypeError, match=r"init\(seed=\): expected an int"):
        mapfn.init(mapfn.make_spec(network()), seed)


def test_targets_of_init():
    spec = mapfn.make_spec(network(), base="target")
    with pytest.raises(ValueError, match=r"init\(target=\).*'fc.weight'.*got None"):
        mapfn.init(spec)
    with pytest.raises(ValueError, match=r"missing 'fc\.weight'"):
        mapfn.init(spec, target=nn.Linear(3, 4))
    other = nn.ModuleDict({"fc": nn.Linear(3, 5), "head": nn.Linear(4, 2)})
    with pytest.raises(ValueError, match=r"\(5, 3\).*'fc.weight'"):
        mapfn.init(spec, target=other)
    with pytest.raises(ValueError, match="float64"):
        mapfn.init(spec, target=network().double())
    with pytest.raises(ValueError, match=r"'fc\.weight'.*on meta"):
        mapfn.init(spec, target=network().to("meta"))
    with pytest.raises(ValueError, match=r"scale='target'.*'fc\.weight' on meta"):
        mapfn.make_spec(network().to("meta"), scale="target")


LATENTS = [
    (lambda z: z | {"x": z["fc"]}, ValueError, "latents: .*extra 'x'"),
    (lambda z: {"fc": z["fc"]}, ValueError, "latents: .*missing 'head'"),
    (lambda z: {"fc": z["fc"], "haed": z["head"]}, ValueError, "missing 'head'; extra 'haed'"),
    (lambda z: list(z.values()), TypeError, "latents: expected a dict, got list"),
    (lambda z: z | {"fc": z["fc"][:-1]}, ValueError, r"latents\['fc'\].*\(3,\), got shape \(2,\)"),
    (lambda z: z | {"fc": z["fc"].expand(2, -1)}, ValueError, r"latents\['fc'\].*torch.vmap"),
    (lambda z: z | {"fc": z["fc"].long()}, TypeError, r"latents\['fc'\].*int64"),
    (lambda z: z | {"fc": z["fc"].cfloat()}, TypeError, r"latents\['fc'\].*complex64"),
    (lambda z: z | {"fc": z["fc"].tolist()}, TypeError, r"latents\['fc'\].*list"),
]


@pytest.mark.parametrize(("change", "error", "words"), LATENTS)
def test_latents(change, error, words):
    spec = mapfn.make_spec(network(), latent_dim=3)
    latents, buffers = mapfn.init(spec)
    with pytest.raises(error, match=words):
        mapfn.generate(spec, change(latents), buffers)


def test_latents_and_buffers_of_two_devices():
    spec = mapfn.make_spec(network(), latent_dim=3)
    latents, buffers = mapfn.init(spec)
    with pytest.raises(ValueError, match=r"latents\['fc'\].*cpu, got meta.*one device"):
        mapfn.generate(spec, {name: z.to("meta") for name, z in latents.items()}, buffers)


@pytest.mark.parametrize("mapper", [mapfn.hadamard(), mapfn.hashed()])
def test_bits_that_were_cast(mapper):
    spec = mapfn.make_spec(network(), strategy="slvt", latent_dim=3, mapper=mapper)
    latents, buffers = mapfn.init(spec)
    cast = {"all": {name: bits.float() for name, bits in buffers["all"].items()}}
    with pytest.raises(TypeError, match=r"buffers\['all'\].*integers, got torch.float32"):
        mapfn.generate(spec, latents, cast)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_from_weights_that_are_not_finite(value):
    target = network()
    target["fc"].bias.data[1] = value
    with pytest.raises(ValueError, match=r"scale='target'.*finite weights, got leaf 'fc\.bias'"):
        mapfn.make_spec(target, scale="target")


def test_buffers_of_another_spec():
    spec = mapfn.make_spec(network(), latent_dim=3)
    latents, buffers = mapfn.init(spec)
    others = [
        ({"mapper": mapfn.orthogonal()}, "missing 'layer0.key'; extra 'layer0.matrix'"),
        ({"mapper": mapfn.mlp((3,))}, "extra 'layer1.key'"),
        ({"base": "init"}, "extra 'base.fc.weight'"),
        ({"strategy": "slvt"}, "missing 'fc', 'head'; extra 'all'"),
    ]
    for arguments, words in others:
        other = mapfn.init(mapfn.make_spec(network(), **({"latent_dim": 3} | arguments)))[1]
        for function in (
            lambda b: mapfn.generate(spec, latents, b),
            lambda b: mapfn.base_params(spec, b),
        ):
            with pytest.raises(ValueError, match=words):
                function(other)
    with pytest.raises(TypeError, match="buffers: expected a dict, got NoneType"):
        mapfn.generate(spec, latents, None)
    matrices = [mapfn.make_spec(network(), latent_dim=d, mapper=mapfn.orthogonal()) for d in (3, 2)]
    with pytest.raises(ValueError, match=r"'layer0.matrix'.*\(16, 3\), got shape \(16, 2\)"):
        mapfn.generate(matrices[0], latents, mapfn.init(matrices[1])[1])
    broken = buffers | {"fc": {"layer0.key": 7}}
    with pytest.raises(TypeError, match=r"buffers\['fc'\]\['layer0.key'\].*a tensor"):
        mapfn.generate(spec, latents, broken)


def test_stacks():
    with pytest.raises(ValueError, match="stack: expected at least one member"):
        mapfn.stack([])
    with pytest.raises(TypeError, match="stack: expected a list of trees, got dict"):
        mapfn.stack({"a": torch.zeros(2)})
    for other in ({"b": torch.zeros(2)}, {"a": torch.zeros(3)}, [torch.zeros(2)]):
        with pytest.raises(ValueError, match=r"stack.*like the first, \{'a': \(2,\)\}.*member 1"):
            mapfn.stack([{"a": torch.zeros(2)}, other])
    with pytest.raises(ValueError, match=r"unstack.*2, 3"):
        mapfn.unstack({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"unstack.*got none"):
        mapfn.unstack({"a": torch.zeros(())})


def test_apply_and_call_of_what_cannot_run():
    for target in (3, {"w": torch.zeros(1)}, None):
        with pytest.raises(TypeError, match=r"apply\(target\).*an nn.Module, or a function"):
            mapfn.apply(target, {}, {})
    with pytest.raises(TypeError, match=r"call\(target\).*a module"):
        mapfn.call(lambda params, state: (0, state), {}, {})
