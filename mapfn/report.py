"""Reports on a spec: how many numbers are trained, generated and stored, as data and as a table."""

from typing import NamedTuple

from mapfn.groups import Group
from mapfn.spec import Spec


class Count(NamedTuple):
    """Sizes of a spec, in numbers and bytes."""

    trainable: int
    """Trained numbers: the latents of all groups."""
    generated: int
    """Weights of the target."""
    stored: int
    """Bytes of the map's fixed numbers, bases left out: they are the target's own tensors."""
    compression_ratio: float
    """Weights for each trained number; infinite when nothing is trained."""


def count(spec: Spec) -> Count:
    """Count trained, generated and stored numbers; allocates nothing.

    >>> import torch
    >>> from mapfn import make_spec
    >>> count(make_spec(torch.nn.Linear(30, 10), latent_dim=31))
    Count(trainable=31, generated=310, stored=8, compression_ratio=10.0)
    """
    trainable = sum(group.latent_dim for group in spec.groups)
    generated = spec.layout.numel
    stored = sum(group.stored_bytes for group in spec.groups)
    ratio = generated / trainable if trainable else float("inf")
    return Count(trainable, generated, stored, ratio)


def summary(spec: Spec) -> str:
    """Lay a spec out as a table: group, leaves, weights, latents, mapper, ratio.

    A latent count with ``<`` is capped: the group has fewer numbers than were asked for. Aliases
    of tied leaves stand below the table.

    >>> import torch
    >>> from mapfn import make_spec
    >>> print(summary(make_spec(torch.nn.Linear(30, 10), latent_dim=31)))
    group   leaves  weights  latents  mapper      ratio
    (root)       2      310       31  hadamard()   10.0
    total        2      310       31               10.0
    """
    total = count(spec)
    rows: list[tuple[str, ...]] = [("group", "leaves", "weights", "latents", "mapper", "ratio")]
    rows += [_row(group) for group in spec.groups]
    leaves, ratio = str(len(spec.layout.leaves)), f"{total.compression_ratio:,.1f}"
    rows.append(("total", leaves, f"{total.generated:,}", f"{total.trainable:,}", "", ratio))
    tied = [leaf for leaf in spec.layout.leaves if leaf.aliases]
    lines = [f"{leaf.name} is also {', '.join(leaf.aliases)}" for leaf in tied]
    return "\n".join([*_aligned(rows), *lines])


def _row(group: Group) -> tuple[str, ...]:
    weights = sum(leaf.numel for leaf in group.leaves)
    capped = group.latent_dim < group.requested_dim
    latents = f"{group.latent_dim:,}" + (f" < {group.requested_dim:,}" if capped else "")
    ratio = f"{weights / group.latent_dim:,.1f}" if group.latent_dim else "-"
    return group.name, str(len(group.leaves)), f"{weights:,}", latents, repr(group.mapper), ratio


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = {0, 4}
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
