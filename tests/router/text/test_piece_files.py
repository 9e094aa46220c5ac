"""SentencePiece files with code of their own, which is not run: ids are those of SentencePiece."""

from __future__ import annotations

import itertools
import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
import sentencepiece

from tests.router.text.test_sentence_pieces import many_texts, train
from tgi_trio.errors import ModelLoadError
from tgi_trio.router.text.piece_files import KINDS
from tgi_trio.router.text.tokenizer import Tokenizer
from tgi_trio.router.text.tokenizer_files import tokenizer_json

MODULES: Final = {
    "InternLMTokenizer": ["tokenization_internlm.InternLMTokenizer", None],
    "InternLM2Tokenizer": ["tokenization_internlm2.InternLM2Tokenizer", None],
    "InternLM2TokenizerFast": [
        "tokenization_internlm2.InternLM2Tokenizer",
        "tokenization_internlm2_fast.InternLM2TokenizerFast",
    ],
    "OrionTokenizer": ["tokenization_orion.OrionTokenizer", None],
    "BaichuanTokenizer": ["tokenization_baichuan.BaichuanTokenizer", None],
    "PanguTokenizer": ["tokenization_openpangu.PanguTokenizer", None],
    "ChatGLMTokenizer": ["tokenization_chatglm.ChatGLMTokenizer", None],
}
# How files are trained that tokenizers with code have: spaces in front or not, defined pieces, ...
FILES: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "no space in front": {"add_dummy_prefix": False},
    "defined": {"user_defined_symbols": ["<eoh>", "\u2581\u2581\u2581\u2581", "\n\n", "<eoh>a"]},
    "defined, no space in front": {
        "user_defined_symbols": ["<eoh>", "\n\n", "\t"],
        "add_dummy_prefix": False,
    },
    "spaces removed": {
        "remove_extra_whitespaces": True,
        "user_defined_symbols": ["<eoh>"],
        "normalization_rule_name": "nmt_nfkc",
    },
    "unknown": {"byte_fallback": False, "vocab_size": 80, "user_defined_symbols": ["<eoh>"]},
}
PARTS: Final = ("<s>", "</s>", "<eoh>", "<eoh>a", "a", " a", "\u2581", "\n\n\n", "日", "<0x41>")


@cache
def file(name: str) -> bytes:
    return train(control_symbols=["[c]"], **FILES[name])


def write(folder: Path, kind: str, content: bytes, **config: Any) -> Path:
    """Write a folder with a SentencePiece file and the configuration of a tokenizer with code."""
    (folder / "tokenizer.model").write_bytes(content)
    said = {"auto_map": {"AutoTokenizer": MODULES[kind]}, "tokenizer_class": kind} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return folder


def load(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder, cache=folder / "cache")


def read_by_parts(model: Any, text: str, special: dict[str, int]) -> list[int]:
    """Return the ids of a text as code in Python finds them: SentencePiece reads each part."""
    found: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, special)) + ")", text):
        found += [special[part]] if part in special else model.encode(part)
    return found


@pytest.mark.parametrize("name", FILES)
def test_ids_are_those_of_sentencepiece(tmp_path: Path, name: str) -> None:
    model = sentencepiece.SentencePieceProcessor(model_proto=file(name))
    tokenizer = load(write(tmp_path, "OrionTokenizer", file(name)))
    special = {text: model.piece_to_id(text) for text in ("<s>", "</s>", "<unk>")}
    draw = random.Random(name)
    texts = ["".join(each) for each in itertools.product(PARTS, repeat=2)]
    texts += ["".join(draw.choices(PARTS, k=draw.randint(3, 8))) for _ in range(500)]
    for text in (*many_texts(), "[c]", "<eoh>[c]<eoh>", "<eoh><0x41>", *texts):
        found = tokenizer.encode_ids(text, False).tolist()
        assert found == read_by_parts(model, text, special), repr(text)


@pytest.mark.parametrize("name", ["plain", "no space in front"])
def test_fast_code_of_internlm_reads_pieces_alone(tmp_path: Path, name: str) -> None:
    """Which is the same, but for characters that the file replaces."""
    kind = "InternLM2TokenizerFast"
    model = sentencepiece.SentencePieceProcessor(model_proto=file(name))
    tokenizer = load(write(tmp_path, kind, file(name)))
    for text in many_texts():
        assert tokenizer.encode_ids(text, False).tolist() == model.encode(text), repr(text)
    replaced = train(**FILES[name], normalization_rule_name="nmt_nfkc")
    tokenizer = load(write(tmp_path, kind, replaced))
    model = sentencepiece.SentencePieceProcessor(model_proto=replaced)
    assert tokenizer.decode(tokenizer.encode_ids("a \uff21 ﬁ  b")) == "a \uff21 ﬁ  b"
    assert model.decode(model.encode("a \uff21 ﬁ  b")) == "a A fi  b"


@pytest.mark.parametrize("name", ["plain", "no space in front", "defined"])
def test_texts_come_back(tmp_path: Path, name: str) -> None:
    model = sentencepiece.SentencePieceProcessor(model_proto=file(name))
    tokenizer = load(write(tmp_path, "InternLMTokenizer", file(name)))
    for text in ("a", " a", "   a\n b", "hello <eoh>  world", "\n\n\n", "日本"):
        ids = tokenizer.encode_ids(text, False)
        assert tokenizer.decode(ids) == model.decode(ids.tolist())


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"ChatGLMTokenizer"}))
def test_texts_begin_and_end_as_the_configuration_says(tmp_path: Path, kind: str) -> None:
    for config, begin, end in (
        ({}, [1], []),
        ({"add_bos_token": False, "add_eos_token": True}, [], [2]),
        ({"bos_token": "</s>", "eos_token": {"content": "<s>"}, "add_eos_token": True}, [2], [1]),
    ):
        tokenizer = load(write(tmp_path, kind, file("plain"), **config))
        between = tokenizer.encode_ids("hello", False).tolist()
        assert tokenizer.encode_ids("hello").tolist() == [*begin, *between, *end]


def test_tokens_are_named_anew_by_the_configuration(tmp_path: Path) -> None:
    """As InternLM 2 has it, whose file has spare pieces."""
    model = train(user_defined_symbols=["[UNUSED_TOKEN_1]", "[UNUSED_TOKEN_2]"])
    told = {"3": {"content": "<|im_end|>", "special": True}, "340": {"content": "<x>"}}
    write(tmp_path, "InternLM2TokenizerFast", model, added_tokens_decoder=told)
    tokenizer = load(tmp_path)
    reference = sentencepiece.SentencePieceProcessor(model_proto=model)
    ids = tokenizer.encode_ids("a<|im_end|>hello<x>", False).tolist()
    assert ids == [*reference.encode("a"), 3, *reference.encode("hello"), 340]
    assert tokenizer.decode(ids) == "a hello<x>"
    assert 4 not in tokenizer.encode_ids("[UNUSED_TOKEN_2]", False)  # its code does not find it


def test_roles_of_chatglm_are_behind_the_file(tmp_path: Path) -> None:
    model = sentencepiece.SentencePieceProcessor(model_proto=file("plain"))
    count = model.vocab_size()
    text = "<|user|>\n hi"
    tokenizer = load(write(tmp_path, "ChatGLMTokenizer", file("plain")))
    assert tokenizer.encode_ids("a").tolist() == [count + 1, count + 3, *model.encode("a")]
    assert tokenizer.encode_ids(text, False).tolist() == model.encode(text)
    expected = [count + 6, *model.encode("\n hi")]
    told = {str(count + 6): {"content": "<|user|>", "special": True}}
    for config in ({"encode_special_tokens": True}, {"added_tokens_decoder": told}):
        tokenizer = load(write(tmp_path, "ChatGLMTokenizer", file("plain"), **config))
        assert tokenizer.encode_ids(text, False).tolist() == expected
    # a message as its code puts it together: a line of the role, and the text, each by itself
    assert expected[1:] == [*model.encode("\n"), *model.encode("hi")]


def refuse(folder: Path, content: bytes, message: str, **config: Any) -> None:
    write(folder, "OrionTokenizer", content, **config)
    with pytest.raises(ModelLoadError, match=message):
        tokenizer_json(folder, folder / "cache")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "unigram", "vocab_size": 284}, "not made by merging neighbours"),
        ({"treat_whitespace_as_suffix": True}, "does not write spaces in front of words"),
        (
            {"remove_extra_whitespaces": True, "user_defined_symbols": ["\u2581\u2581"]},
            "characters that are replaced",
        ),
        (
            {"normalization_rule_name": "nmt_nfkc", "user_defined_symbols": ["\uff21"]},
            "characters that are replaced",
        ),
    ],
)
def test_what_is_read_otherwise_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    refuse(tmp_path, train(**changes), message)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"added_tokens_decoder": {"x": {}}}, "cannot be read"),
        ({"added_tokens_decoder": {"340": {"content": 3}}}, "cannot be read"),
        ({"added_tokens_decoder": [1]}, "cannot be read"),
        ({"added_tokens_decoder": {"900": {"content": "<x>"}}}, "leaves numbers out"),
        ({"added_tokens_decoder": {"340": {"content": "<s>"}}}, "numbers otherwise"),
        ({"bos_token": "<none>"}, "has no token '<none>'"),
    ],
)
def test_a_configuration_of_another_file_is_refused(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    refuse(tmp_path, file("plain"), message, **config)


def test_what_is_no_file_of_sentencepiece_is_refused(tmp_path: Path) -> None:
    refuse(tmp_path, b"\x0b", "cannot be read as a file of SentencePiece")
