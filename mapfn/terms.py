"""The terms of the mapping loss beside the task's own, as pure functions for any loop.

Stability, smoothness and alignment of arXiv 2602.19134. Noise and probes are arguments: nothing
here draws a random number.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mapfn import raw, trees
from mapfn.errors import listing, message
from mapfn.generation import generate_group
from mapfn.groups import Group
from mapfn.modulation import additive
from mapfn.moments import has_closed_form, mapped_groups
from mapfn.spec import Spec
from mapfn.types import Buffers, Latents, MapBuffers, Moments

# Norm of a latent below which its cosine fades out: where z starts at 0 it has no direction yet.
_LEAST_NORM = 1e-3


def stability(outputs: Any, noisy_outputs: Any) -> Tensor:
    """Return how far the outputs move under noise: squared changes, the mean over the batch.

    Args:
        outputs: what the target returned: a tensor, or a tuple, list, dict or ``ModelOutput`` of
            them, ``[batch, ...]`` each; a tensor without dimensions counts as it is. What is no
            floating-point tensor is left out.
        noisy_outputs: the same from the weights of noisy latents.

    Returns:
        ``float []``, summed over all but the batch.

    Raises:
        TypeError: outputs without any floating-point tensor.

    >>> stability(torch.zeros(2, 3), torch.ones(2, 3))
    tensor(3.)
    """
    pairs = zip(trees.outputs(outputs), trees.outputs(noisy_outputs), strict=True)
    parts = [_mean_square(clean, noisy) for clean, noisy in pairs]
    if not parts:
        fix = "return floating-point tensors, or a tuple, list or dict of them"
        got = type(outputs).__name__
        raise TypeError(message("stability", expected="outputs", got=got, fix=fix))
    return torch.stack(parts).sum()


def _mean_square(clean: Tensor, noisy: Tensor) -> Tensor:
    change = noisy - clean
    change = change.to(torch.promote_types(change.dtype, torch.float32))
    return change.square().sum() / (change.shape[0] if change.dim() else 1)


def smoothness(
    spec: Spec,
    latents: Latents,
    buffers: Buffers,
    moments: Mapping[str, Moments],
    probes: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Return ``||d theta / d z||_F^2 / d``, summed over the groups that a map makes.

    One-layer maps with additive or no modulation have a closed form: a few dot products, or one
    more pass over the weights where there is an activation. Other groups are estimated without
    bias by Hutchinson's probes, with one forward-mode product each and never a backward pass.

    Args:
        spec: from :func:`~mapfn.make_spec`.
        latents: ``{group: float [latent_dim]}``.
        buffers: from :func:`~mapfn.init`.
        moments: from :func:`mapfn.moments.moments`.
        probes: ``{group: float [num_probes, latent_dim]}``, N(0, 1), for the groups without a
            closed form.

    Returns:
        ``float []``; 0 where no group is mapped.

    Raises:
        ValueError: a group without a closed form that has no probes.

    >>> from mapfn import init, make_spec
    >>> from mapfn.moments import moments
    >>> spec = make_spec(torch.nn.Linear(4, 2), latent_dim=3, scale={"*": 1.0}, modulation=None)
    >>> latents, buffers = init(spec)
    >>> smoothness(spec, latents, buffers, moments(spec, buffers))  # 10 rows of norm 1, d = 3
    tensor(3.3333)
    """
    given = probes or {}
    groups = mapped_groups(spec)
    open_groups = [group.name for group in groups if not has_closed_form(group)]
    if missing := [name for name in open_groups if name not in given]:
        expected = "probes for each group without a closed form"
        fix = "pass {group: torch.randn(num_probes, latent_dim)}"
        got = f"none for {listing(missing)}"
        raise ValueError(message("smoothness(probes=)", expected=expected, got=got, fix=fix))
    parts = [
        _closed(group, latents[group.name], buffers[group.name], moments[group.name])
        if has_closed_form(group)
        else _probed(group, latents[group.name], buffers[group.name], given[group.name])
        for group in groups
    ]
    return torch.stack(parts).sum() if parts else torch.zeros(())


def _closed(group: Group, latent: Tensor, buffers: MapBuffers, moments: Moments) -> Tensor:
    dim = latent.shape[-1]
    strength = group.modulation.alpha if isinstance(group.modulation, additive) else 0.0
    energy = (4 * strength**2 / dim**2) * latent.dot(latent)
    if group.activation == "identity":
        pull = (4 * strength / dim) * moments.pull.to(latent.dtype).dot(latent)
        return (moments.energy.to(latent.dtype) + pull + energy * moments.spread) / dim
    with raw.full_precision(latent.device):
        drive = raw.drive_layer(group, 0, latent, buffers)
        numbers = raw.raw_rows(group, 0, drive, buffers, (0, group.num_numbers))
    rows = _squared_norms(group, latent, buffers) + energy
    rows = rows + (4 * strength / dim) * (numbers - drive.shift)
    slopes = raw.slope(group.activation, numbers).square()
    cut = torch.split(rows * slopes, [count for count, _ in group.leaf_scales])
    sums = [scale**2 * part.sum() for part, (_, scale) in zip(cut, group.leaf_scales, strict=True)]
    return torch.stack(sums).sum() / dim


def _squared_norms(group: Group, latent: Tensor, buffers: MapBuffers) -> Tensor:
    if group.normed is None:  # has_closed_form says that it is not
        return latent.new_zeros(group.num_numbers)
    own = raw.layer_buffers(group, 0, buffers)
    return group.normed.squared_norms(own, latent, 0, group.num_numbers)


def _probed(group: Group, latent: Tensor, buffers: MapBuffers, probes: Tensor) -> Tensor:
    """Estimate by ``E ||J v||^2 = ||J||_F^2`` for v ~ N(0, I)."""

    def leaves(point: Tensor) -> list[Tensor]:
        with raw.full_precision(point.device):
            return list(generate_group(group, point, buffers).values())

    parts = []
    for probe in probes.to(latent.dtype).unbind():
        moved = torch.func.jvp(leaves, (latent,), (probe,))[1]
        parts += [part.to(latent.dtype).square().sum() for part in moved]
    return torch.stack(parts).sum() / (len(probes) * latent.shape[-1])


def alignment(
    spec: Spec, latents: Latents, buffers: Buffers, moments: Mapping[str, Moments]
) -> Tensor:
    """Return ``1 - cos(z, mean row of the modulated W)``, summed over the groups a map makes.

    For a deep map it is the last layer's ``W`` and what goes into it.

    Args:
        spec: from :func:`~mapfn.make_spec`.
        latents: ``{group: float [latent_dim]}``.
        buffers: from :func:`~mapfn.init`.
        moments: from :func:`mapfn.moments.moments`.

    Returns:
        ``float []``, between 0 and 2 a group. Where z is 0 it has no direction: cos counts as 0.

    >>> from mapfn import init, make_spec
    >>> from mapfn.moments import moments
    >>> spec = make_spec(torch.nn.Linear(4, 2), latent_dim=3)
    >>> latents, buffers = init(spec)
    >>> 0 < float(alignment(spec, latents, buffers, moments(spec, buffers))) < 2
    True
    """
    parts = [
        _misaligned(group, latents[group.name], buffers[group.name], moments[group.name])
        for group in mapped_groups(spec)
    ]
    return torch.stack(parts).sum() if parts else torch.zeros(())


def _misaligned(group: Group, latent: Tensor, buffers: MapBuffers, moments: Moments) -> Tensor:
    with raw.full_precision(latent.device):
        hidden = raw.last_input(group, latent, buffers)

        def mean_number(vector: Tensor) -> Tensor:
            """Return the mean raw number: linear in the vector, and its slope is the mean row."""
            drive = raw.drive_layer(group, len(group.layer_dims) - 1, hidden, buffers, vector)
            mean = moments.row_mean.to(vector.dtype).dot(drive.latent) + drive.shift
            return mean + moments.left_mean.to(vector.dtype).dot(drive.inner)

        row: Tensor = torch.func.grad(mean_number)(hidden)
    direction = row / row.norm().clamp(min=1e-30)
    cosine: Tensor = hidden.dot(direction) / hidden.norm().clamp(min=_LEAST_NORM)
    return 1 - cosine
