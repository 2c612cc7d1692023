"""The raw numbers of a group, ``W z + shift`` of each layer of its map, before any activation.

Here a group's fixed numbers, its mapper and its modulation meet. The modulated matrix is never
built: the modulation says what to put through the fixed map instead.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from mapfn import modulation, transform
from mapfn.groups import LAYER, MODULATION, Group
from mapfn.types import Drive, MapBuffers


def last_input(group: Group, latent: Tensor, buffers: MapBuffers) -> Tensor:
    """Return what goes into the last layer of the map: the latent itself unless the map is deep.

    Args:
        group: of the spec.
        latent: ``float [latent_dim]``; half precision is raised to float32.
        buffers: of this group.

    Returns:
        ``float [width]``.
    """
    hidden = latent.to(torch.promote_types(latent.dtype, torch.float32))
    if group.deep is not None:
        for layer, (_, width) in enumerate(group.layer_dims[:-1]):
            drive = drive_layer(group, layer, hidden, buffers)
            hidden = group.deep.activate(hidden, raw_rows(group, layer, drive, buffers, (0, width)))
    return hidden


def layer_buffers(group: Group, layer: int, buffers: MapBuffers) -> MapBuffers:
    """Return one layer's own fixed numbers, by the names that its mapper gave them."""
    return scoped(buffers, f"{LAYER}{layer}.")


def scoped(buffers: MapBuffers, prefix: str) -> MapBuffers:
    """Return the buffers whose names begin with a prefix, without it."""
    return {
        name[len(prefix) :]: tensor for name, tensor in buffers.items() if name.startswith(prefix)
    }


def drive_layer(
    group: Group, layer: int, latent: Tensor, buffers: MapBuffers, vector: Tensor | None = None
) -> Drive:
    """Say what to put through a layer's fixed map so that it acts as the modulated one.

    Args:
        group: of the spec.
        layer: index.
        latent: what modulates the map, ``float [width]``.
        buffers: of this group.
        vector: what goes through the modulated map, ``float [width]``; the latent by default.
    """
    vector = latent if vector is None else vector
    if group.modulation is None:
        return modulation.plain(vector)
    own = scoped(buffers, f"{LAYER}{layer}.{MODULATION}")
    return group.modulation.modulate(own, latent, vector)


def raw_rows(
    group: Group, layer: int, drive: Drive, buffers: MapBuffers, rows: tuple[int, int]
) -> Tensor:
    """Return the raw numbers ``rows[0] .. rows[1]`` of a layer, ``float [rows[1] - rows[0]]``."""
    own = layer_buffers(group, layer, buffers)
    raw = group.mapper.generate(own, drive.latent, drive.shift, *rows)
    if drive.inner.shape[-1]:
        zero = torch.zeros_like(drive.shift)
        raw = raw + transform.rows(drive.left, drive.inner, zero, *rows)
    return raw


def activate(activation: str, raw: Tensor) -> Tensor:
    """Apply a group's activation to its raw numbers."""
    if activation == "tanh":
        return raw.tanh()
    return raw.sin() if activation == "sin" else raw


def slope(activation: str, raw: Tensor) -> Tensor:
    """Return the derivative of a group's activation at its raw numbers."""
    if activation == "tanh":
        return 1 - raw.tanh().square()
    return raw.cos() if activation == "sin" else torch.ones_like(raw)


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Switch autocast off, and in eager code the reduced-precision matrix products too."""
    if torch.compiler.is_compiling():
        return torch.autocast(device.type, enabled=False)
    return _eager_full_precision(device)


@contextmanager
def _eager_full_precision(device: torch.device) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    with torch.autocast(device.type, enabled=False):
        if before == "highest":
            yield
            return
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(before)
