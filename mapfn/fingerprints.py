"""Fingerprints: whether two machines, or two times, have the same numbers and weights."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from mapfn.generation import generate_group
from mapfn.groups import BASE, Group
from mapfn.spec import Spec
from mapfn.types import Buffers, Latents, MapBuffers

# Weights of a group in its probe.
_PROBED = 4


def digest(tensors: Mapping[str, Tensor], more: bytes = b"") -> str:
    """Return a BLAKE2b digest of names, dtypes, shapes and bits, and of more bytes.

    >>> digest({"a": torch.zeros(2)}) == digest({"a": torch.zeros(2)})
    True
    >>> digest({"a": torch.zeros(2)}) == digest({"a": torch.zeros(1, 2)})
    False
    """
    found = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
        bits = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        found.update(bits.numpy().data)
    found.update(more)
    return found.hexdigest()


def base_digest(spec: Spec, buffers: Buffers) -> str | None:
    """Return the digest of all bases that are the target's own tensors; None without one."""
    own = {
        leaf.name: buffers[group.name][BASE + leaf.name]
        for group in spec.groups
        for leaf, base in zip(group.leaves, group.bases, strict=True)
        if base == "target"
    }
    return digest(own) if own else None


def probe(spec: Spec, latents: Latents, buffers: Buffers) -> dict[str, list[float]]:
    """Return some generated weights of each trained group, to compare between machines.

    They agree to 1e-5 of the group's spread wherever latents and map are the same.

    Args:
        spec: from :func:`~mapfn.make_spec`.
        latents: of one member.
        buffers: of the same.

    Returns:
        ``{group: [weight, ...]}``, evenly spaced over the group's weights.

    >>> from mapfn import init, make_spec
    >>> spec = make_spec(torch.nn.Linear(3, 2), latent_dim=2)
    >>> [len(weights) for weights in probe(spec, *init(spec)).values()]
    [4]
    """
    with torch.no_grad():
        return {
            group.name: _probed(group, latents[group.name], buffers[group.name])
            for group in spec.trained_groups
        }


def _probed(group: Group, latent: Tensor, buffers: MapBuffers) -> list[float]:
    leaves = generate_group(group, latent, buffers).values()
    flat = torch.cat([leaf.flatten().double() for leaf in leaves])
    index = torch.linspace(0, len(flat) - 1, min(_PROBED, len(flat))).long()
    return [float(f"{weight:.9g}") for weight in flat[index.to(flat.device)].tolist()]


def differing_groups(
    one: Mapping[str, list[float]], other: Mapping[str, list[float]], tolerance: float = 1e-5
) -> list[str]:
    """Name the groups whose probes differ, or that only one has.

    >>> differing_groups({"a": [1.0], "b": [1.0]}, {"a": [1.0 + 1e-7], "b": [1.1]})
    ['b']
    """
    return [
        name
        for name in dict.fromkeys([*one, *other])
        if name not in one or name not in other or not _near(one[name], other[name], tolerance)
    ]


def _near(one: list[float], other: list[float], tolerance: float) -> bool:
    if len(one) != len(other):
        return False
    size = max(map(abs, one), default=0.0)
    return all(abs(a - b) <= tolerance * size for a, b in zip(one, other, strict=True))
