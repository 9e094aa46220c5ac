"""docs/models.md is what the family tables say."""

from __future__ import annotations

from pathlib import Path

from tests.shard.torch_backend.test_models_exact import FAMILIES as EXACT
from tgi_trio.shard.torch_backend.models import doc

ROOT = Path(__file__).parents[3]


def test_the_document_is_up_to_date() -> None:
    assert (ROOT / "docs" / "models.md").read_text() == doc.render()


def test_what_it_says_of_tests_is_true() -> None:
    assert tuple(sorted(EXACT)) == doc._EXACT
    for name in ("models_exact", "models_families", "encoder_decoder"):
        path = f"tests/shard/torch_backend/test_{name}.py"
        assert path in doc.render()
        assert (ROOT / path).exists()
