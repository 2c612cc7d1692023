"""The random numbers of a train step, which follow from the seed and the step alone."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from mapfn import seeds
from mapfn.losses import mapping_loss
from mapfn.moments import has_closed_form, mapped_groups
from mapfn.spec import Spec
from mapfn.types import Latents, TrainState


class Draw(NamedTuple):
    """The random numbers of one step, N(0, 1), by group; empty where the loss needs none."""

    noise: Latents
    """``float [latent_dim]``, for the stability."""
    probes: dict[str, Tensor]
    """``float [num_probes, latent_dim]``, for the smoothness of groups without a closed form."""


def draw_step(spec: Spec, loss: mapping_loss, state: TrainState) -> Draw:
    """Draw noise and probes from the seed and the step, none where the loss needs none."""
    terms, key = loss.terms, seeds.fold(state.key, state.step)
    noise: Latents = {}
    if "stability" in terms:
        sizes = {group.name: group.latent_dim for group in spec.trained_groups}
        noise = _normals(key, sizes, state.latents)
    probes: dict[str, Tensor] = {}
    if "smoothness" in terms:
        groups = [group for group in mapped_groups(spec) if not has_closed_form(group)]
        sizes = {group.name: loss.num_probes * group.latent_dim for group in groups}
        # The noise takes the stream's first words: the probes have a key of their own.
        drawn = _normals(seeds.fold(key, torch.ones_like(key)), sizes, state.latents)
        probes = {name: numbers.view(loss.num_probes, -1) for name, numbers in drawn.items()}
    return Draw(noise, probes)


def _normals(key: Tensor, sizes: Mapping[str, int], like: Latents) -> dict[str, Tensor]:
    if not sizes:
        return {}
    cut = torch.split(seeds.normal(key, sum(sizes.values())), list(sizes.values()))
    return {name: part.to(like[name].dtype) for name, part in zip(sizes, cut, strict=True)}
