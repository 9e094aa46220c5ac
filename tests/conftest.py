"""What holds for every test."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Tests assert behaviour, never wall-clock times: a busy machine must not fail a property.
SLOW = [HealthCheck.too_slow]
settings.register_profile("shared-machine", deadline=None, suppress_health_check=SLOW)
settings.load_profile("shared-machine")
