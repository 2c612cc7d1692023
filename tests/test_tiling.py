"""The kernels that run tile by tile equal the plain operations, under every transform."""

from typing import NamedTuple

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import mapfn
import mapfn.blocks as blocks_module
import mapfn.mappers.hashed as hashed_module
from mapfn import plan, seeds, transform
from mapfn.tiling import tiled

ROWS = 150  # with units of 64 rows, tiles of one unit, draws of two: many of each, the last short
SPANS = [(0, ROWS), (5, 133), (64, 128), (31, 34)]


class Pair(NamedTuple):
    """The same map tile by tile and in plain operations, of a latent, a shift and a span."""

    tiled: object
    plain: object


def plain_hadamard(key, latent, shift, start, stop):
    dim = latent.shape[-1]
    blocks = blocks_module.cover(dim, start, stop, ((stop - start, 1.0),))
    return transform._plain(blocks, key, latent, shift)


def tiled_hashed(key, latent, shift, start, stop):
    return hashed_module.hashed().generate({"key": key}, latent, shift, start, stop)


def plain_hashed(key, latent, shift, start, stop):
    index, sign = hashed_module._coordinates(key, latent.shape[-1], start, stop)
    return latent[index] * sign + shift


PAIRS = {
    "hadamard": Pair(transform.rows, plain_hadamard),
    "hashed": Pair(tiled_hashed, plain_hashed),
}
each_map = pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
each_dim = pytest.mark.parametrize("dim", [1, 3, 8, 40])
each_span = pytest.mark.parametrize(("start", "stop"), SPANS)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(transform, "_SMALL", 0)
    monkeypatch.setattr(blocks_module, "_RUN", 64)
    monkeypatch.setattr(blocks_module, "_RUN_WORDS", 1)
    monkeypatch.setattr(transform, "_TILE_ROWS", 16)
    monkeypatch.setattr(transform, "_TILES_A_DRAW", 2)
    monkeypatch.setattr(hashed_module, "_TILE_ROWS", 16)


def latent_of(dim, index=0):
    return seeds.normal(seeds.key(index), dim)


KEY, SHIFT = seeds.key(3), torch.tensor(0.3, dtype=torch.float64)


def losses(pair, start=0, stop=ROWS):
    """Return the same cubic loss of (latent, shift) through both paths."""
    weights = torch.linspace(-1, 2, stop - start, dtype=torch.float64)

    def loss_through(rows):
        return lambda z, shift: (rows(KEY, z, shift, start, stop) ** 3 * weights).sum()

    return loss_through(pair.tiled), loss_through(pair.plain)


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@each_map
@each_dim
@each_span
def test_values_and_gradients(pair, dim, start, stop):
    z = latent_of(dim)
    close(pair.tiled(KEY, z, SHIFT, start, stop), pair.plain(KEY, z, SHIFT, start, stop))
    tiled, plain = losses(pair, start, stop)
    close(grad(tiled, (0, 1))(z, SHIFT), grad(plain, (0, 1))(z, SHIFT))


@each_map
@each_dim
def test_backward(pair, dim):
    gradients = []
    for loss in losses(pair):
        z, shift = latent_of(dim).requires_grad_(), SHIFT.clone().requires_grad_()
        loss(z, shift).backward()
        gradients.append((z.grad, shift.grad))
    close(*gradients)


@each_map
@each_dim
def test_backward_twice(pair, dim):
    gradients = []
    for loss in losses(pair):
        z = latent_of(dim).requires_grad_()
        (first,) = torch.autograd.grad(loss(z, SHIFT), z, create_graph=True)
        gradients.append(torch.autograd.grad(first.square().sum(), z)[0])
    close(*gradients)


@each_map
@each_dim
def test_forward_mode(pair, dim):
    tangents = latent_of(dim, 1), torch.tensor(0.2, dtype=torch.float64)
    got, expected = (jvp(loss, (latent_of(dim), SHIFT), tangents) for loss in losses(pair))
    close(got, expected)


@each_map
@each_dim
def test_reverse_mode_by_hand(pair, dim):
    cotangent = torch.linspace(-1, 1, ROWS, dtype=torch.float64)
    results = []
    for rows in pair:
        _, pull = vjp(lambda z, s, rows=rows: rows(KEY, z, s, 0, ROWS), latent_of(dim), SHIFT)
        results.append(pull(cotangent))
    close(*results)


@each_map
def test_jacobians_and_hessian(pair):
    z = latent_of(5)
    tiled, plain = losses(pair)
    close(hessian(tiled)(z, SHIFT), hessian(plain)(z, SHIFT))
    close(jacfwd(jacfwd(tiled))(z, SHIFT), hessian(plain)(z, SHIFT))
    close(jacrev(jacrev(tiled))(z, SHIFT), hessian(plain)(z, SHIFT))
    got = jacrev(lambda v: pair.tiled(KEY, v, SHIFT, 0, ROWS))(z)
    close(got, jacfwd(lambda v: pair.tiled(KEY, v, SHIFT, 0, ROWS))(z))
    close(got, jacrev(lambda v: pair.plain(KEY, v, SHIFT, 0, ROWS))(z))


@each_map
@pytest.mark.parametrize("in_dims", [(0, 0), (0, None), (1, None), (None, 0)])
def test_vmap(pair, in_dims):
    z = torch.stack([latent_of(5, k) for k in range(3)])
    z = {0: z, 1: z.T, None: z[0]}[in_dims[0]]
    shift = SHIFT if in_dims[1] is None else torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    tiled, plain = losses(pair)
    close(vmap(tiled, in_dims)(z, shift), vmap(plain, in_dims)(z, shift))
    close(vmap(grad(tiled), in_dims)(z, shift), vmap(grad(plain), in_dims)(z, shift))
    close(vmap(hessian(tiled), in_dims)(z, shift), vmap(hessian(plain), in_dims)(z, shift))


@each_map
def test_vmap_over_keys(pair):
    keys, z = torch.stack([seeds.key(k) for k in range(3)]), latent_of(5)
    spans = [vmap(lambda k, rows=rows: rows(k, z, SHIFT, 3, 140))(keys) for rows in pair]
    close(*spans)
    close(spans[0], torch.stack([pair.plain(k, z, SHIFT, 3, 140) for k in keys]))


@each_map
def test_vmap_inside_vmap_and_inside_grad(pair):
    z = torch.stack([latent_of(5, k) for k in range(6)]).view(2, 3, 5)
    tiled, plain = losses(pair)
    twice = [vmap(vmap(loss, (0, None)), (0, None)) for loss in (tiled, plain)]
    close(*(f(z, SHIFT) for f in twice))
    close(*(grad(lambda v, f=f: f(v, SHIFT).sum())(z) for f in twice))


@each_map
def test_expanded_and_strided_inputs(pair):
    strided = torch.stack([latent_of(5), latent_of(5, 1)], dim=1)[:, 0]
    close(pair.tiled(KEY, strided, SHIFT, 0, ROWS), pair.plain(KEY, latent_of(5), SHIFT, 0, ROWS))
    z = latent_of(5).requires_grad_()
    # The gradient of a plain sum is an expanded scalar.
    (got,) = torch.autograd.grad(pair.tiled(KEY, z, SHIFT, 0, ROWS).sum(), z)
    (expected,) = torch.autograd.grad(pair.plain(KEY, z, SHIFT, 0, ROWS).sum(), z)
    close(got, expected)


@each_map
def test_single_precision(pair):
    z, shift = latent_of(8).float(), SHIFT.float()
    got = pair.tiled(KEY, z, shift, 0, ROWS)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, pair.plain(KEY, z, shift, 0, ROWS), rtol=1e-5, atol=1e-6)


@each_map
@pytest.mark.parametrize("dim", [40, 300, 5000])
def test_large_tiles_as_shipped(pair, dim, monkeypatch):
    monkeypatch.undo()
    rows = transform._TILE_ROWS + 1000
    z = latent_of(dim).float()
    got = pair.tiled(KEY, z, SHIFT.float(), 0, rows)
    expected = pair.plain(KEY, z, SHIFT.float(), 0, rows)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_many_draws_on_huge_pages_as_shipped(monkeypatch):
    monkeypatch.undo()
    rows, z, zero = 17 * transform._TILE_ROWS + 5, latent_of(300).float(), torch.zeros(())
    whole = transform.rows(KEY, z, zero, 0, rows)
    middle = rows // 2, rows // 2 + 5000
    assert torch.equal(whole[slice(*middle)], transform.rows(KEY, z, zero, *middle))
    assert torch.equal(whole[-5000:], transform.rows(KEY, z, zero, rows - 5000, rows))
    sizes = (3, 0, rows - 103, 100)
    parts = transform.scaled_rows(KEY, z, zero, tuple((size, 2.0) for size in sizes))
    assert tuple(map(len, parts)) == sizes
    assert torch.equal(torch.cat(parts), 2 * whole)


def test_gradients_of_parts_are_those_of_the_whole():
    scales = ((40, 0.5), (0, 1.0), (70, 1.0), (40, -3.0))
    factors = torch.cat([torch.full((size,), scale).double() for size, scale in scales])
    z, weights = latent_of(40), torch.linspace(-1, 2, ROWS, dtype=torch.float64)

    def of_parts(z, shift):
        parts = transform.scaled_rows(KEY, z, shift, scales)
        return sum(
            (p**3 * w).sum() for p, w in zip(parts, weights.split([40, 0, 70, 40]), strict=True)
        )

    def of_whole(z, shift):
        return ((plain_hadamard(KEY, z, shift, 0, ROWS) * factors) ** 3 * weights).sum()

    close(grad(of_parts, (0, 1))(z, SHIFT), grad(of_whole, (0, 1))(z, SHIFT))
    close(hessian(of_parts)(z, SHIFT), hessian(of_whole)(z, SHIFT))
    batch = torch.stack([z, 2 * z])
    close(*(vmap(grad(f), (0, None))(batch, SHIFT) for f in (of_parts, of_whole)))


def test_a_large_group_is_one_pass_over_the_map(monkeypatch):
    monkeypatch.setattr(plan, "_SEGMENT", 16)  # a small group, cut like a large one
    target = torch.nn.Sequential(torch.nn.Linear(9, 7), torch.nn.LayerNorm(7))
    spec = mapfn.make_spec(target, strategy="slvt", latent_dim=5)
    passes = []

    def counted(kernel, *tensors):
        passes.append(sum(kernel.sizes))
        return tiled(kernel, *tensors)

    monkeypatch.setattr(transform, "tiled", counted)
    mapfn.generate(spec, *mapfn.init(spec))
    assert passes == [9 * 7 + 7 + 7 + 7]
