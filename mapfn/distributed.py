"""Several processes: latents are all that they exchange, and that is checked.

The engine is ``torch.distributed`` under torchrun; this is what a mapped network adds to it.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.nn.parallel import DistributedDataParallel

from mapfn import fingerprints, trees
from mapfn.errors import listing, message
from mapfn.nn import Mapped, functions, unwrapped
from mapfn.optim import Optimizer
from mapfn.spec import Spec
from mapfn.types import Buffers, Latents


class Process(NamedTuple):
    """This process among all."""

    rank: int
    local_rank: int
    """Among those of this host."""
    world_size: int
    device: torch.device


def setup_ddp(
    rank: int | None = None,
    world_size: int | None = None,
    backend: str | None = None,
    **options: Any,
) -> Process:
    """Join the other processes.

    Args:
        rank: of this process; torchrun's ``RANK`` by default.
        world_size: how many there are; torchrun's ``WORLD_SIZE`` by default. The address comes
            from ``MASTER_ADDR`` and ``MASTER_PORT``, unless ``init_method`` or ``store`` is passed.
        backend: ``nccl`` where there is a GPU and ``gloo`` elsewhere by default; ``mpi`` and
            others are passed on.
        **options: of ``torch.distributed.init_process_group``.

    Returns:
        :class:`Process`; its device is the GPU of this process where the backend is ``nccl``.

    Raises:
        RuntimeError: the group is there already, or nothing says who is who.
    """
    if dist.is_initialized():
        fix, where = "call cleanup_ddp() first, or leave it out", "setup_ddp"
        raise RuntimeError(message(where, expected="no process group", got="one", fix=fix))
    rank, world_size = _given("RANK", rank), _given("WORLD_SIZE", world_size)
    backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
    local = int(os.environ.get("LOCAL_RANK", rank % max(1, torch.cuda.device_count())))
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    dist.init_process_group(backend, rank=rank, world_size=world_size, **options)
    return Process(rank, local, world_size, device)


def _given(name: str, value: int | None) -> int:
    if value is not None:
        return value
    if name in os.environ:
        return int(os.environ[name])
    fix = "start the script by torchrun, or pass rank= and world_size= and set MASTER_ADDR and"
    fix += " MASTER_PORT"
    expected = f"{name} in the environment"
    raise RuntimeError(message("setup_ddp", expected=expected, got="none", fix=fix))


def cleanup_ddp() -> None:
    """Leave the process group, if there is one; safe at any time."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def wrap_ddp(
    mapped: Mapped, device_ids: list[int] | None = None, **options: Any
) -> DistributedDataParallel:
    """Wrap a module for DDP, after a check that all ranks have the same map and latents.

    DDP averages the gradients of the latents; of the map nothing is sent. The target's state
    follows DDP's rule: rank 0 sends its buffers at each forward pass (``broadcast_buffers``).

    Args:
        mapped: the module, on its device.
        device_ids: as DDP takes them.
        **options: of ``DistributedDataParallel``; ``find_unused_parameters`` is not needed.

    Returns:
        The wrapped module; ``mapfn.nn.functions`` reaches through it.

    Raises:
        TypeError: no ``Mapped``.
        RuntimeError: no process group.
        ValueError: ranks that differ, by rank and group; nothing to train.
    """
    own = unwrapped(mapped)
    _need_group("wrap_ddp")
    latents, buffers, _ = functions(own)
    if not latents:
        fix = "train some leaves, or leave DDP out"
        raise ValueError(message("wrap_ddp", expected="latents", got="none", fix=fix))
    check_replicas(own.spec, latents, buffers)
    return DistributedDataParallel(mapped, device_ids=device_ids, **options)


def _need_group(where: str) -> None:
    if not dist.is_initialized():
        fix, got = "call setup_ddp() first", "none"
        raise RuntimeError(message(where, expected="a process group", got=got, fix=fix))


def check_replicas(spec: Spec, latents: Latents, buffers: Buffers) -> None:
    """Compare spec, latents, map and generated weights of all ranks; all ranks must call it.

    Raises:
        RuntimeError: no process group.
        ValueError: on every rank: which ranks differ from rank 0, in which groups, in what.
    """
    _need_group("check_replicas")
    own = _replica(spec, latents, buffers)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    faults = [
        f"rank {rank}: {fault}"
        for rank, other in enumerate(every)
        for fault in _faults(every[0], other)
    ]
    if faults:
        fix = "make spec and module in the same way on every rank, with one seed; load a"
        fix += " checkpoint on all of them"
        where, got = "check_replicas", "; ".join(faults)
        raise ValueError(message(where, expected="the same as on rank 0", got=got, fix=fix))


class _Replica(NamedTuple):
    """What a rank has, short enough to send: a digest or a probe a group."""

    spec: dict[str, str]
    latents: dict[str, str]
    map: dict[str, str]
    weights: dict[str, list[float]]


def _replica(spec: Spec, latents: Latents, buffers: Buffers) -> _Replica:
    bits = {
        group.name: {name: buffers[group.name][name] for name in sorted(group.integer_buffers)}
        for group in spec.groups
    }
    return _Replica(
        spec={group.name: repr(group) for group in spec.groups},
        latents={name: fingerprints.digest({name: z}) for name, z in latents.items()},
        map={name: fingerprints.digest(own) for name, own in bits.items()},
        weights=fingerprints.probe(spec, latents, buffers),
    )


def _faults(first: _Replica, other: _Replica) -> list[str]:
    """Say what differs, most telling first; a group that differs in its spec differs in all."""
    found: list[str] = []
    named: set[str] = set()
    pairs: list[tuple[str, Callable[[Any, Any], list[str]]]] = [
        ("spec", _unequal),
        ("map", _unequal),
        ("latents", _unequal),
        ("weights", fingerprints.differing_groups),
    ]
    for field, compare in pairs:
        groups = [
            g for g in compare(getattr(first, field), getattr(other, field)) if g not in named
        ]
        if groups:
            found.append(f"another {field} in {listing(groups)}")
        named |= set(groups)
    return found


def _unequal(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    return [name for name in dict.fromkeys([*one, *other]) if one.get(name) != other.get(name)]


def pmean(tree: Any, weight: float | Tensor | None = None) -> Any:
    """Average a tree of tensors over all ranks, by one all-reduce; pure, traceable as one graph.

    Every rank must call it with the same names and shapes, zeros where it has nothing. Without a
    process group it returns the tree as it is, so that a script runs alone too.

    Args:
        tree: gradients of latents, a target's state; integers come back as they are.
        weight: of this rank, the number of its samples where ranks have uneven batches; a rank
            without any passes 0.

    Returns:
        The tree of means, in the dtypes that came in.

    >>> pmean({"z": torch.ones(2)})
    {'z': tensor([1., 1.])}
    """
    if not (dist.is_available() and dist.is_initialized()):
        return tree
    held = [tensor for tensor in trees.tensors(tree) if tensor.is_floating_point()]
    if not held:
        return tree
    dtype = torch.float64 if any(t.dtype == torch.float64 for t in held) else torch.float32
    own = torch.as_tensor(1.0 if weight is None else weight, dtype=dtype, device=held[0].device)
    flat = torch.cat([own.view(1), *(t.to(dtype).flatten() * own for t in held)])
    total, *parts = _all_reduced(flat).split([1, *(tensor.numel() for tensor in held)])
    means = iter(parts)

    def mean(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        return (next(means) / total).view(leaf.shape).to(leaf.dtype)

    return trees.map_tensors(mean, tree)


def _all_reduced(flat: Tensor) -> Tensor:
    world: Any = dist.group.WORLD
    reduced: Tensor = collectives.wait_tensor(collectives.all_reduce(flat, "sum", world))
    return reduced


def average_gradients() -> Optimizer:
    """Average the gradients of all ranks: first in a chain, for a step without a wrapper.

    >>> from mapfn import optim
    >>> optimizer = optim.chain(average_gradients(), optim.adam(0.05))
    """

    def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return pmean(gradients), state

    return Optimizer(lambda params: (), update)
