"""The model that every tool quantises."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shard.made_by_tools.support import SIZES, Make


@pytest.fixture
def source(checkpoint: Make) -> Path:
    return checkpoint("llama", **SIZES)
