"""Command lines mean the same on every machine that tests them."""

from __future__ import annotations

import pytest

from tgi_trio.cli import device_count


@pytest.fixture(autouse=True)
def no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks share the processor, as where there is no device; some tests say otherwise."""
    monkeypatch.setattr(device_count, "count_devices", lambda: 0)
