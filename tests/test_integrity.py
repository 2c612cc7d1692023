"""Damaged specs are refused by the place of the damage, and never make other weights."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import mapfn


def text() -> str:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    overrides = {"2": {"mapper": mapfn.identity(), "modulation": None}}
    strategy = mapfn.layerwise(overrides)
    return mapfn.spec_to_json(mapfn.make_spec(net, strategy=strategy, latent_dim=3))


def damaged(path: tuple[Any, ...], value: Any) -> str:
    data = json.loads(text())
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(data)


FIRST = ("groups", 0)
HADAMARD = {"type": "hadamard"}
DAMAGE = [
    ((*FIRST, "activation"), "relu", "an activation among"),
    ((*FIRST, "activation"), None, "an activation among"),
    ((*FIRST, "scales"), [float("inf"), 1.0], "scales >= 0"),
    ((*FIRST, "scales"), [-1.0, 1.0], "scales >= 0"),
    ((*FIRST, "scales"), [1.0], "a whole spec|as long|shorter|longer"),
    ((*FIRST, "bases"), [True, 0.0], "bases that are numbers"),
    ((*FIRST, "bases"), ["zero", 0.0], "bases that are numbers"),
    ((*FIRST, "latent_dim"), 1000, "latent_dim = min"),
    ((*FIRST, "latent_dim"), 3.0, "latent_dim = min"),
    ((*FIRST, "requested_dim"), 2, "latent_dim = min"),
    ((*FIRST, "leaves"), ["0.bias", "0.weight"], "in the target's order"),
    ((*FIRST, "leaves"), ["0.weight", "0.weight"], "each leaf in one group"),
    ((*FIRST, "leaves"), ["0.weight", "9.bias"], "a whole spec"),
    ((*FIRST, "name"), 7, "groups of different names"),
    ((*FIRST, "name"), "1", "groups of different names"),
    ((*FIRST, "mapper"), None, "a mapper"),
    ((*FIRST, "mapper"), {"type": "full"}, "a mapper"),
    ((*FIRST, "mapper"), {"type": "frozen"}, "the mapper frozen"),
    ((*FIRST, "mapper"), {"type": "mlp", "hidden_dims": 3}, "a tuple of ints"),
    ((*FIRST, "mapper"), {"type": "hadamard", "size": 3}, "a whole spec"),
    ((*FIRST, "decoder"), HADAMARD, "a whole spec"),
    ((*FIRST, "modulation"), HADAMARD, "a modulation or null"),
    ((*FIRST, "modulation"), {"type": "additive", "alpha": "x"}, "finite numbers"),
    (("groups",), [], "each leaf in one group"),
    (("groups", 2, "latent_dim"), 4, "latent_dim = min"),
    (("groups", 2, "requested_dim"), "10", "a whole spec|latent_dim = min"),
    (("leaves", 0, "shape"), [-4, 3], "ints >= 0"),
    (("leaves", 0, "shape"), [4.0, 3], "ints >= 0"),
    (("leaves", 0, "dtype"), "int64", "a floating-point dtype"),
    (("leaves", 0, "dtype"), "Tensor", "a floating-point dtype"),
    (("leaves", 0, "owner"), ["0"], "names that are strings"),
    (("leaves", 0, "initial"), [-1.0, 0.0, 3], "an initial spread"),
    (("leaves", 0, "name"), "0.w", "a whole spec"),
    (("structure",), [], "a whole spec"),
    (("structure",), ["list", [0], [["leaf", "0.weight"]]], "a structure of the leaves"),
    (("structure",), ["heap", [], []], "a whole spec"),
]


@pytest.mark.parametrize(("path", "value", "expected"), DAMAGE)
def test_damage_is_named(path, value, expected):
    with pytest.raises(ValueError, match=expected):
        mapfn.spec_from_json(damaged(path, value))


def test_a_file_without_an_end_is_refused():
    with pytest.raises(ValueError, match="a spec's JSON"):
        mapfn.spec_from_json("[" * 100_000)


def paths(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """List every place in JSON data below the top."""
    items = data.items() if isinstance(data, dict) else enumerate(data)
    inner = [p for k, v in items if isinstance(v, dict | list) for p in paths(v, (*path, k))]
    return inner + [(*path, k) for k in (data if isinstance(data, dict) else range(len(data)))]


values = st.one_of(
    st.none(), st.booleans(), st.integers(-2, 40), st.floats(), st.text(max_size=3), st.just([])
)


@given(place=st.sampled_from(paths(json.loads(text()))), value=values)
def test_any_damage_is_refused_or_makes_a_whole_spec(place, value):
    """What is read is what stands there, to the last field, and generates."""
    broken = damaged(place, value)
    try:
        spec = mapfn.spec_from_json(broken)
    except ValueError:
        return
    assert json.loads(mapfn.spec_to_json(spec)) == json.loads(broken)
    mapfn.generate(spec, *mapfn.init(spec, 0))


@pytest.mark.parametrize(
    "make",
    [
        lambda: mapfn.additive("x"),
        lambda: mapfn.additive(float("nan")),
        lambda: mapfn.affine(None),
        lambda: mapfn.affine(0.1, True),
        lambda: mapfn.modulate_low_rank(2, float("inf")),
    ],
)
def test_a_strength_is_a_finite_number(make):
    with pytest.raises(ValueError, match="expected finite numbers"):
        make()


@pytest.mark.parametrize("widths", [3, None, (), (0,), "12"])
def test_widths_are_positive_ints(widths):
    with pytest.raises(ValueError, match="expected a tuple of ints >= 1"):
        mapfn.mlp(widths)
