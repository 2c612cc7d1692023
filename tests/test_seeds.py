"""Golden vectors: the same bits in every process, on every machine, in every version."""

import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import mapfn
from mapfn import seeds

DERIVED = [
    (0, (), 2746179581013637209),
    (0, ("conv1",), -5874285166325208478),
    (-3, ("a.b",), 3584352984298506031),
    (-3, ("a", "b"), 2604723255447262874),
    (2**70, ("Ä", "日"), -772259999415081313),
]

# First latents and keys of two linear layers with seed 2024 and four latents each.
LATENTS = {
    "0": [0.662445068359375, -0.15142822265625, -0.7997283935546875, -1.17974853515625],
    "1": [-0.367828369140625, 1.05926513671875, -0.916839599609375, 0.9716949462890625],
}
KEYS = {
    "0": {
        "layer0.key": 4218183091491118502,
        "layer0.modulation.left": 6145498293923523083,
        "layer0.modulation.gate": -8933902433687470061,
        "layer0.modulation.right": -3643112037339048643,
        "layer1.key": 8205816110013803680,
        "layer1.modulation.left": -6243379979604455100,
        "layer1.modulation.gate": 1383736393629613003,
        "layer1.modulation.right": 2765814517688566615,
    },
    "1": {
        "layer0.key": 3196565860127215840,
        "layer0.modulation.left": 8877916951524478309,
        "layer0.modulation.gate": -7941068209477980462,
        "layer0.modulation.right": 1982382539824070022,
        "layer1.key": -6676913784519231964,
        "layer1.modulation.left": 1778303897976864896,
        "layer1.modulation.gate": -7166294633896537529,
        "layer1.modulation.right": -5954239748973347108,
    },
}
WEIGHTS = {
    "hadamard": [0.20582789182662964, -0.23339900374412537, 0.44949907064437866],
    "hashed": [0.3543340563774109, 0.23215937614440918, 0.2552317976951599],
    "orthogonal": [0.21167859435081482, -0.08346372842788696, 0.3371811807155609],
    "mlp": [-0.2942654490470886, 0.2256285548210144, -0.22253656387329102],
    "residual_mlp": [0.04537926986813545, -0.14859344065189362, 0.11353620886802673],
}
SHALLOW = (mapfn.hadamard(), mapfn.hashed(), mapfn.orthogonal())
DEEP = (mapfn.mlp((4,)), mapfn.residual_mlp(4, 1))


def two_layers():
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def test_derived_seeds():
    for seed, names, expected in DERIVED:
        assert seeds.derive(seed, *names) == expected


def test_odd_names_do_not_collide():
    paths = [
        ("a.b",),
        ("a", "b"),
        ("ab",),
        ("a", "b", ""),
        ("", "ab"),
        ("1:a",),
        ("é",),
        ("e\u0301",),
    ]
    paths += [("\udc80",), ("\ud800",), ("1", ":a"), ("2:a",), ()]
    derived = {seeds.derive(seed, *path) for path in paths for seed in (0, 1, 10, -1)}
    assert len(derived) == 4 * len(paths)
    assert all(-(2**63) <= seed < 2**63 for seed in derived)


def test_words_are_splitmix64():
    mask = 2**64 - 1
    for seed in (0, 1, -1, 2**63 - 1, -(2**63), 123456789):
        expected = []
        for index in range(1, 41):
            word = (seed + index * 0x9E3779B97F4A7C15) & mask
            word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
            word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
            word ^= word >> 31
            expected.append(word - 2**64 if word >> 63 else word)
        assert seeds.words(seeds.key(seed), 0, 40).tolist() == expected
        assert seeds.words(seeds.key(seed), 17, 9).tolist() == expected[17:26]


def test_words_of_seed_zero_are_the_published_ones():
    # The first outputs of SplitMix64 from state 0.
    words = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert [word % 2**64 for word in seeds.words(seeds.key(0), 0, 4).tolist()] == words


def test_uniform_and_normal_numbers():
    key = seeds.key(0)
    assert seeds.uniform(key, 3).tolist() == [
        -0.2333783835727148,
        0.8630559940970199,
        0.05286754318519549,
    ]
    assert seeds.normal(key, 4).tolist() == [
        0.06613159180457373,
        0.10385131837146488,
        -1.0840301514933852,
        -0.2594451904598909,
    ]


def test_prefixes_and_slices_equal_the_whole():
    key = seeds.key(11)
    for count in (1, 16, 17, 1024):
        assert torch.equal(seeds.normal(key, count), seeds.normal(key, 2000)[:count])
        assert torch.equal(seeds.uniform(key, count, 5), seeds.uniform(key, 2000)[5 : 5 + count])


def test_uniform_has_its_moments_and_support():
    numbers = seeds.uniform(seeds.key(1), 200_000)
    assert numbers.dtype == torch.float64
    assert float(numbers.min()) >= -1
    assert float(numbers.max()) < 1
    assert abs(float(numbers.mean())) < 5 * (1 / 3 / 200_000) ** 0.5
    assert float(numbers.var()) == pytest.approx(1 / 3, abs=5e-3)
    counts = torch.histc(numbers, 20, -1, 1)
    assert float(((counts - 10_000) ** 2 / 10_000).sum()) < 50  # chi squared, 19 degrees


def test_normal_has_its_moments_and_support():
    numbers = seeds.normal(seeds.key(1), 200_000)
    assert numbers.dtype == torch.float64
    assert abs(float(numbers.mean())) < 5 / 200_000**0.5
    assert float(numbers.var()) == pytest.approx(1.0, abs=5 * (2 / 200_000) ** 0.5)
    assert float(numbers.abs().max()) < 6
    assert float((numbers**4).mean()) == pytest.approx(2.9, abs=0.07)
    for level, share in [(0.0, 0.5), (1.0, 0.8413), (2.0, 0.9772), (-1.5, 0.0668)]:
        assert float((numbers < level).double().mean()) == pytest.approx(share, abs=6e-3)
    neighbours = torch.corrcoef(torch.stack([numbers[:-1], numbers[1:]]))
    assert abs(float(neighbours[0, 1])) < 5 / 200_000**0.5


@pytest.mark.parametrize("mapper", SHALLOW + DEEP, ids=lambda m: type(m).__name__)
def test_fixed_numbers_latents_and_weights(mapper):
    modulation = mapfn.modulate_low_rank(2, 0.5)
    spec = mapfn.make_spec(two_layers(), latent_dim=4, mapper=mapper, modulation=modulation)
    latents, buffers = mapfn.init(spec, 2024)
    assert {name: z.tolist() for name, z in latents.items()} == LATENTS
    had = {g: {n: int(t) for n, t in own.items() if not t.dim()} for g, own in buffers.items()}
    for group, keys in had.items():
        known = {name: key for name, key in KEYS[group].items() if name in keys}
        assert {name: keys[name] for name in known} == known
        assert len(known) >= 3
    weight = mapfn.generate(spec, latents, buffers)["0.weight"].flatten()[:3]
    torch.testing.assert_close(
        weight, torch.tensor(WEIGHTS[type(mapper).__name__]), rtol=1e-5, atol=1e-6
    )


def first_rows(mapper):
    buffers = mapper.init(7, 3, 12)
    unit, zero = torch.eye(3), torch.zeros(())
    rows = torch.stack([mapper.generate(buffers, z, zero, 0, 12) for z in unit], dim=1)
    return rows.sign().int().tolist()


def test_first_rows_of_hadamard():
    rows = [[-1, 1, 1], [1, 1, -1], [1, -1, 1], [1, 1, 1], [-1, -1, 1], [-1, 1, 1]]
    rows += [[-1, -1, -1], [1, -1, 1], [1, -1, -1], [1, 1, -1], [1, -1, 1], [-1, -1, -1]]
    assert first_rows(mapfn.hadamard()) == rows


def test_first_rows_of_hashed():
    rows = [[0, 0, 1], [0, 0, 1], [0, 0, -1], [1, 0, 0], [0, -1, 0], [0, 0, -1]]
    rows += [[0, 0, 1], [-1, 0, 0], [0, 0, 1], [0, 0, 1], [0, -1, 0], [0, 1, 0]]
    assert first_rows(mapfn.hashed()) == rows


def test_first_numbers_of_a_random_base():
    spec = mapfn.make_spec(two_layers(), latent_dim=4, base="init")
    base = mapfn.base_params(spec, mapfn.init(spec, 2024)[1])
    assert base["0.weight"].flatten()[:3].tolist() == [
        -0.4564681053161621,
        -0.24052508175373077,
        -0.5067628026008606,
    ]
    assert base["1.bias"].tolist() == [0.2567306458950043, 0.03131534159183502]


PROGRAM = """
import json, torch, mapfn
layers = {"ä_b": torch.nn.Linear(3, 4), "日": torch.nn.Linear(4, 2)}
target = torch.nn.ModuleDict(layers)
torch.randn(1000)
made = []
for base in ("auto", "init"):
    latents, buffers = mapfn.init(mapfn.make_spec(target, latent_dim=4, base=base), 5)
    made.append({name: z.tolist() for name, z in latents.items()})
    made += [{name: t.tolist() for name, t in own.items()} for own in buffers.values()]
print(json.dumps([made, hash("a")]))
"""


def test_bits_are_equal_in_processes_with_other_string_hashes():
    def start(hash_seed):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", PROGRAM]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    processes = [start(hash_seed) for hash_seed in ("0", "1", "4242")]
    outputs = [json.loads(process.communicate(timeout=120)[0]) for process in processes]
    assert len({output[1] for output in outputs}) == 3  # the hashes did differ
    first, *others = [output[0] for output in outputs]
    assert all(other == first for other in others)
    assert set(first[0]) == {"ä_b", "日"}
