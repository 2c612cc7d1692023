"""The maps as matrices: norms, orthogonality, slices, spread, and bits against plain Python."""

import pytest
import torch
from strategies_for_tests import LINEAR_MAPPERS, MAPPERS, materialised

import mapfn
from mapfn import seeds, transform

SIZES = [
    (1, 1),
    (1, 5),
    (2, 7),
    (3, 20),
    (4, 16),
    (5, 40),
    (8, 19),
    (33, 100),
    (40, 3000),
    (600, 700),
]
each_linear = pytest.mark.parametrize("mapper", LINEAR_MAPPERS, ids=lambda m: type(m).__name__)
each_mapper = pytest.mark.parametrize("mapper", MAPPERS, ids=lambda m: type(m).__name__)
each_size = pytest.mark.parametrize(("latent_dim", "num_numbers"), SIZES)


def matrix_of(mapper, latent_dim, num_numbers, seed=5):
    buffers = mapper.init(seed, latent_dim, num_numbers)
    zero = torch.zeros((), dtype=torch.float64)
    return materialised(
        lambda z: mapper.generate(buffers, z, zero, 0, num_numbers), latent_dim
    ), buffers


def splitmix64(seed: int, count: int) -> list[int]:
    """Steele, Lea and Flood's generator on Python's own integers."""
    mask, state, words = 2**64 - 1, seed % 2**64, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        word = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
        words.append(word ^ (word >> 31))
    return words


def signs_of(seed: int, stream: int, count: int) -> torch.Tensor:
    """Read signs off a stream: of eight words each, the bytes in turn, from the top bit down."""
    words = splitmix64(seed + stream * 0x9E3779B97F4A7C15, 8 * -(-count // 512))
    signs = []
    for run in range(0, len(words), 8):
        part = b"".join(word.to_bytes(8, "little") for word in words[run : run + 8])
        signs += [1.0 - 2 * (byte >> bit & 1) for bit in range(7, -1, -1) for byte in part]
    return torch.tensor(signs, dtype=torch.float64)


def signed_hadamard(seed: int, latent_dim: int, num_numbers: int) -> torch.Tensor:
    """Build ``S H D / sqrt(d)`` block by block from bits, as the document of the format says."""
    order = 1 << (latent_dim - 1).bit_length()
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < order:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    a, blocks, wide = min(order, 32), -(-num_numbers // order), max(order, 512)
    unit = 512 // a
    row = signs_of(seed, 0, blocks * order)
    own = signs_of(seed, 1 << 40, blocks * a)
    shared = signs_of(seed, 1 << 41, wide * -(-blocks // unit))
    rows = []
    for block in range(blocks):
        column = own[block * a :][:a].repeat(order // a)
        if order > a:
            column = column * shared[wide * (block // unit) :][:order]
        rows.append(row[block * order :][:order, None] * matrix * column)
    return torch.cat(rows)[:num_numbers, :latent_dim] / latent_dim**0.5


@each_size
def test_hadamard_equals_bits_in_plain_python(latent_dim, num_numbers):
    matrix, _ = matrix_of(mapfn.hadamard(), latent_dim, num_numbers)
    torch.testing.assert_close(
        matrix, signed_hadamard(5, latent_dim, num_numbers), rtol=1e-13, atol=1e-13
    )


@pytest.mark.parametrize("latent_dim", [33, 64, 256])
def test_blocks_that_share_column_signs_have_rows_of_their_own(latent_dim):
    matrix, _ = matrix_of(mapfn.hadamard(), latent_dim, 2048)
    order = 1 << (latent_dim - 1).bit_length()
    products = (matrix @ matrix.T).view(2048 // order, order, 2048 // order, order)
    between = products[0, :, 1:]
    assert float(between.abs().max()) < 1 - 1e-6  # no row again, up to its sign
    # Spread over the rows of another block as evenly as random rows would be.
    assert float(between.square().mean()) == pytest.approx(1 / latent_dim, rel=0.05)


def test_large_hadamard_equals_bits_in_plain_python():
    z, zero = seeds.normal(seeds.key(1), 2100), torch.zeros((), dtype=torch.float64)
    got = mapfn.hadamard().generate(mapfn.hadamard().init(5, 2100, 300), z, zero, 0, 300)
    torch.testing.assert_close(got, signed_hadamard(5, 2100, 300) @ z, rtol=1e-11, atol=1e-11)


@each_size
def test_hashed_equals_bits_in_plain_python(latent_dim, num_numbers):
    matrix, _ = matrix_of(mapfn.hashed(), latent_dim, num_numbers)
    expected = torch.zeros(num_numbers, latent_dim, dtype=torch.float64)
    for index, word in enumerate(splitmix64(5, -(-num_numbers // 2))):
        for row, lane in ((2 * index, word & 0xFFFFFFFF), (2 * index + 1, word >> 32)):
            if row < num_numbers:
                column = ((lane & 0x7FFFFFFF) * latent_dim) >> 31
                expected[row, column] = -1.0 if lane >> 31 else 1.0
    assert torch.equal(matrix, expected)


@each_linear
@each_size
def test_linear_mapper_is_its_dense_matrix(mapper, latent_dim, num_numbers):
    matrix, buffers = matrix_of(mapper, latent_dim, num_numbers)
    z = seeds.normal(seeds.key(1), latent_dim)
    shift = torch.tensor(0.7, dtype=torch.float64)
    got = mapper.generate(buffers, z, shift, 0, num_numbers)
    torch.testing.assert_close(got, matrix @ z + 0.7, rtol=1e-10, atol=1e-10)
    single = mapper.generate(buffers, z.float(), shift.float(), 0, num_numbers)
    torch.testing.assert_close(single.double(), matrix @ z + 0.7, rtol=1e-5, atol=2e-6)


@each_size
def test_hadamard_rows_have_norm_one(latent_dim, num_numbers):
    matrix, _ = matrix_of(mapfn.hadamard(), latent_dim, num_numbers)
    torch.testing.assert_close(
        matrix.norm(dim=1), torch.ones(num_numbers).double(), rtol=0, atol=1e-6
    )


@each_size
def test_hadamard_columns_of_full_blocks_are_orthogonal(latent_dim, num_numbers):
    matrix, _ = matrix_of(mapfn.hadamard(), latent_dim, num_numbers)
    order = 1 << (latent_dim - 1).bit_length()
    blocks = matrix[: num_numbers // order * order].view(-1, order, latent_dim)
    expected = torch.eye(latent_dim).double() * order / latent_dim
    for block in blocks:
        torch.testing.assert_close(block.T @ block, expected, rtol=0, atol=1e-9)


@each_size
def test_orthogonal_columns_and_mean_row_norm(latent_dim, num_numbers):
    matrix, _ = matrix_of(mapfn.orthogonal(), latent_dim, num_numbers)
    expected = torch.eye(latent_dim).double() * num_numbers / latent_dim
    torch.testing.assert_close(matrix.T @ matrix, expected, rtol=1e-5, atol=1e-4)
    assert float((matrix**2).sum(1).mean()) == pytest.approx(1.0, abs=1e-5)


@each_size
def test_hashed_has_one_sign_a_row(latent_dim, num_numbers):
    matrix, _ = matrix_of(mapfn.hashed(), latent_dim, num_numbers)
    assert torch.equal((matrix != 0).sum(1), torch.ones(num_numbers, dtype=torch.int64))
    assert torch.equal(matrix.abs().sum(1), torch.ones(num_numbers).double())


def test_hashed_uses_coordinates_and_signs_evenly():
    matrix, _ = matrix_of(mapfn.hashed(), 10, 20_000)
    uses = (matrix != 0).sum(0)
    # Binomial: 2,000 uses each, standard deviation 42.
    assert (uses - 2000).abs().max() < 5 * 42
    assert abs(float(matrix.sum())) < 5 * 20_000**0.5


@each_mapper
@each_size
def test_slices_equal_the_whole(mapper, latent_dim, num_numbers):
    inputs = num_numbers if isinstance(mapper, mapfn.identity) else latent_dim
    buffers = mapper.init(5, inputs, num_numbers)
    z, shift = seeds.normal(seeds.key(2), inputs).float(), torch.tensor(0.25)
    whole = mapper.generate(buffers, z, shift, 0, num_numbers)
    for start, stop in [(0, 1), (num_numbers // 3, num_numbers)]:
        part = mapper.generate(buffers, z, shift, start, stop)
        assert part.shape == (stop - start,)
        if isinstance(mapper, mapfn.orthogonal):  # a library's product sums in its own order
            torch.testing.assert_close(part, whole[start:stop], rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(part, whole[start:stop])


@each_mapper
def test_empty_slices(mapper):
    buffers = mapper.init(5, 4, 4)
    assert mapper.generate(buffers, torch.ones(4), torch.zeros(()), 2, 2).shape == (0,)


WIDE = (*LINEAR_MAPPERS, mapfn.mlp((64,)), mapfn.residual_mlp(64, 2), mapfn.identity())


@pytest.mark.parametrize("mapper", WIDE, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("latent_dim", [1, 2, 17, 64])
def test_raw_has_unit_variance(mapper, latent_dim):
    spec = mapfn.make_spec(
        {"w": torch.zeros(latent_dim if isinstance(mapper, mapfn.identity) else 64)},
        mapper=mapper,
        latent_dim=latent_dim,
        modulation=None,
        scale={"w": 1.0},
    )
    num_seeds = max(8, 160 // latent_dim)
    numbers = [mapfn.generate(spec, *mapfn.init(spec, seed))["w"] for seed in range(num_seeds)]
    # The square of a latent coordinate has variance 2, and at least 160 coordinates are drawn.
    assert float(torch.cat(numbers).square().mean()) == pytest.approx(1.0, abs=3 * (2 / 160) ** 0.5)


def test_equal_groups_are_uncorrelated():
    target = torch.nn.ModuleDict({n: torch.nn.Linear(50, 40) for n in ("a", "b", "a_b", "Ä", "日")})
    spec = mapfn.make_spec(target, latent_dim=64)
    latents, buffers = mapfn.init(spec, 0)
    params = mapfn.generate(spec, latents, buffers)
    weights = torch.stack([p.flatten() for n, p in params.items() if n.endswith("weight")])
    correlations = torch.corrcoef(weights) - torch.eye(5)
    # 2,000 weights of 64 free numbers: chance alone is within 5 / sqrt(64).
    assert correlations.abs().max() < 5 / 64**0.5
    keys = {int(own["layer0.key"]) for own in buffers.values()}
    assert len(keys) == 5
    same_latent = dict.fromkeys(latents, latents["a"])
    shared = mapfn.generate(spec, same_latent, buffers)
    flat = torch.stack([p.flatten() for n, p in shared.items() if n.endswith("weight")])
    assert (torch.corrcoef(flat) - torch.eye(5)).abs().max() < 5 / 2000**0.5


def test_sizes_from_one_number_to_millions_share_a_group():
    target = {"one": torch.empty(1, device="meta"), "many": torch.empty(2000, 600, device="meta")}
    for strategy in ("slvt", "layerwise"):
        spec = mapfn.make_spec(target, strategy=strategy, latent_dim=128)
        params = mapfn.generate(spec, *mapfn.init(spec))
        assert params["one"].shape == (1,)
        spread = spec.layout.leaves[1].initial.std
        assert float(params["many"].std()) == pytest.approx(spread, rel=0.3)


def test_a_leaf_without_elements_beside_a_large_one():
    # The large leaf is made by a pass of its own, so that the empty one is alone in its pass.
    target = {"empty": torch.zeros(0), "large": torch.zeros(2**20 + 1)}
    spec = mapfn.make_spec(target, strategy="slvt", latent_dim=4)
    params = mapfn.generate(spec, *mapfn.init(spec))
    assert {name: tuple(t.shape) for name, t in params.items()} == {
        "empty": (0,),
        "large": (2**20 + 1,),
    }


def test_the_order_above_the_latents_is_cut_from_the_right():
    key, zero = seeds.key(9), torch.zeros(())
    z = torch.arange(1.0, 6.0)
    padded = transform.rows(key, torch.cat([z, torch.zeros(3)]), zero, 0, 24)
    cut = transform.rows(key, z, zero, 0, 24)
    torch.testing.assert_close(cut * 5**0.5, padded * 8**0.5)
