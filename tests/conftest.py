"""What holds for every test."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Tests assert behaviour, never wall-clock times: a busy machine must not fail a property.
SLOW = [HealthCheck.too_slow]
# In CI the examples are always the same: a commit is judged by itself, not by the luck of the draw.
settings.register_profile(
    "shared-machine",
    deadline=None,
    suppress_health_check=SLOW,
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("shared-machine")
