"""Converted SentencePiece tokenizers, against SentencePiece itself."""

from __future__ import annotations

import io
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from tgi_trio.router.text.piece_model import PieceSettings, read_settings
from tgi_trio.router.text.sentence_pieces import mend_conversion
from tgi_trio.router.text.tokenizer import Tokenizer

CORPUS = ["def add(x, y):", "    return x + y", "hello world, this is text", "the cat  sat"] * 20
LLAMA = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}
GEMMA = {"bos_piece": "<bos>", "eos_piece": "<eos>", "pad_piece": "<pad>", "pad_id": 0}
GEMMA |= {"eos_id": 1, "bos_id": 2, "unk_id": 3, "add_dummy_prefix": False}
# name: type of the model, tokenizer_config.json, how the tokenizer is trained
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Llama 2": ("llama", {**LLAMA, "legacy": False}, {}),
    "an older Llama": ("llama", {**LLAMA, "legacy": True}, {}),
    "Mistral": ("mistral", {**LLAMA, "legacy": False}, {}),
    "Gemma": ("gemma2", {"tokenizer_class": "GemmaTokenizer"}, GEMMA),
    "no space in front": ("llama", LLAMA, {"add_dummy_prefix": False}),
    "spaces removed": ("llama", LLAMA, {"remove_extra_whitespaces": True}),
    "neither": ("llama", LLAMA, {"add_dummy_prefix": False, "remove_extra_whitespaces": True}),
    "characters replaced": (
        "llama",
        LLAMA,
        {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
    ),
}


def train(**changes: Any) -> bytes:
    """Return a SentencePiece file."""
    file = io.BytesIO()
    settings: dict[str, Any] = {
        "model_type": "bpe",
        "vocab_size": 340,
        "byte_fallback": True,
        "split_digits": True,
        "remove_extra_whitespaces": False,
        "normalization_rule_name": "identity",
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=file, **settings | changes
    )
    return file.getvalue()


@pytest.fixture(scope="module", params=KINDS)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Tokenizer]:
    """A tokenizer as SentencePiece reads it, and as it is converted."""
    return convert(tmp_path_factory.mktemp("converted"), *KINDS[request.param])


def convert(
    folder: Path, model_type: str, config: dict[str, Any], settings: dict[str, Any]
) -> tuple[Any, Tokenizer]:
    (folder / "tokenizer.model").write_bytes(train(**settings))
    reference = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))
    names = {"bos_token": reference.bos_id(), "eos_token": reference.eos_id()}
    config = config | {name: reference.id_to_piece(id) for name, id in names.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return reference, Tokenizer.from_folder(folder, cache=folder / "cache")


def many_texts() -> list[str]:
    """Return all short texts of some characters, and longer ones."""
    letters = [" ", "a", "\n", "\u2581", "é", "hello", "\t"]
    texts = ["".join(each) for n in range(4) for each in itertools.product(letters, repeat=n)]
    draw = random.Random(1)
    words = [*letters, "  ", "the cat", "world,", "12", "日本", "    return x"]
    return texts + ["".join(draw.choices(words, k=draw.randint(4, 30))) for _ in range(500)]


def test_all_texts_are_read_as_sentencepiece_reads_them(both: tuple[Any, Tokenizer]) -> None:
    reference, tokenizer = both
    for text in many_texts():
        assert tokenizer.encode_ids(text, False).tolist() == reference.encode(text), repr(text)


def test_they_come_back_as_they_were(both: tuple[Any, Tokenizer]) -> None:
    reference, tokenizer = both
    for text in ("a", " a", "   a\n b", "hello  world", " "):
        ids = tokenizer.encode_ids(text, False)
        assert tokenizer.decode(ids) == reference.decode(ids.tolist())


def test_what_follows_a_special_token_is_read_as_ever(both: tuple[Any, Tokenizer]) -> None:
    """With a space in front in older Llamas alone, which SentencePiece puts before each part."""
    reference, tokenizer = both
    end = next(text for text, id in tokenizer.added_tokens.items() if id == reference.eos_id())
    for text in ("a", " a", "a b"):
        ids = tokenizer.encode_ids(f"x{end}{text}", False).tolist()
        behind = ids[ids.index(reference.eos_id()) + 1 :]
        assert reference.decode(behind).strip() == text.strip()


def test_what_is_not_known_is_a_token(tmp_path: Path) -> None:
    settings = {"byte_fallback": False, "vocab_size": 80}
    reference, tokenizer = convert(tmp_path, "llama", LLAMA, settings)
    for text in ("日本", "a 日本 b", "é", "x日y"):
        ids = tokenizer.encode_ids(text, False).tolist()
        assert ids == reference.encode(text) and reference.unk_id() in ids


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, PieceSettings(True, False, b"", "<unk>")),
        ({"add_dummy_prefix": False}, PieceSettings(False, False, b"", "<unk>")),
        ({"remove_extra_whitespaces": True}, PieceSettings(True, True, b"", "<unk>")),
        (
            {"model_type": "unigram", "vocab_size": 284, "unk_piece": "[unk]"},
            PieceSettings(True, False, b"", "[unk]"),
        ),
    ],
)
def test_settings_are_read_from_the_file(
    tmp_path: Path, settings: dict[str, Any], expected: PieceSettings
) -> None:
    (tmp_path / "model").write_bytes(train(**settings))
    assert read_settings(tmp_path / "model") == expected


@pytest.mark.parametrize("data", [b"", b"\xff" * 9, b"\x0a\x7fshort", b"{}", b"\x0b"])
def test_other_files_change_nothing(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "model").write_bytes(data)
    assert read_settings(tmp_path / "model") is None
    metaspace = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first"}
    content = {"normalizer": None, "pre_tokenizer": metaspace}
    assert mend_conversion(content, tmp_path / "model") == content


def test_others_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(train())
    spaces = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "never"}
    for step in (None, {"type": "ByteLevel"}, spaces, {"type": "Sequence", "pretokenizers": []}):
        content = {"normalizer": None, "pre_tokenizer": step}
        assert mend_conversion(content, tmp_path / "model") == content


def test_a_conversion_that_follows_the_file_stays(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(train(remove_extra_whitespaces=True))
    collapsed = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    spaces = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"}
    content = {"normalizer": collapsed, "pre_tokenizer": spaces, "decoder": None}
    assert mend_conversion(content, tmp_path / "model") == content
