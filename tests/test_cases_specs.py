"""Cases from users of neighbouring tools: shapes, caps, scales, files of specs, values on meta."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import mapfn

FORTY_MILLION = (40_000, 1_000)
SHAPES = {"large": FORTY_MILLION, "one": (), "odd": (3, 5, 7), "later": (2_000, 129)}


def blank(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


@pytest.mark.parametrize("strategy", ["slvt", "many"])
def test_any_shapes_share_or_split_a_latent(strategy: str) -> None:
    """C3: one number and 40 million, in one group or in many; a later layer may be larger."""
    many = mapfn.grouped({name: [name] for name in SHAPES})
    for names in itertools.permutations(SHAPES):
        target = blank({name: SHAPES[name] for name in names})
        chosen = many if strategy == "many" else "slvt"
        spec = mapfn.make_spec(target, strategy=chosen, latent_dim=256)
        got = {group.name: group.latent_dim for group in spec.groups}
        capped = {"large": 256, "one": 1, "odd": 105, "later": 256}
        assert got == ({"all": 256} if strategy == "slvt" else capped)
        assert mapfn.count(spec)[1:3] == (40_258_106, 8 * len(spec.groups))


@pytest.mark.parametrize("strategy", ["slvt", "many"])
def test_forty_million_weights_are_made(strategy: str) -> None:
    """C3: each full block of the map keeps the latent's energy, so the mean square is exact."""
    chosen = mapfn.grouped({name: [name] for name in SHAPES}) if strategy == "many" else "slvt"
    spec = mapfn.make_spec(blank(SHAPES), strategy=chosen, latent_dim=256, modulation=None)
    latents, buffers = mapfn.init(spec)
    params = mapfn.generate(spec, latents, buffers)
    assert {name: tuple(leaf.shape) for name, leaf in params.items()} == SHAPES
    latent = latents["large" if strategy == "many" else "all"]
    energy = float(latent.square().mean()) / (3 * 1_000)  # scale: 1 / sqrt(3 fan_in)
    mean_square = float(torch.linalg.vector_norm(params["large"], dtype=torch.float64) ** 2 / 4e7)
    assert mean_square == pytest.approx(energy, rel=1e-5)
    assert all(bool(leaf.isfinite().all()) and bool(leaf.any()) for leaf in params.values())


MAPPERS = [
    mapfn.hadamard(),
    mapfn.hashed(),
    mapfn.orthogonal(),
    mapfn.mlp((6, 40)),
    mapfn.residual_mlp(hidden_dim=6, depth=1),
]


@pytest.mark.parametrize("mapper", MAPPERS, ids=lambda mapper: type(mapper).__name__)
@pytest.mark.parametrize(
    ("asked", "strategy"),
    [
        (128, "layerwise"),
        (128, "slvt"),
        ({"0": 128, "1": 128}, "layerwise"),
        (mapfn.budget(128), "layerwise"),
        (5, mapfn.layerwise({"*": {"latent_dim": 128}})),
    ],
)
def test_latents_never_outnumber_weights(mapper: Any, asked: Any, strategy: Any) -> None:
    """C4: a projection to 128 is capped where the layer has fewer numbers; the table shows it."""
    target = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    spec = mapfn.make_spec(target, latent_dim=asked, strategy=strategy, mapper=mapper)
    assert {g.name: g.latent_dim for g in spec.groups} in ({"0": 8, "1": 3}, {"all": 11})
    assert mapfn.count(spec)[:2] == (11, 11)
    latents, buffers = mapfn.init(spec)
    params = mapfn.generate(spec, latents, buffers)
    assert sum(leaf.numel() for leaf in params.values()) == 11
    rows = mapfn.summary(spec).splitlines()[1:-1]
    if not isinstance(asked, mapfn.budget):
        assert ["< 128" in row for row in rows] == [True] * len(spec.groups)
        assert rows[0].split("< 128")[0].split()[-1] == str(spec.groups[0].latent_dim)


def test_no_cap_is_shown_where_there_is_none() -> None:
    """C4: exactly as many latents as weights is no cap."""
    assert "<" not in mapfn.summary(mapfn.make_spec(nn.Linear(3, 2), latent_dim=8))
    assert "8 < 9" in mapfn.summary(mapfn.make_spec(nn.Linear(3, 2), latent_dim=9))


@pytest.mark.parametrize(
    "seed",
    [torch.Generator(), 1.0, True, "1", None, torch.tensor(1), (1,)],
    ids=lambda seed: type(seed).__name__,
)
def test_seeds_are_ints(seed: Any) -> None:
    """C5: nothing that cannot be written to JSON is a seed."""
    with pytest.raises(TypeError, match=r"init\(seed=\): expected an int"):
        mapfn.init(mapfn.make_spec(nn.Linear(2, 2)), seed=seed)


class Point(NamedTuple):
    x: Tensor
    y: list[Any]


@dataclass(frozen=True)
class halved:
    """A user's own map: the latent repeated, halved."""

    factor: float = 0.5
    steps: tuple[int, ...] = (1, 2)

    def init(self, seed: int, latent_dim: int, num_numbers: int) -> dict[str, Tensor]:
        return {}

    def generate(
        self, buffers: Any, latent: Tensor, shift: Tensor, start: int, stop: int
    ) -> Tensor:
        return self.factor * latent[torch.arange(start, stop) % len(latent)] + shift


def specs() -> dict[str, mapfn.Spec]:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    point = Point(torch.ones(2), [torch.zeros(3), None, {"k": (torch.ones(()),), 4: torch.ones(1)}])
    found = {type(m).__name__: mapfn.make_spec(net, mapper=m, latent_dim=3) for m in MAPPERS}
    modulations = [None, mapfn.affine(0.1, 0.3), mapfn.modulate_low_rank(2)]
    found |= {repr(m): mapfn.make_spec(net, modulation=m) for m in modulations}
    overrides = {"0": {"mapper": mapfn.frozen()}, "2": {"mapper": mapfn.identity(), "base": "init"}}
    found["overrides"] = mapfn.make_spec(net, strategy=mapfn.layerwise(overrides), activation="sin")
    found["tree"] = mapfn.make_spec(point, strategy="slvt", latent_dim=mapfn.budget(5), scale="he")
    found["floats"] = mapfn.make_spec(net, scale={"*": 1 / 3, "0.*": 1e-30, "1.*": 7e22})
    return found | {"own": mapfn.make_spec(net, mapper=halved(1 / 7, (3, 1)), latent_dim=3)}


@pytest.mark.parametrize("name", specs())
def test_spec_survives_json(name: str) -> None:
    """C5: a spec goes through JSON, compares and hashes equal, and makes the same bits."""
    spec = specs()[name]
    text = mapfn.spec_to_json(spec)
    read = mapfn.spec_from_json(json.dumps(json.loads(text)), mappers=[halved, Point])
    assert (read, hash(read), repr(read)) == (spec, hash(spec), repr(spec))
    assert mapfn.spec_to_json(read) == text
    target = {"target": nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))}
    arguments = target if name == "overrides" else {}
    first, second = (mapfn.generate(s, *mapfn.init(s, seed=4, **arguments)) for s in (spec, read))
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    if name in ("own", "tree"):
        with pytest.raises(ValueError, match=r"test_cases_specs:(halved|Point)"):
            mapfn.spec_from_json(text)


def test_different_specs_are_different() -> None:
    """C5: what compares equal is one spec; the table above holds no two that do."""
    texts = {mapfn.spec_to_json(spec) for spec in specs().values()}
    assert len(texts) == len(set(specs().values())) == len(specs())


LEAVES: dict[str, tuple[Callable[[], Any], str, int]] = {
    "scalar": (lambda: {"w": torch.zeros(())}, "w", 1),
    "vector": (lambda: {"w": torch.zeros(5)}, "w", 5),
    "empty": (lambda: {"w": torch.zeros(0), "v": torch.zeros(2)}, "w", 1),
    "empty matrix": (lambda: {"w": torch.zeros(0, 6), "v": torch.zeros(2)}, "w", 6),
    "no inputs": (lambda: {"w": torch.zeros(6, 0), "v": torch.zeros(2)}, "w", 1),
    "3d conv": (lambda: nn.Conv3d(2, 3, (2, 3, 4)), "weight", 48),
    "3d conv bias": (lambda: nn.Conv3d(2, 3, (2, 3, 4)), "bias", 48),
    "transposed": (lambda: nn.ConvTranspose3d(2, 6, 2, groups=2), "weight", 24),
    "transposed bias": (lambda: nn.ConvTranspose3d(2, 6, 2, groups=2), "bias", 24),
    "linear bias": (lambda: nn.Linear(7, 3), "bias", 7),
    "bilinear bias": (lambda: nn.Bilinear(3, 4, 2), "bias", 3),
}


@pytest.mark.parametrize("base", ["auto", "init"])
@pytest.mark.parametrize("scale", ["auto", "he", "target"])
@pytest.mark.parametrize("kind", LEAVES)
def test_every_leaf_has_a_scale_and_a_base(kind: str, scale: str, base: str) -> None:
    """C10: whatever its dimensions, a leaf has the spread and centre torch would give it."""
    build, name, fan_in = LEAVES[kind]
    target = build()
    spec = mapfn.make_spec(target, scale=scale, base=base, strategy="slvt")
    latents, buffers = mapfn.init(spec)
    params = mapfn.generate(spec, {"all": torch.zeros_like(latents["all"])}, buffers)
    bound = 1 / math.sqrt(fan_in)
    index = [leaf.name for leaf in spec.groups[0].leaves].index(name)
    expected = bound * math.sqrt(2) if scale == "he" else bound / math.sqrt(3)
    if scale == "target" and isinstance(target, nn.Module):
        expected = float(target.get_parameter(name).detach().std(correction=0))
    assert spec.groups[0].scales[index] == pytest.approx(expected, rel=1e-6)
    leaf = params[name]
    assert leaf.shape == mapfn.base_params(spec, buffers)[name].shape
    assert bool((leaf.abs() <= bound).all())
    assert bool(leaf.any()) == (base == "init" and leaf.numel() > 0)


class Rotary(nn.Module):
    """Knows its frequencies from the constructor alone, as buffers and as a plain tensor."""

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("frequencies", 10.0 ** -torch.arange(4.0), persistent=False)
        self.register_buffer("kept", torch.tensor([1.0, 2.0, 3.0, 4.0]))
        if plain:
            self.table = torch.tensor([0.5, 0.25, 0.125, 1.0])

    def forward(self, x: Tensor) -> Tensor:
        table = self.table if hasattr(self, "table") else 1
        return self.fc(x) * self.frequencies * self.kept * table


FREQUENCIES = torch.tensor([1.0, 0.1, 0.01, 0.001])
PLAIN = {"fc.weight": torch.eye(4), "fc.bias": torch.zeros(4)}


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("to_meta", ["to", "to_empty"])
def test_state_keeps_what_meta_loses(plain: bool, to_meta: str) -> None:
    """C13: buffers of the built module, persistent or not, outlive its way to meta."""
    target = Rotary(plain)
    state = mapfn.init_state(target)
    target.to("meta") if to_meta == "to" else target.to_empty(device="meta")
    outputs, after = mapfn.apply(target, PLAIN, state, torch.ones(1, 4))
    table = torch.tensor([0.5, 0.25, 0.125, 1.0]) if plain else torch.ones(4)
    right = FREQUENCIES * torch.tensor([1.0, 2.0, 3.0, 4.0]) * table
    torch.testing.assert_close(outputs, right[None])
    assert list(after) == ["frequencies", "kept"]


def test_plain_tensors_inside_containers_are_asked_for() -> None:
    """C13: a list, tuple or dict of tensors is a plain attribute as well."""
    for value in ([torch.ones(1)], {"a": (torch.ones(1),)}):
        target = nn.Linear(1, 1)
        target.tables = value
        assert list(mapfn.init_state(target)) == []
        with torch.device("meta"):
            target.tables = [torch.ones(1)] if isinstance(value, list) else {"a": (torch.ones(1),)}
        with pytest.raises(ValueError, match=r"init_state.*plain tensors 'tables' on meta"):
            mapfn.init_state(target)


@pytest.mark.parametrize("path", ["", "inner.", "outer.0."])
def test_values_that_meta_never_had_are_asked_for(path: str) -> None:
    """C13: on meta, each buffer and plain tensor without a value is named, with the way round."""
    with torch.device("meta"):
        rotary = target = Rotary(plain=True)
    for name in reversed(path.split(".")[:-1]):
        target = nn.Sequential(target) if name == "0" else nn.ModuleDict({name: target})
    values = {path + "frequencies": FREQUENCIES, path + "kept": torch.ones(4)}
    for given, missing in (({}, f"'{path}frequencies', '{path}kept'"), (values, f"'{path}table'")):
        with pytest.raises(ValueError, match=rf"init_state.*{missing} on meta.*To mend it:.*value"):
            mapfn.init_state(target, given)
    rotary.table = torch.full((4,), 2.0)
    state = mapfn.init_state(target, values)
    params = {path + name: leaf for name, leaf in PLAIN.items()}
    method = path.rstrip(".") or "forward"
    if "." not in method:
        outputs, _ = mapfn.call(target, params, state, torch.ones(1, 4), method=method)
        torch.testing.assert_close(outputs, 2 * FREQUENCIES[None])
