"""Hypothesis draws the same few examples everywhere, and never fails for being slow."""

import pytest
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


@pytest.fixture(params=["plain", "tiled"])
def path(request, monkeypatch):
    """Make small maps by plain operations, as shipped, and tile by tile, as large ones are."""
    if request.param == "tiled":
        monkeypatch.setattr(transform, "_SMALL", 0)
        monkeypatch.setattr(transform, "_TILE_ROWS", 64)
