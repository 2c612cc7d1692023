"""Checkpoints: one small file, checked when it is read, written whole or not at all.

Latents, the target's state and, for going on, the state of a training are tensors; the spec, the
seed and a probe of generated weights are data beside them. The map is made again from its seed.
"""

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mapfn import archive, container, fingerprints, parts, validation
from mapfn.errors import CheckpointError, listing, message
from mapfn.generation import init
from mapfn.groups import Group, fixed_numbers
from mapfn.members import at, stack, stack_buffers
from mapfn.rates import OptimizerState
from mapfn.serialization import spec_from_json, spec_to_json
from mapfn.spec import Spec
from mapfn.types import Buffers, Latents, Moments, State, TrainState
from mapfn.version import __version__

# NamedTuples of mapfn that a train state may hold.
_TYPES = (TrainState, OptimizerState, Moments)


class Checkpoint(NamedTuple):
    """What :func:`load_checkpoint` returns."""

    spec: Spec
    latents: Latents
    buffers: Buffers
    """Made again from the seed, or read where the file includes them; of an ensemble with a map
    for each member, stacked."""
    state: State
    seed: int | list[int]
    train_state: Any
    """None where none was saved."""
    metadata: dict[str, Any]
    """What was passed to :func:`save_checkpoint`."""
    random_state: dict[str, Tensor]
    """torch's global generators, ``cpu`` and ``cuda.<i>``, where a training was saved:
    ``torch.set_rng_state(checkpoint.random_state["cpu"])`` goes on with its dropout."""


def save_checkpoint(
    path: str | os.PathLike[str],
    spec: Spec,
    latents: Latents,
    *,
    state: State,
    seed: int | Sequence[int],
    buffers: Buffers | None = None,
    train_state: Any = None,
    metadata: Mapping[str, Any] | None = None,
    target: Any = None,
    include_buffers: bool = False,
) -> None:
    """Write latents, and all that is needed to make the weights again, as one file.

    A kill at any moment leaves the old file or the whole new one.

    Args:
        path: the file, ``.safetensors`` by custom.
        spec: from :func:`~mapfn.make_spec`.
        latents: ``{group: [latent_dim]}``; of an ensemble ``[K, latent_dim]``.
        state: the target's state.
        seed: that :func:`~mapfn.init` was given; of an ensemble with a map for each member one
            for each, of one with a shared map the first.
        buffers: compared with those that the seed gives, where they are passed.
        train_state: for going on bit for bit: a ``TrainState``, or any tree of tensors, numbers
            and strings; torch's global random generators are saved with it.
        metadata: JSON data of your own.
        target: what holds the base, where a base is ``"target"`` and no ``buffers`` are passed.
        include_buffers: write the map's fixed numbers too, so that loading need not make them:
            for dense maps, whose bits hang on the number of threads.

    Raises:
        TypeError: a train state or metadata of something else.
        ValueError: latents that do not fit the spec or are not finite, buffers that the seed does
            not give.
        OSError: the file cannot be written; an old one is as it was.

    >>> import tempfile
    >>> from mapfn import make_spec
    >>> spec = make_spec(torch.nn.Linear(30, 10), latent_dim=16)
    >>> latents, buffers = init(spec, seed=3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = f"{folder}/model.safetensors"
    ...     save_checkpoint(path, spec, latents, state={}, seed=3)
    ...     loaded = load_checkpoint(path)
    >>> loaded.spec == spec, torch.equal(loaded.latents["(root)"], latents["(root)"])
    (True, True)
    """
    seeds = seed if isinstance(seed, int) else list(seed)
    first = _check_latents(spec, latents, "save_checkpoint(latents)")
    each = _check_map(spec, seeds, buffers, target)
    tensors = _prefixed("latents.", latents) | _prefixed("state.", state)
    if include_buffers:
        whole = each[0] if isinstance(seeds, int) else stack(each)
        for name, own in whole.items():
            tensors |= _prefixed(f"buffers.{name}.", own)
    if isinstance(train_state, TrainState):
        train_state = train_state._replace(buffers={})
    data = {
        "version": __version__,
        "torch": str(torch.__version__),
        "spec": json.loads(spec_to_json(spec)),
        "seed": seeds,
        "train_state": archive.pack(train_state, "train", tensors),
        "metadata": dict(metadata or {}),
        "probe": fingerprints.probe(spec, first, each[0]),
        "base": fingerprints.base_digest(spec, each[0]),
    }
    if train_state is not None:
        tensors |= _prefixed("random.", _random_state())
    container.write(path, tensors, data)


def load_checkpoint(
    path: str | os.PathLike[str],
    target: Any = None,
    *,
    spec: Spec | None = None,
    seed: int | None = None,
    types: Sequence[type] = (),
) -> Checkpoint:
    """Read a checkpoint, and check it before anything is made of it.

    Args:
        path: of the file.
        target: what holds the base, where a base is ``"target"``; it must be the same base.
        spec: for a file whose metadata another tool has dropped: the spec it was saved with.
        seed: goes with ``spec``.
        types: classes that are not mapfn's own and that the file may use: mappers of the spec,
            NamedTuples of the train state. A file can name no other.

    Returns:
        :class:`Checkpoint`, on the CPU.

    Raises:
        CheckpointError: a file that is damaged, of another schema, or without metadata; another
            base than it was saved with; weights that come out differently.
        ValueError: a target that is missing or is not the spec's, a class that was not passed.
        OSError: the file cannot be read.
    """
    tensors, data = container.read(path)
    if data is None:
        data = _data_of(path, spec, seed)
    found = spec or spec_from_json(json.dumps(data["spec"]), types)
    latents = _unprefixed("latents.", tensors)
    first = _check_latents(found, latents, str(path))
    each = _buffers(found, data["seed"], tensors, target)
    _check_weights(path, found, data, (first, each[0]))
    train_state = archive.unpack(data["train_state"], tensors, (*_TYPES, *types))
    if isinstance(train_state, TrainState):
        count = len(train_state.step) if train_state.step.dim() else 0
        own = stack_buffers(each * (count // len(each))) if count else each[0]
        train_state = train_state._replace(buffers=own)
    return Checkpoint(
        spec=found,
        latents=latents,
        buffers=each[0] if isinstance(data["seed"], int) else stack(each),
        state=_unprefixed("state.", tensors),
        seed=data["seed"],
        train_state=train_state,
        metadata=data["metadata"],
        random_state=_unprefixed("random.", tensors),
    )


def _prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _unprefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    own = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): tensor for name, tensor in own.items()}


def _random_state() -> dict[str, Tensor]:
    cpu, *cuda = parts.random_state()
    return {"cpu": cpu} | {f"cuda.{index}": own for index, own in enumerate(cuda)}


def _check_latents(spec: Spec, latents: Any, where: str) -> Latents:
    """Return the latents of one member, the first of an ensemble, if all are the spec's."""
    stacked = isinstance(latents, Mapping) and {z.dim() for z in latents.values()} == {2}
    first: Latents = at(latents, 0) if stacked else latents
    validation.check_latents(spec, first)
    if not all(bool(z.isfinite().all()) for z in latents.values()):
        fix, got = "keep the last good state", "NaN or infinity"
        raise ValueError(message(where, expected="finite latents", got=got, fix=fix))
    return first


def _check_map(
    spec: Spec, seed: int | list[int], buffers: Buffers | None, target: Any
) -> list[Buffers]:
    """Return the buffers of each member, or of all; those that were passed must be the seed's."""
    seeds = [seed] if isinstance(seed, int) else seed
    if buffers is None:
        return [init(spec, own, target)[1] for own in seeds]
    given = [buffers] if isinstance(seed, int) else [at(buffers, i) for i in range(len(seeds))]
    for number, own in zip(seeds, given, strict=True):
        validation.check_buffers(spec, own)
        wrong = [group.name for group in spec.groups if not _is_of_seed(group, number, own)]
        if wrong:
            got, expected = f"others in {listing(wrong)}", f"the buffers of seed {number}"
            where, fix = "save_checkpoint(buffers=)", "pass the seed that init was given"
            raise ValueError(message(where, expected=expected, got=got, fix=fix))
    return given


def _is_of_seed(group: Group, seed: int, buffers: Buffers) -> bool:
    own = buffers[group.name]
    return all(
        torch.allclose(own[name].cpu(), wanted, rtol=1e-4, atol=1e-5)
        for name, wanted in fixed_numbers(group, seed).items()
    )


def _data_of(path: Any, spec: Spec | None, seed: int | None) -> dict[str, Any]:
    """Stand in for metadata that the file does not have."""
    if spec is None or seed is None:
        fix = "pass spec= and seed=, or the file as save_checkpoint wrote it"
        got = "none: another tool has saved it again, or it is no checkpoint"
        raise CheckpointError(message(str(path), expected="mapfn's metadata", got=got, fix=fix))
    known = {"seed": seed, "metadata": {}, "probe": None}
    return known | {"train_state": archive.pack(None, "", {})}


def _buffers(
    spec: Spec, seed: int | list[int], tensors: Mapping[str, Tensor], target: Any
) -> list[Buffers]:
    """Return the buffers of each member, or of all: those in the file, or made from the seed."""
    seeds = [seed] if isinstance(seed, int) else seed
    if not any(name.startswith("buffers.") for name in tensors):
        return [init(spec, own, target)[1] for own in seeds]
    whole = {group.name: _unprefixed(f"buffers.{group.name}.", tensors) for group in spec.groups}
    return [whole] if isinstance(seed, int) else [at(whole, i) for i in range(len(seeds))]


def _check_weights(
    path: Any, spec: Spec, data: Mapping[str, Any], made: tuple[Latents, Buffers]
) -> None:
    if data["probe"] is None:
        return
    if data["base"] != fingerprints.base_digest(spec, made[1]):
        got, fix = "another", "pass the target with the weights that it was saved with"
        expected = "the base that the latents were trained on"
        raise CheckpointError(message(str(path), expected=expected, got=got, fix=fix))
    wrong = fingerprints.differing_groups(data["probe"], fingerprints.probe(spec, *made))
    if wrong:
        got = f"others in {listing(wrong)}"
        fix = "save it with include_buffers=True where it was trained"
        expected = "the weights that were saved"
        raise CheckpointError(message(str(path), expected=expected, got=got, fix=fix))
