"""docs/models.md is what the family tables say."""

from __future__ import annotations

from pathlib import Path

from tests.shard.torch_backend.models_support import IMAGED, INNER
from tests.shard.torch_backend.test_models_exact import FAMILIES as EXACT
from tools.docs import models

ROOT = Path(__file__).parents[3]


def test_what_it_says_of_tests_is_true() -> None:
    assert tuple(sorted(EXACT)) == models.EXACT
    assert set(models.INNER) == INNER and set(models.IMAGED) == IMAGED
    for name in ("models_exact", "models_families", "encoder_decoder", "wrappers"):
        path = f"tests/shard/torch_backend/test_{name}.py"
        assert path in models.render()
        assert (ROOT / path).exists()
