"""Compile and call cost: does either grow faster than the target's depth?

    python examples/benchmarks/compile_cost.py                      all rows, some minutes
    python examples/benchmarks/compile_cost.py --rows call,call-eager
    python examples/benchmarks/compile_cost.py --json rows.jsonl    also one JSON object a row
    python examples/benchmarks/compile_cost.py --quick              tiny depths: does it run?

The target is an MLP of width 16 with 8, 16 and 32 hidden layers, mapped layerwise: one latent
vector a layer, which is the most code a depth can ask for. What is compiled is loss and gradients
with respect to the latents, `fullgraph=True`, from cold (no cache of compiled code is read).

`compile` is the time of the deepest target over that of the shallowest; depth itself grows
fourfold, so 4 is linear, and less means that a fixed part dominates. `compile-trace` is the same
without a code generator: tracing and guards alone. `compile-direct` is the same loss on the plain
target, and `compile-over-direct` says what the map adds at the largest depth. `slvt` has one
latent vector for all layers.

`call` is what `apply(target, generate(...))` costs beyond the target itself, one small batch
through a net of two layers, compiled, and `call-eager` the same in eager code. `guards` counts
what is checked before every compiled call and `nodes` what is in the graph: exact numbers, whose
growth a busy machine cannot hide.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from harness import Row, Rows, Settings, interleave, main
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

import mapfn

WIDTH = 16

Loss = Callable[[Any, Tensor], Tensor]
Build = Callable[[Settings, int], tuple[Loss, Any]]


def depths(settings: Settings) -> tuple[int, int, int]:
    return (1, 2, 4) if settings.quick else (8, 16, 32)


def mlp(settings: Settings, depth: int) -> nn.Module:
    hidden = [module for _ in range(depth) for module in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 1)).to(settings.device)


def batch(settings: Settings) -> Tensor:
    return torch.randn(8, WIDTH, device=settings.device)


def mapped(settings: Settings, depth: int, strategy: str = "layerwise") -> tuple[Loss, Any]:
    """Return a loss of the latents and the input, and the latents."""
    target = mlp(settings, depth)
    spec = mapfn.make_spec(target, strategy=strategy, latent_dim=WIDTH)
    latents, buffers = mapfn.init(spec, seed=0, device=settings.device)

    def loss(latents: Any, inputs: Tensor) -> Tensor:
        params = mapfn.generate(spec, latents, buffers)
        return mapfn.apply(target, params, {}, inputs)[0].square().mean()

    return loss, latents


def direct(settings: Settings, depth: int) -> tuple[Loss, Any]:
    """Return the same loss of the target's own weights."""
    target = mlp(settings, depth)

    def loss(params: Any, inputs: Tensor) -> Tensor:
        return torch.func.functional_call(target, params, inputs).square().mean()

    return loss, {name: leaf.detach() for name, leaf in target.named_parameters()}


def cold_seconds(settings: Settings, build: Build, depth: int, backend: str) -> float:
    """Time the first call of a freshly compiled gradient."""
    if settings.quick and backend == "inductor":
        backend = "aot_eager"
    loss, trained = build(settings, depth)
    inputs = batch(settings)
    torch.compiler.reset()
    step = torch.compile(torch.func.grad(loss), fullgraph=True, dynamic=False, backend=backend)
    with fresh_cache():
        start = time.perf_counter()
        step(trained, inputs)
        return time.perf_counter() - start


@functools.cache
def cold_ms(settings: Settings, build: Build, backend: str) -> dict[int, float]:
    cold_seconds(settings, build, 1, backend)  # what only a process's first compilation costs
    each = ((depth, cold_seconds(settings, build, depth, backend)) for depth in depths(settings))
    return {depth: 1e3 * seconds for depth, seconds in each}


def growth(ms: dict[int, float]) -> float:
    return ms[max(ms)] / ms[min(ms)]


def named(numbers: dict[int, float]) -> dict[str, float]:
    return {f"{depth} layers": number for depth, number in numbers.items()}


def compile_row(settings: Settings, build: Build, what: str, backend: str) -> Row:
    ms = cold_ms(settings, build, backend)
    what = f"compile {what}, {max(ms)} layers over {min(ms)}"
    return Row(what, 4.5, growth(ms), ms=named(ms))


def over_direct(settings: Settings) -> Row:
    ours, plain = (cold_ms(settings, build, "inductor") for build in (mapped, direct))
    deepest = max(ours)
    ms = {"ours": ours[deepest], "direct": plain[deepest]}
    what = f"compile, {deepest} layers, mapped over direct"
    return Row(what, None, ours[deepest] / plain[deepest], ms=ms)


def call(settings: Settings, compiled: bool) -> Row:
    """Time a forward pass of a tiny net with and without the map; the difference is overhead."""
    torch.compiler.reset()
    (ours, latents), (plain, params) = mapped(settings, 1), direct(settings, 1)
    if compiled:
        backend = "aot_eager" if settings.quick else "inductor"
        wrap = functools.partial(torch.compile, fullgraph=True, dynamic=False, backend=backend)
        ours, plain = wrap(ours), wrap(plain)
    inputs = batch(settings)
    sides = (functools.partial(ours, latents, inputs), functools.partial(plain, params, inputs))
    with torch.no_grad():
        mine, other = interleave(settings, *sides)
    what = f"call of a net of two layers, {'compiled' if compiled else 'eager'}, beyond direct"
    return Row(what, 1, mine - other, "ms", ms={"ours": mine, "direct": other})


def counted(settings: Settings, build: Build, depth: int) -> dict[str, int]:
    """Count the guards and the nodes of the graph of a loss; Dynamo's own numbers."""
    torch.compiler.reset()
    loss, trained = build(settings, depth)
    seen = torch._dynamo.explain(loss)(trained, batch(settings))
    nodes = sum(len(graph.graph.nodes) for graph in seen.graphs)
    return {"guards": len(seen.out_guards or []), "nodes": nodes, "graphs": seen.graph_count}


def count_row(settings: Settings, what: str) -> Row:
    numbers = {depth: float(counted(settings, mapped, depth)[what]) for depth in depths(settings)}
    low, middle, high = numbers.values()
    small, _, large = numbers
    linear = low + (middle - low) * (large - small) / (depths(settings)[1] - small)
    label = f"{what} at {large} layers, over a straight line through the other two"
    return Row(label, 1.01, high / linear, note=f"{small} to {large} layers: {low:g} to {high:g}")


ROWS: Rows = {
    "compile": functools.partial(compile_row, build=mapped, what="layerwise", backend="inductor"),
    "compile-slvt": functools.partial(
        compile_row,
        build=functools.partial(mapped, strategy="slvt"),
        what="slvt",
        backend="inductor",
    ),
    "compile-direct": functools.partial(
        compile_row, build=direct, what="direct", backend="inductor"
    ),
    "compile-trace": functools.partial(
        compile_row, build=mapped, what="layerwise, tracing alone", backend="eager"
    ),
    "compile-over-direct": over_direct,
    "guards": functools.partial(count_row, what="guards"),
    "nodes": functools.partial(count_row, what="nodes"),
    "call": functools.partial(call, compiled=True),
    "call-eager": functools.partial(call, compiled=False),
}


if __name__ == "__main__":
    main(ROWS, __doc__)
