"""Generation: latents and fixed numbers from a seed, weights from latents.

``init`` is the only place with randomness. ``generate`` is pure: plain tensor operations over a
plan that is decided by the spec alone.
"""

from typing import Any

import torch
from torch import Tensor

from mapfn import raw, seeds, transform, trees, validation
from mapfn.groups import BASE, Group, fixed_numbers
from mapfn.layout import Leaf
from mapfn.plan import Segment
from mapfn.spec import Spec
from mapfn.types import Buffers, Drive, Latents, MapBuffers


def init(
    spec: Spec, seed: int = 0, target: Any = None, device: torch.device | str | None = None
) -> tuple[Latents, Buffers]:
    """Make the latents and the map's fixed numbers; the only place with randomness.

    Args:
        spec: from :func:`~mapfn.make_spec`.
        seed: any int; every number is a fixed function of it and of the group's name, with the
            same bits on every device, version and machine. The global generators stay untouched.
        target: needed where a base is ``"target"``: its tensors are kept by reference.
        device: where the tensors go; torch's default device by default.

    Returns:
        ``latents``, ``{group: float32 [latent_dim]}``, N(0, 1), or 0 where the base is a tensor;
        and ``buffers``, ``{group: {name: Tensor}}``.

    Raises:
        TypeError: a seed that is not an int.
        ValueError: a target that is missing, or is not the spec's.

    >>> from mapfn import make_spec
    >>> spec = make_spec(torch.nn.Linear(4, 2), latent_dim=3)
    >>> latents, buffers = init(spec, seed=0)
    >>> latents["(root)"].shape
    torch.Size([3])
    """
    validation.check_seed(seed)
    own = validation.target_tensors(spec, target)
    device = torch.get_default_device() if device is None else torch.device(device)
    with torch.device("cpu"):
        latents = {group.name: _first_latent(group, seed) for group in spec.trained_groups}
        buffers = {group.name: fixed_numbers(group, seed) for group in spec.groups}
        for group in spec.groups:
            buffers[group.name] |= _bases(group, seed, own)
    latents, buffers = trees.map_tensors(lambda tensor: tensor.to(device), (latents, buffers))
    return latents, buffers


def _first_latent(group: Group, seed: int) -> Tensor:
    if any(isinstance(base, str) for base in group.bases):
        return torch.zeros(group.latent_dim)
    key = seeds.key(seeds.derive(seed, group.name, "latent"))
    return seeds.normal(key, group.latent_dim).float()


def _bases(group: Group, seed: int, own: dict[str, Tensor]) -> MapBuffers:
    bases = {}
    for leaf, base in zip(group.leaves, group.bases, strict=True):
        if base == "target":
            bases[BASE + leaf.name] = own[leaf.name].detach()
        elif base == "init":
            bases[BASE + leaf.name] = _initial(leaf, seeds.derive(seed, leaf.name, "base"))
    return bases


def _initial(leaf: Leaf, seed: int) -> Tensor:
    """Draw a leaf as torch would: uniform, by exact transforms, of its own spread and centre."""
    spread = leaf.initial.std * 3**0.5
    numbers = leaf.initial.mean + spread * seeds.uniform(seeds.key(seed), leaf.numel)
    return numbers.view(leaf.shape).to(leaf.torch_dtype)


def base_params(spec: Spec, buffers: Buffers) -> Any:
    """Return the base of every leaf in the target's structure, tensors by reference.

    >>> from mapfn import make_spec
    >>> spec = make_spec(torch.nn.LayerNorm(2), latent_dim=2)
    >>> base_params(spec, init(spec)[1])["weight"]
    tensor([1., 1.])
    """
    validation.check_buffers(spec, buffers)
    params = {}
    for group in spec.groups:
        for leaf, base in zip(group.leaves, group.bases, strict=True):
            params[leaf.name] = _base_tensor(leaf, base, buffers[group.name])
    return spec.layout.build(params)


def _base_tensor(leaf: Leaf, base: float | str, buffers: MapBuffers) -> Tensor:
    if isinstance(base, str):
        return buffers[BASE + leaf.name]
    device = next(iter(buffers.values())).device if buffers else None
    return torch.full(leaf.shape, base, dtype=leaf.torch_dtype, device=device)


def generate(spec: Spec, latents: Latents, buffers: Buffers) -> Any:
    """Make every weight of the target from the latents; pure.

    ``theta = base + scale * activation(W z + alpha z.z / d)`` (arXiv 2602.19134), computed in
    float32 (float64 for float64 latents) with autocast off, and cast to the leaf's dtype last.
    Large leaves are made tile by tile in cache, so that nothing but the weights is allocated.
    Traced code keeps the caller's ``torch.set_float32_matmul_precision``, which a graph cannot
    change: leave it at ``"highest"``, its default, for weights that agree between machines.

    Args:
        spec: from :func:`~mapfn.make_spec`.
        latents: ``{group: float [latent_dim]}``.
        buffers: from :func:`~mapfn.init` of the same spec.

    Returns:
        The params in the target's structure: ``{name: Tensor}`` for a module, one name a tie
        group. Leaves of one group may be views of one tensor.

    Raises:
        TypeError: latents that are no floating-point tensors.
        ValueError: latents or buffers of another spec: missing, extra, or of another shape.

    >>> from mapfn import make_spec
    >>> spec = make_spec(torch.nn.Linear(4, 2), latent_dim=3)
    >>> params = generate(spec, *init(spec, seed=0))
    >>> {name: tuple(tensor.shape) for name, tensor in params.items()}
    {'weight': (2, 4), 'bias': (2,)}
    """
    if not torch.compiler.is_compiling():
        validation.check_latents(spec, latents)
        validation.check_buffers(spec, buffers)
        validation.check_devices(latents, buffers)
    params: dict[str, Tensor] = {}
    for group in spec.groups:
        if group.latent_dim:
            with raw.full_precision(latents[group.name].device):
                params |= generate_group(group, latents[group.name], buffers[group.name])
        else:
            named = zip(group.leaves, group.bases, strict=True)
            params |= {leaf.name: _base_tensor(leaf, b, buffers[group.name]) for leaf, b in named}
    return spec.layout.build(params)


def generate_group(group: Group, latent: Tensor, buffers: MapBuffers) -> dict[str, Tensor]:
    """Make the leaves of one group, by name; what :func:`generate` does, without its checks."""
    last = len(group.layer_dims) - 1
    drive = raw.drive_layer(group, last, raw.last_input(group, latent, buffers), buffers)
    if group.scaling is not None and not transform.prefers_plain(group.num_numbers):
        own = raw.layer_buffers(group, last, buffers)
        scales = group.leaf_scales
        parts = group.scaling.generate_scaled(own, drive.latent, drive.shift, scales)
        return _finish_leaves(group, drive, parts, buffers)
    leaves: dict[str, Tensor] = {}
    for segment in group.segments:
        leaves |= _generate_segment(group, segment, drive, buffers)
    return leaves


def _finish_leaves(
    group: Group, drive: Drive, parts: tuple[Tensor, ...], buffers: MapBuffers
) -> dict[str, Tensor]:
    if drive.inner.shape[-1]:
        zero = torch.zeros_like(drive.shift)
        added = transform.scaled_rows(drive.left, drive.inner, zero, group.leaf_scales)
        parts = tuple(part + more for part, more in zip(parts, added, strict=True))
    leaves = {}
    for leaf, base, part in zip(group.leaves, group.bases, parts, strict=True):
        center = buffers[BASE + leaf.name] if isinstance(base, str) else base
        decoded = group.decoder.decode(part, center, 1.0)
        leaves[leaf.name] = decoded.view(leaf.shape).to(leaf.torch_dtype)
    return leaves


def _generate_segment(
    group: Group, segment: Segment, drive: Drive, buffers: MapBuffers
) -> dict[str, Tensor]:
    # The scale of a linear map's only run goes into the latent instead of the weights.
    folded = group.foldable and len(segment.runs) == 1
    drive = drive.scaled(segment.runs[0].scale) if folded else drive
    layer = len(group.layer_dims) - 1
    made = raw.raw_rows(group, layer, drive, buffers, (segment.start, segment.stop))
    numbers = raw.activate(group.activation, made)
    leaves: dict[str, Tensor] = {}
    for run, part in zip(segment.runs, segment.cut(numbers), strict=True):
        base = buffers[BASE + run.name] if isinstance(run.base, str) else run.base
        leaves |= run.cut(group.decoder.decode(part, base, 1.0 if folded else run.scale))
    return leaves
