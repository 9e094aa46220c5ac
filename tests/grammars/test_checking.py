"""What a grammar must keep to before the shard may see it."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tgi_trio.demo import model_path
from tgi_trio.errors import ModelLoadError
from tgi_trio.grammars import checking
from tgi_trio.grammars.checking import check
from tgi_trio.grammars.compiler import load_tokenizer
from tgi_trio.router.text import grammars
from tgi_trio.router.text.tokenizer import Tokenizer
from tgi_trio.router.text.tokenizer_files import TokenizerConfig


def test_a_grammar_whose_steps_would_hold_up_the_others_is_refused() -> None:
    """Its masks take ten times of what is allowed, in CPU time: a busy machine changes nothing."""
    tokenizer = load_tokenizer(model_path() / "tokenizer.json")
    check(grammars.json_schema({"const": "x" * 300}), tokenizer)
    with pytest.raises(ValueError, match=r"a step takes \d+ ms, 10 ms are allowed"):
        check(grammars.json_schema({"const": "x" * 300_000}), tokenizer)


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"$ref": "#"}, "no text fits it"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "no text fits it"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "use `anyOf`"),
    ],
)
def test_what_is_wrong_is_told_in_the_clients_terms(schema: dict[str, Any], told: str) -> None:
    tokenizer = load_tokenizer(model_path() / "tokenizer.json")
    with pytest.raises(ValueError, match=told):
        check(grammars.json_schema(schema), tokenizer)


@pytest.mark.parametrize(("took", "refused"), [([0.014, 0.001], False), ([0.014, 0.02], True)])
def test_what_the_machine_does_meanwhile_is_no_verdict(
    monkeypatch: pytest.MonkeyPatch, took: list[float], refused: bool
) -> None:
    tokenizer = load_tokenizer(model_path() / "tokenizer.json")
    measured = iter(took)
    monkeypatch.setattr(checking, "_slowest_mask", lambda matcher: next(measured))
    refusal = pytest.raises(ValueError, match="a step takes 14 ms") if refused else nullcontext()
    with refusal:
        check(grammars.regex("[0-9]+"), tokenizer)
    assert next(measured, None) is None  # both have been asked for


def test_a_tokenizer_of_which_the_library_panics_is_refused_as_others_are(tmp_path: Path) -> None:
    broken = json.loads((model_path() / "tokenizer.json").read_text())
    broken["model"]["continuing_subword_prefix"] = "####"  # longer than some of its pairs
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(broken))
    with pytest.raises(ModelLoadError, match=r"cannot be used for grammars: .*out of bounds"):
        load_tokenizer(file)
    with pytest.raises(ModelLoadError, match=r"cannot be loaded as a tokenizer: .*out of range"):
        Tokenizer.from_file(file, TokenizerConfig({}, (), {}))
