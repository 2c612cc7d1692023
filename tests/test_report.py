"""Counts and the summary table."""

import pytest
import torch
from torch import nn

import mapfn


def network():
    target = nn.ModuleDict(
        {"embed": nn.Embedding(50, 4), "norm": nn.LayerNorm(4), "head": nn.Linear(4, 50)}
    )
    target["head"].weight = target["embed"].weight
    return target


def test_count():
    spec = mapfn.make_spec(network(), latent_dim=16)
    total = mapfn.count(spec)
    assert total == (16 + 8 + 16, 200 + 8 + 50, 3 * 8, pytest.approx(258 / 40))


@pytest.mark.parametrize(
    ("mapper", "stored"),
    [
        (mapfn.hadamard(), 8),
        (mapfn.hashed(), 8),
        (mapfn.orthogonal(), 4 * 310 * 20),
        (mapfn.mlp((6, 7)), 3 * 8),
        (mapfn.residual_mlp(6, 2), 4 * 8),
        (mapfn.identity(), 0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_stored_bytes(mapper, stored):
    spec = mapfn.make_spec(nn.Linear(30, 10), latent_dim=20, mapper=mapper)
    assert mapfn.count(spec).stored == stored


def test_modulations_store_their_keys():
    spec = mapfn.make_spec(nn.Linear(30, 10), latent_dim=20, modulation=mapfn.modulate_low_rank(3))
    assert mapfn.count(spec).stored == 4 * 8


def test_count_allocates_nothing():
    target = {"w": torch.empty(10**3, 10**2, device="meta")}
    spec = mapfn.make_spec(target, latent_dim=10**4, mapper=mapfn.orthogonal())
    assert mapfn.count(spec) == (10**4, 10**5, 4 * 10**9, 10.0)


def test_summary_shows_caps_ties_and_totals():
    overrides = {"norm": {"mapper": mapfn.frozen()}}
    spec = mapfn.make_spec(network(), strategy=mapfn.layerwise(overrides), latent_dim=64)
    header, embed, norm, head, total, tie = mapfn.summary(spec).splitlines()
    assert header.split() == ["group", "leaves", "weights", "latents", "mapper", "ratio"]
    assert embed.split() == ["embed", "1", "200", "64", "hadamard()", "3.1"]
    assert norm.split() == ["norm", "2", "8", "0", "frozen()", "-"]
    assert head.split() == ["head", "1", "50", "50", "<", "64", "hadamard()", "1.0"]
    assert total.split() == ["total", "4", "258", "114", "2.3"]
    assert tie == "embed.weight is also head.weight"


def test_summary_columns_are_aligned():
    lines = mapfn.summary(
        mapfn.make_spec(nn.ModuleList([nn.Linear(300, 40), nn.Linear(1, 1)]))
    ).splitlines()
    assert {line.index("hadamard") for line in lines[1:-1]} == {lines[0].index("mapper")}
    assert len({len(line) for line in lines}) == 1
