"""Which tokens an adapter's own tokenizer adds: what is only to pad with is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.adapters.own_tokens import list_own_tokens

PAD = {"id": 4, "content": "<pad>"}
CALL = {"id": 5, "content": "<call>"}


@pytest.mark.parametrize(
    ("tokenizer", "settings", "found"),
    [
        ({"model": {"vocab": {"a": 0, "b": 3}}}, {}, []),
        ({"model": {"vocab": {"a": 0, "b": 4}}}, {}, ["b"]),
        ({"model": {"vocab": [["a", -1.0]] * 4 + [["b", -2.0]]}}, {}, ["b"]),
        ({"added_tokens": [PAD]}, {"pad_token": "<pad>"}, []),
        ({"added_tokens": [PAD]}, {"pad_token": {"content": "<pad>"}}, []),
        ({"added_tokens": [PAD]}, {}, ["<pad>"]),
        ({"added_tokens": [PAD]}, {"pad_token": "<pad>", "eos_token": "<pad>"}, ["<pad>"]),
        ({"added_tokens": [PAD]}, {"pad_token": "<pad>", "chat_template": "a<pad>"}, ["<pad>"]),
        ({"added_tokens": [PAD, CALL]}, {"pad_token": "<pad>"}, ["<call>"]),
        ({"added_tokens": [1, {"id": "5"}, None], "model": 3}, {}, []),
    ],
)
def test_tokens_from_an_id_on(
    tmp_path: Path, tokenizer: dict[str, Any], settings: dict[str, Any], found: list[str]
) -> None:
    assert list_own_tokens(tmp_path, 4) is None
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert list_own_tokens(tmp_path, 4) == found


def test_a_template_beside_may_use_the_token(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [PAD]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<pad>"}))
    (tmp_path / "chat_template.jinja").write_text("{{ '<pad>' }}")
    assert list_own_tokens(tmp_path, 4) == ["<pad>"]


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_damaged_files_are_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        list_own_tokens(tmp_path, 4)
