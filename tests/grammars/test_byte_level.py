"""A tokenizer that we read for grammars is the one that llguidance reads, and `tokenizers`.

The oracles are llguidance's own reading of the same tokenizer.json, and the library's encoding.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from tgi_trio.demo import model_path
from tgi_trio.grammars.byte_level import byte_level_tokenizer
from tgi_trio.grammars.compiler import load_tokenizer
from tgi_trio.model.gguf.pre_tokenizers import PRE_TOKENIZERS
from tgi_trio.router.text import grammars

Json = dict[str, Any]

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
TEXTS = [
    '{"name": "Ann-Marie", "age": 41, "tags": ["x", "yy"]}',
    "It is 12 o'clock; 3.5 of them say so.\n\n  Two   spaces,\ttabs\r\n",
    "caf\u00e9 nai\u0308ve \u65e5\u672c\u8a9e \U0001f642\U0001f642 <|end|> a<tool>b word wordy",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaabababab abcabc",
]
ADDED = ["<|end|>", "<tool>", "word", "\n\n"]
MISREAD = "caf\u00e9"  # added: its last letter is a byte of GPT-2's alphabet to llguidance
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "na\u00efve word": {"enum": ["one", "two", "three hundred", "\u65e5\u672c\u8a9e"]},
        "tags": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
    },
    "required": ["name", "na\u00efve word", "tags"],
    "additionalProperties": False,
}


@cache
def trained() -> Json:
    """Return a tokenizer.json of GPT-2's kind, trained on a few texts."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|end|>", "<|pad|>"],
        initial_alphabet=ALPHABET,
        show_progress=False,
    )
    made.train_from_iterator(TEXTS * 3, trainer)
    made.add_tokens([
        AddedToken("<tool>", normalized=False),
        AddedToken("word", single_word=True),
        AddedToken(MISREAD),
        AddedToken("\n\n", normalized=False, lstrip=True),
    ])  # fmt: skip
    return dict(json.loads(made.to_str()))


def changed(change: Callable[[Json], object]) -> bytes:
    """Return the trained file after a change."""
    made = json.loads(json.dumps(trained()))
    change(made)
    return json.dumps(made).encode()


def as_texts(made: Json) -> None:
    made["model"]["merges"] = [" ".join(pair) for pair in made["model"]["merges"]]


def cut(name: str) -> Callable[[Json], None]:
    def change(made: Json) -> None:
        kind = PRE_TOKENIZERS[name]
        made["pre_tokenizer"], made["normalizer"] = kind.pre_tokenizer, kind.normalizer
        made["model"]["ignore_merges"] = kind.whole_words_first

    return change


def backwards(made: Json) -> None:
    made["model"]["vocab"] = dict(reversed(made["model"]["vocab"].items()))


READ: dict[str, Callable[[Json], object]] = {
    "as it is": lambda made: None,
    "merges as texts": as_texts,
    "ids not in their order": backwards,
    "composed": lambda made: made.update(normalizer=json.loads(normalizers.NFC().__getstate__())),
    "a space first": lambda made: made["pre_tokenizer"].update(add_prefix_space=True),
    **{f"cut as {name}": cut(name) for name in ("gpt-2", "llama-bpe", "qwen2", "deepseek-llm")},
}


def misread() -> int:
    return next(each["id"] for each in trained()["added_tokens"] if each["content"] == MISREAD)


def own(data: bytes, ids: int = 0) -> LLTokenizer:
    made = byte_level_tokenizer(data, [0, 1], ids)
    assert made is not None
    return made


def theirs(data: bytes, ids: int = 0) -> LLTokenizer:
    return LLTokenizer(data.decode(), n_vocab=ids or None, eos_token=[0, 1])


def check_tokens(ours: LLTokenizer, other: LLTokenizer, misread: int = -1) -> None:
    assert ours.vocab_size == other.vocab_size
    assert ours.eos_tokens == other.eos_tokens
    assert ours.is_canonical == other.is_canonical
    for token_id in set(range(other.vocab_size)) - {misread}:
        assert ours.decode_bytes([token_id]) == other.decode_bytes([token_id]), token_id
        assert ours.is_special_token(token_id) == other.is_special_token(token_id), token_id
        assert ours.dbg_tokens([token_id]) == other.dbg_tokens([token_id]), token_id


@pytest.mark.parametrize("case", READ)
def test_tokens_and_texts_are_llguidances(case: str) -> None:
    data = changed(READ[case])
    ours, other = own(data, 640), theirs(data, 640)
    check_tokens(ours, other, misread())
    for text in TEXTS:
        for end in range(len(text) + 1):
            assert ours.tokenize_str(text[:end]) == other.tokenize_str(text[:end])
        part = text.encode()[: len(text) // 2 + 1]  # may end in a character
        assert ours.tokenize_bytes(part) == other.tokenize_bytes(part)


def test_the_embedded_models_are_llguidances() -> None:
    data = (model_path() / "tokenizer.json").read_bytes()
    check_tokens(own(data), theirs(data))


def test_added_tokens_stand_for_themselves() -> None:
    """Whatever their letters are in GPT-2's alphabet: the library makes them of the plain text."""
    data = changed(READ["as it is"])
    ours, library = own(data), tokenizers.Tokenizer.from_str(data.decode())
    for token_id, token in library.get_added_tokens_decoder().items():
        if not ours.is_special_token(token_id):
            assert ours.decode_bytes([token_id]) == token.content.encode()
    text = "a caf\u00e9 word"
    ids = library.encode(text, add_special_tokens=False).ids
    assert misread() in ids
    matcher = LLMatcher(ours, grammars.regex(text), log_level=0)
    assert all(matcher.consume_token(token_id) for token_id in ids), matcher.get_error()
    assert matcher.is_accepting()


def test_a_merged_token_that_is_added_as_well_is_what_it_was() -> None:
    vocab = trained()["model"]["vocab"]
    text = next(each for each in vocab if len(each) > 1 and each[0] == "\u0120")
    added = {"id": vocab[text], "content": text, "special": False}
    whole = added | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    data = changed(lambda made: made["added_tokens"].append(whole))
    ours, library = own(data), tokenizers.Tokenizer.from_str(data.decode())
    assert ours.decode_bytes([vocab[text]]).decode() == library.decode([vocab[text]])


@cache
def sides() -> tuple[LLTokenizer, tokenizers.Tokenizer]:
    data = changed(cut("qwen2"))
    return own(data), tokenizers.Tokenizer.from_str(data.decode())


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from([*TEXTS, *"ab {\"':\n<>,1", "<|end|>", "<tool>", "\n\n", "word", "\r"])
    )
)
def test_encoding_is_that_of_the_library(parts: list[str]) -> None:
    ours, library = sides()
    text = "".join(parts)
    assert ours.tokenize_str(text) == library.encode(text, add_special_tokens=False).ids


@settings(max_examples=150, deadline=None)
@given(st.text())
def test_any_text_is_encoded_as_the_library_does(text: str) -> None:
    ours, library = sides()
    assert ours.tokenize_str(text) == library.encode(text, add_special_tokens=False).ids


def test_a_long_word_takes_no_time_of_its_square() -> None:
    """A constant of a grammar may be 64 KB long; merging it pair by pair would take minutes."""
    ours, library = sides()
    text = "ab" * 30_000
    assert ours.tokenize_str(text) == library.encode(text, add_special_tokens=False).ids


def masks_along(tokenizer: LLTokenizer, grammar: str, seed: int) -> list[tuple[bytes, list[int]]]:
    """Return masks and what is forced along tokens drawn from them."""
    matcher, draw = LLMatcher(tokenizer, grammar, log_level=0), random.Random(seed)
    seen = []
    while not matcher.is_stopped():
        mask = bytes(matcher.compute_bitmask())
        seen.append((mask, matcher.compute_ff_tokens()))
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little"))
        assert matcher.consume_token(draw.choice(allowed.tolist())), matcher.get_error()
    return seen


def test_masks_and_forced_tokens_are_llguidances() -> None:
    data = changed(cut("llama-bpe"))
    for seed in range(6):
        grammar = grammars.json_schema(SCHEMA)
        assert masks_along(own(data), grammar, seed) == masks_along(theirs(data), grammar, seed)


def metaspace(made: Json) -> None:
    made["pre_tokenizer"] = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always"}


def metaspace_inside(made: Json) -> None:
    metaspace(made)
    within = {"type": "Sequence", "pretokenizers": [made["pre_tokenizer"]]}
    bytes_then = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    made["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [within, bytes_then]}


def pieces(made: Json) -> None:
    made["decoder"] = {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]}


def with_a_gap(made: Json) -> None:
    vocab = made["model"]["vocab"]
    vocab[max(vocab, key=vocab.__getitem__)] += 10


def without_a_byte(made: Json) -> None:
    vocab = made["model"]["vocab"]
    vocab["??"] = vocab.pop("\u0120")


LEFT: dict[str, Callable[[Json], object]] = {
    "another model": lambda made: made["model"].update(type="WordPiece"),
    "words that go on": lambda made: made["model"].update(continuing_subword_prefix="##"),
    "words that end": lambda made: made["model"].update(end_of_word_suffix="</w>"),
    "merges left out": lambda made: made["model"].update(dropout=0.5),
    "no merges": lambda made: made["model"].pop("merges"),
    "merges of numbers": lambda made: made["model"].update(merges=[1, 2]),
    "a space by the normalizer": lambda made: made.update(
        normalizer={"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "_"}]}
    ),
    "spaces as marks": metaspace,
    "spaces as marks inside": metaspace_inside,
    "pieces": pieces,
    "no pre-tokenizer": lambda made: made.update(pre_tokenizer=None),
    "a broken expression": lambda made: made.update(
        pre_tokenizer={"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True},
        ]}
    ),
    "ids with a gap": with_a_gap,
    "a byte that is no token": without_a_byte,
    "a token outside the alphabet": lambda made: made["model"]["vocab"].update({" ": 600}),
    "an added token elsewhere": lambda made: made["added_tokens"][-1].update(id=900),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT)
def test_what_is_not_so_plain_is_left_to_llguidance(case: str) -> None:
    assert byte_level_tokenizer(changed(LEFT[case]), [0], 0) is None


def test_steps_without_end_are_left_to_llguidance() -> None:
    step = b'{"type": "Sequence", "pretokenizers": ['
    deep = step * 50_000 + b"]}" * 50_000
    data = changed(lambda made: made.update(pre_tokenizer="here")).replace(b'"here"', deep)
    assert byte_level_tokenizer(data, [0], 0) is None


@pytest.mark.parametrize("eos_ids", [[0], [1, 0], [368]])
def test_a_shard_gets_ours_where_it_can(
    tmp_path: Path, eos_ids: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(changed(READ["as it is"]))
    expected = load_tokenizer(file, eos_ids, 700)
    assert expected.eos_tokens == list(eos_ids)
    assert expected.vocab_size == 700
    monkeypatch.setattr(
        "tgi_trio.grammars.compiler.byte_level_tokenizer", lambda data, eos, size: None
    )
    check_tokens(expected, load_tokenizer(file, eos_ids, 700), misread())
