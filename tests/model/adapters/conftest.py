from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.model.adapters.adapter_folders import DATA


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / "llama" / "adapter", tmp_path / "adapter"))
