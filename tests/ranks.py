"""What every rank of a test runs, under torchrun: each case leaves its result for the test.

python -m torch.distributed.run --nproc_per_node=2 tests/ranks.py FOLDER CASE...
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mapfn
from mapfn import distributed, losses, optim, train
from mapfn.nn import Mapped, functions

STEPS = 20


def network(dtype=torch.float32):
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def normed():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def spec_of(target, **options):
    return mapfn.make_spec(target, **({"latent_dim": 5} | options))


def data(dtype=torch.float32, count=16):
    x = torch.linspace(-1, 1, 6 * count, dtype=dtype).view(count, 6).sin()
    return x, x[:, :2].cos()


def own_part(tensors):
    """Return the samples of this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return tuple(tensor[rank::size] for tensor in tensors)


def doubled(mapped):
    for latent in mapped.latents:
        latent.data = latent.data.double()
    return mapped


def adapter(dtype):
    """Train by DDP and torch's SGD; return latents, and the losses averaged over ranks."""
    target = network(dtype)
    mapped = Mapped(spec_of(target), target, seed=1)
    wrapped = distributed.wrap_ddp(mapped if dtype == torch.float32 else doubled(mapped))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
    x, y = own_part(data(dtype))
    curve = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(wrapped(x), y)
        loss.backward()
        optimizer.step()
        curve.append(distributed.pmean(loss.detach()))
    return dict(functions(wrapped).latents), curve


def functional(dtype):
    """Train by a step whose optimizer averages."""
    target = network(dtype)
    spec = spec_of(target)
    optimizer = optim.chain(distributed.average_gradients(), optim.sgd(0.5))
    init, step = train.make_step(spec, target, nn.functional.mse_loss, optimizer)
    state = init(1)
    latents = {name: z.to(dtype) for name, z in state.latents.items()}
    state = state._replace(latents=latents)
    curve = []
    for _ in range(STEPS):
        state, info = step(state, own_part(data(dtype)))
        curve.append(distributed.pmean(info.loss))
    return state.latents, curve


def payload():
    """Count the numbers that DDP gives to its communication hook in a step."""
    counts = {}
    for name, target in (("plain", network()), ("normed", normed())):
        mapped = Mapped(spec_of(target), target)
        wrapped = distributed.wrap_ddp(mapped)
        seen = []

        def hook(state, bucket, seen=seen):
            seen.append(bucket.buffer().numel() * bucket.buffer().element_size())
            return allreduce_hook(None, bucket)

        wrapped.register_comm_hook(None, hook)
        wrapped(own_part(data())[0]).sum().backward()
        counts[name] = sum(seen), mapped.trainable_parameter_count
    return counts


def accumulation():
    """Two micro-batches a step, the first without a synchronisation."""
    target = network()
    mapped = Mapped(spec_of(target), target, seed=1)
    wrapped = distributed.wrap_ddp(mapped)
    x, y = own_part(data())
    with wrapped.no_sync():
        (nn.functional.mse_loss(wrapped(x[:4]), y[:4]) / 2).backward()
    (nn.functional.mse_loss(wrapped(x[4:]), y[4:]) / 2).backward()
    return [latent.grad for latent in mapped.latents]


def two_passes():
    """T12: two forward passes and one backward pass through BatchNorm."""
    target = normed()
    mapped = Mapped(spec_of(target), target, seed=1)
    wrapped = distributed.wrap_ddp(mapped)
    x, _ = own_part(data())
    (wrapped(x).square().mean() + wrapped(-x).square().mean()).backward()
    return [latent.grad for latent in mapped.latents]


def statistics():
    """D3: state that differs between ranks, and its mean, the same everywhere."""
    target = normed()
    spec = spec_of(target)
    loss = losses.mapping_loss(nn.functional.mse_loss, stability=0.1)
    optimizer = optim.chain(distributed.average_gradients(), optim.adam(0.1))
    init, step = train.make_step(spec, target, loss, optimizer)
    state = init(0)
    for _ in range(3):
        state, _ = step(state, own_part(data()))
    mean = distributed.pmean(state.target_state)
    state = state._replace(target_state=mean)
    x, y = data()
    metrics = train.evaluate(spec, target, state, [(x, y)], nn.functional.mse_loss)
    return mean, metrics, state.latents


def not_averaged():
    """D2: autograd.grad passes DDP by; pmean of its gradients is what DDP would have given."""
    target = network()
    mapped = Mapped(spec_of(target), target, seed=1)
    wrapped = distributed.wrap_ddp(mapped)
    x, y = own_part(data())
    local = torch.autograd.grad(nn.functional.mse_loss(wrapped(x), y), list(mapped.latents))
    return list(local), distributed.pmean(list(local))


def uneven():
    """D7: rank 0 has 3 batches and rank 1 has 2; each goes through its own, then both meet."""
    target = network()
    spec = spec_of(target)
    latents, buffers = mapfn.init(spec, 1)
    x, y = data(count=10)
    mine = torch.arange(10)[6:] if dist.get_rank() else torch.arange(10)[:6]

    def loss(latents, rows):
        params = mapfn.generate(spec, latents, buffers)
        return nn.functional.mse_loss(mapfn.apply(target, params, {}, x[rows])[0], y[rows])

    sums = {name: torch.zeros_like(z) for name, z in latents.items()}
    for rows in mine.split(2):
        gradient = torch.func.grad(loss)(latents, rows)
        sums = {name: sums[name] + len(rows) * g for name, g in gradient.items()}
    mean = {name: total / len(mine) for name, total in sums.items()}
    return distributed.pmean(mean, weight=len(mine))


def graph():
    """Return what a compiled step with its all-reduce gives, and the eager one."""
    target = network()
    spec = spec_of(target)
    latents, buffers = mapfn.init(spec, 1)
    x, y = own_part(data())

    def step(latents):
        def loss(latents):
            params = mapfn.generate(spec, latents, buffers)
            return nn.functional.mse_loss(mapfn.apply(target, params, {}, x)[0], y)

        return distributed.pmean(torch.func.grad(loss)(latents))

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    return compiled(latents), step(latents)


def compiled_adapter():
    """Compile inside DDP, as one graph."""
    target = network()
    mapped = Mapped(spec_of(target), target, seed=1)
    wrapped = distributed.wrap_ddp(mapped)
    graph = torch.compile(wrapped, backend="aot_eager")
    x, y = own_part(data())
    nn.functional.mse_loss(graph(x), y).backward()
    return [latent.grad for latent in mapped.latents]


def refusals():
    """What each rank hears when rank 1 differs."""
    rank, heard = dist.get_rank(), {}
    target = network()
    spec = spec_of(target)
    other_spec = spec_of(target, latent_dim={"0": 5, "2": 4}) if rank else spec
    changed = Mapped(spec, target)
    with torch.no_grad():
        changed.latents[1][0] += rank
    cases = {
        "seed": Mapped(spec, target, seed=rank),
        "spec": Mapped(other_spec, target),
        "latents": changed,
    }
    for name, mapped in cases.items():
        try:
            distributed.wrap_ddp(mapped)
        except ValueError as error:
            heard[name] = str(error)
    return heard


def sampler():
    """The epochs that a DistributedSampler gives through fit: the same samples as alone."""
    target = network()
    optimizer = optim.chain(distributed.average_gradients(), optim.sgd(0.1))
    spec = spec_of(target)
    init, step = train.make_step(spec, target, nn.functional.mse_loss, optimizer)
    dataset = TensorDataset(*data())
    loader = DataLoader(dataset, batch_size=4, sampler=DistributedSampler(dataset, seed=3))
    return train.fit(step, init(0), loader, epochs=3).state.latents


def members():
    """An ensemble whose gradients are averaged over ranks."""
    target = network()
    optimizer = optim.chain(distributed.average_gradients(), optim.sgd(0.1))
    single = train.make_step(spec_of(target), target, nn.functional.mse_loss, optimizer)
    init, step, _ = mapfn.ensemble.make_ensemble(single, method="loop")
    state = init(range(3))
    for _ in range(3):
        state, _ = step(state, own_part(data()))
    return state.latents


CASES = {
    "adapter32": lambda: adapter(torch.float32),
    "adapter64": lambda: adapter(torch.float64),
    "functional32": lambda: functional(torch.float32),
    "functional64": lambda: functional(torch.float64),
    **{
        case.__name__: case
        for case in (
            payload,
            accumulation,
            two_passes,
            statistics,
            not_averaged,
            uneven,
            graph,
            compiled_adapter,
            refusals,
            sampler,
            members,
        )
    },
}


def main(folder, *names):
    torch.set_num_threads(1)
    process = distributed.setup_ddp(backend="gloo")
    try:
        for name in names or CASES:
            torch.manual_seed(0)
            result = CASES[name]()
            torch.save(result, Path(folder, f"{name}.{process.rank}.pt"))
    finally:
        distributed.cleanup_ddp()


if __name__ == "__main__":
    main(*sys.argv[1:])
