"""Cases from users of neighbouring tools: seeds, portable bits, and what a map stores."""

import hashlib
import itertools
import os
import random
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mapfn
from mapfn import seeds, transform

MASK = 2**64 - 1


def stored_bytes(buffers: Any) -> int:
    return sum(t.numel() * t.element_size() for own in buffers.values() for t in own.values())


@pytest.mark.parametrize(
    ("mapper", "expected"),
    [
        (mapfn.hadamard(), 8),
        (mapfn.hashed(), 8),
        (mapfn.mlp((32, 32)), 24),
        (mapfn.residual_mlp(hidden_dim=32, depth=2), 32),
        (mapfn.identity(), 0),
        (mapfn.orthogonal(), 4 * 20_300 * 64),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("modulation", [None, mapfn.affine(), mapfn.modulate_low_rank(4)])
def test_stored_bytes(mapper: Any, modulation: Any, expected: int) -> None:
    """C11: measured in the tensors themselves, the seeded maps store keys and nothing a weight."""
    spec = mapfn.make_spec(nn.Linear(202, 100), mapper=mapper, latent_dim=64, modulation=modulation)
    layers = expected // 8 if expected < 100 else 1
    low_rank = isinstance(modulation, mapfn.modulate_low_rank) and layers > 0
    expected += 3 * 8 * layers if low_rank else 0
    assert (stored_bytes(mapfn.init(spec)[1]), mapfn.count(spec).stored) == (expected, expected)


@pytest.mark.parametrize("mapper", [mapfn.hadamard(), mapfn.hashed()], ids=repr)
def test_stored_bytes_do_not_grow(mapper: Any) -> None:
    """C11: a thousand times the weights and the latents are stored in the same bytes."""
    sizes = []
    for scale in (1, 32):
        target = nn.Linear(64 * scale, 100 * scale, bias=False, device="meta")
        spec = mapfn.make_spec(target, latent_dim=8 * scale, mapper=mapper)
        sizes.append(stored_bytes(mapfn.init(spec)[1]))
    assert sizes == [8, 8]


def digest(tree: Any) -> str:
    """Hash names and bits of a tree of tensors."""
    total = hashlib.sha256()
    for path, leaf in torch.utils._pytree.tree_leaves_with_path(tree):
        total.update(repr(path).encode() + leaf.contiguous().numpy().tobytes())
    return total.hexdigest()


def all_bits() -> list[str]:
    """Digest first latents, fixed numbers, bases and weights of a few specs."""
    target = {"layer.ä": {"a.b": torch.zeros(5, 3), "a": {"c": torch.zeros(4)}}, "z": torch.ones(6)}
    digests = []
    for mapper in (mapfn.hadamard(), mapfn.hashed(), mapfn.mlp((4,))):
        for base in ("auto", "init"):
            spec = mapfn.make_spec(target, mapper=mapper, base=base, latent_dim=3)
            latents, buffers = mapfn.init(spec, seed=-5)
            ones = {name: torch.ones_like(latent) for name, latent in latents.items()}
            digests += [
                digest(latents),
                digest(buffers),
                digest(mapfn.generate(spec, ones, buffers)),
            ]
    return digests


def draw() -> None:
    """Move every generator that a seed might wrongly depend on."""
    torch.randn(1_000)
    for _ in range(1_000):
        random.random()


def test_bits_are_equal_in_every_process() -> None:
    """C16: three hash seeds of Python and a thousand other draws change no bit."""
    code = (
        "import sys, random, test_cases_seeds as t;"
        "a = t.all_bits(); t.draw(); assert a == t.all_bits(); print(*a)"
    )
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(mapfn.__file__).parents[1])])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            text=True,
        )
        for hash_seed in (0, 1, 4_294_967_295)
    ]
    answers = [process.communicate(timeout=100)[0].split() for process in processes]
    own = all_bits()
    draw()
    assert answers == [own] * 3
    assert all_bits() == own


def matrices(mapper: Any, seed: int, names: list[str], rows: int, dim: int) -> list[Tensor]:
    """Build the matrices of groups of equal size, by one unit vector after the other."""
    target = {name: torch.zeros(rows) for name in names}
    strategy = mapfn.grouped({name: [name] for name in names})
    spec = mapfn.make_spec(
        target, strategy=strategy, mapper=mapper, latent_dim=dim, modulation=None, scale={"*": 1.0}
    )
    _, buffers = mapfn.init(spec, seed=seed)
    columns = [mapfn.generate(spec, dict.fromkeys(names, unit), buffers) for unit in torch.eye(dim)]
    return [torch.stack([column[name] for column in columns], dim=1) for name in names]


def correlation(first: Tensor, second: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]).double())[0, 1])


@pytest.mark.parametrize(
    "mapper", [mapfn.hadamard(), mapfn.hashed(), mapfn.orthogonal()], ids=lambda m: type(m).__name__
)
def test_groups_of_equal_size_are_uncorrelated(mapper: Any) -> None:
    """C16: one seed for two layers never gives two equal matrices, nor do two seeds for one.

    For independent maps of N = rows * dim numbers the correlation has mean 0 and standard
    deviation 1 / sqrt(N) = 0.0078. Blocks of signs: the mean over 256 blocks of (mean of 8 row
    signs) * (mean of 8 column signs), 1 / sqrt(256 * 8 * 8). Hashed rows meet in one column of 8
    with a random sign, the sum of 2,048 such over 2,048: sqrt(2,048 / 8) / 2,048. All are the same
    number; six of them leave 91 pairs a chance of 2e-7, and the numbers never change.
    """
    rows, dim = 2_048, 8
    names = [f"layer{index}" for index in range(6)] + ["l", "layer", "layer10", "LAYER0"]
    found = matrices(mapper, 0, names, rows, dim)
    for seed in (1, -1, 2**70, 256):
        found += matrices(mapper, seed, names[:1], rows, dim)
    bound = 6 / (rows * dim) ** 0.5
    assert max(abs(correlation(*pair)) for pair in itertools.combinations(found, 2)) < bound
    assert correlation(found[0], matrices(mapper, 0, ["layer0"], rows, dim)[0]) == pytest.approx(1)


def test_first_latents_and_bases_are_uncorrelated() -> None:
    """C16: latents and random bases differ by group and leaf, to six deviations 1 / sqrt(N)."""
    target = {f"layer{index}": {"w": torch.zeros(4_096)} for index in range(8)}
    auto, first = (
        mapfn.make_spec(target, latent_dim=4_096, base=base) for base in ("auto", "init")
    )
    vectors = [*mapfn.init(auto)[0].values(), *mapfn.init(auto, seed=1)[0].values()]
    vectors += [own["base." + name + ".w"] for name, own in mapfn.init(first)[1].items()]
    assert len(vectors) == 24
    pairs = itertools.combinations(vectors, 2)
    assert max(abs(correlation(*pair)) for pair in pairs) < 6 / 4_096**0.5


def test_odd_names_do_not_collide() -> None:
    """C16: paths that are equal once joined, or look alike, still have seeds of their own."""
    paths = [("a.b", "c"), ("a", "b.c"), ("a.b.c",), ("a", "b", "c"), ("abc",), ("", "abc")]
    paths += [("abc", ""), ("",), (), ("1:a",), ("1:", "a"), ("a/b",), ("a", "/b"), ("\0",)]
    paths += [("\u00e9",), ("e\u0301",), ("É",), ("\ud800",), ("层",), ("\uff41",), ("a",), ("A",)]
    derived = [seeds.derive(seed, *path) for seed in (0, 1, -1, 11, 2**64) for path in paths]
    assert len(set(derived)) == len(derived)
    assert all(-(2**63) <= seed < 2**63 for seed in derived)


def test_odd_names_in_a_target() -> None:
    """C16: unicode and dots in a target's own names each make their own numbers."""
    names = ["é", "e\u0301", "层", "layer 1", "a/b", "*", "a[0]", "base", "key"]
    target = nn.ParameterDict({f"{name}!": nn.Parameter(torch.zeros(16)) for name in names})
    flat = {"a.b": torch.zeros(16), "a": {"c": torch.zeros(16)}, "a.b.c": torch.zeros(16)}
    for tree, count in ((target, len(names)), (flat, 3)):
        found = [leaf.name for leaf in mapfn.make_spec(tree).layout.leaves]
        groups = {f"group of {name}": [name] for name in found}
        spec = mapfn.make_spec(tree, strategy=mapfn.grouped(groups) if tree is flat else "slvt")
        latents, buffers = mapfn.init(spec)
        params = mapfn.generate(spec, latents, buffers)
        leaves = torch.utils._pytree.tree_leaves(params)
        assert len({tuple(leaf.tolist()) for leaf in leaves}) == count


@pytest.mark.parametrize(
    "tree", [{"a.b": 0, "a": {"b": 0}}, {1: 0, "1": 0}, {"a": {"": 0}, "a.": 0}], ids=repr
)
def test_names_that_are_equal_once_joined_are_refused(tree: Any) -> None:
    """C16: two leaves of one name are an error, not one leaf."""
    target = torch.utils._pytree.tree_map(lambda _: torch.zeros(2), tree)
    with pytest.raises(ValueError, match="unique leaf names"):
        mapfn.make_spec(target)


def splitmix(state: int, index: int) -> int:
    """Word `index` of SplitMix64, in Python's own integers."""
    word = (state + (index + 1) * 0x9E3779B97F4A7C15) & MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 1234567])
def test_words_are_the_published_mixer(seed: int) -> None:
    """C17: words are SplitMix64's; uniform and normal are exact fractions of them."""
    key, count = seeds.key(seed), 17
    words = [splitmix(seed & MASK, index) for index in range(3 * count)]
    assert [word & MASK for word in seeds.words(key, 0, 3 * count).tolist()] == words
    signed = [word - (word >> 63 << 64) for word in words]
    uniform = [Fraction(word >> 11, 2**52) for word in signed[:count]]
    assert [Fraction(number) for number in seeds.uniform(key, count).tolist()] == uniform
    lanes = [[word >> shift & 0xFFFF for shift in (0, 16, 32, 48)] for word in words]
    totals = [sum(map(sum, lanes[3 * i : 3 * i + 3])) for i in range(count)]
    normal = [(2 * total - 12 * 0xFFFF) * (0.5 / (2.0**32 - 1) ** 0.5) for total in totals]
    assert seeds.normal(key, count).tolist() == normal


def test_golden_words() -> None:
    """C17: SplitMix64's published first outputs for the state 1234567."""
    words = [word & MASK for word in seeds.words(seeds.key(1234567), 0, 3).tolist()]
    assert words == [6457827717110365317, 3203168211198807973, 9817491932198370423]


SLICES = [(0, 1), (0, 16), (0, 17), (3, 17), (16, 1_024), (1_000, 1_001), (511, 513), (0, 70_001)]


@pytest.mark.parametrize(("start", "stop"), SLICES)
@pytest.mark.parametrize("threads", [1, 2])
def test_slices_equal_the_whole(start: int, stop: int, threads: int) -> None:
    """C17: a number depends on its index, never on how many are made at once or by how many."""
    key, zero, whole = seeds.key(seeds.derive(3, "x")), torch.zeros(()), slice(start, stop)
    before, size = torch.get_num_threads(), 70_001
    words, uniform = seeds.words(key, 0, size), seeds.uniform(key, size)
    normal, unit = seeds.normal(key, size), torch.eye(48)[5]
    signed = transform.rows(key, unit, zero, 0, size)
    hashed = mapfn.hashed().generate({"key": key}, torch.arange(1.0, 49), zero, 0, size)
    torch.set_num_threads(threads)
    try:
        count = stop - start
        assert torch.equal(seeds.words(key, start, count), words[whole])
        assert torch.equal(seeds.uniform(key, count, start), uniform[whole])
        assert torch.equal(seeds.normal(key, stop), normal[:stop])
        assert torch.equal(transform.rows(key, unit, zero, start, stop), signed[whole])
        own = mapfn.hashed().generate({"key": key}, torch.arange(1.0, 49), zero, start, stop)
        assert torch.equal(own, hashed[whole])
    finally:
        torch.set_num_threads(before)
    assert set(signed.abs().tolist()) == {float(torch.tensor(48**-0.5))}


@pytest.mark.parametrize("dim", [1, 3, 33, 700])
def test_slices_of_a_dense_latent(dim: int) -> None:
    """C17: with every coordinate in play, slices equal the whole to float32's rounding."""
    key, zero = seeds.key(5), torch.zeros(())
    latent = seeds.normal(seeds.key(6), dim).float()
    whole = transform.rows(key, latent, zero, 0, 5_000)
    for start, stop in ((0, 1), (1, 1_023), (1_024, 1_025), (4_097, 5_000)):
        part = transform.rows(key, latent, zero, start, stop)
        torch.testing.assert_close(part, whole[start:stop], rtol=1e-5, atol=1e-6)
