"""Hypothesis draws the same few examples everywhere, and never fails for being slow."""

import pytest
import torch
from hypothesis import HealthCheck, settings

from mapfn import transform

settings.register_profile(
    "repeatable",
    deadline=None,
    derandomize=True,
    max_examples=12,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.differing_executors],
)
settings.load_profile("repeatable")

# Two xdist workers share two cores: threads of their own would only wait for one another.
torch.set_num_threads(1)


@pytest.fixture(params=["plain", "tiled"])
def path(request, monkeypatch):
    """Make small maps by plain operations, as shipped, and tile by tile, as large ones are."""
    if request.param == "tiled":
        monkeypatch.setattr(transform, "_SMALL", 0)
        monkeypatch.setattr(transform, "_TILE_ROWS", 64)
