"""Spaces that are taken out of decoded text, as transformers takes them out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from tests.router.text.kinds import CORPUS, byte_level, save, unigram
from tgi_trio.router.text.clean_up import CleaningDetokenizer, clean_up
from tgi_trio.router.text.tokenizer import Tokenizer

KEY = "clean_up_tokenization_spaces"
CORRUPTS = f"{KEY}_for_bpe_even_though_it_will_corrupt_output"
AWKWARD = "A server said : ' no ' , is n't it ? Yes , it 's . A server 've , it 're ! A 'm"
TEXTS = st.lists(st.sampled_from([*" .?!,'ntmsvrea\n", " '", " ' ", "n't", " n", " 'v", "  "]))


class Spelled:
    """A detokeniser whose tokens are texts."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def push(self, token_id: int) -> str:
        return self._texts[token_id]

    def flush(self) -> str:
        return ""


@given(TEXTS)
@example([" '", " ", "."])
@example([" '", " '", " ", " ", ".", "a"])
@example([" n", "'", "t", " n", "'", "a"])
@example([" ", "'", "v", "ery"])
def test_pieces_are_the_whole(texts: list[str]) -> None:
    spelled = CleaningDetokenizer(Spelled(texts))
    pieces = [spelled.push(i) for i in range(len(texts))]
    whole = "".join(texts)
    expected = PreTrainedTokenizerBase.clean_up_tokenization(None, whole)  # type: ignore[arg-type]
    assert "".join([*pieces, spelled.flush()]) == clean_up(whole) == expected


def test_what_is_certain_is_not_held_back() -> None:
    spelled = CleaningDetokenizer(Spelled(["Hello", " world", " is", " n", "ot", " ' ", "."]))
    pieces = [spelled.push(i) for i in range(6)]
    assert pieces == ["Hello", " world", " is", "", " not", ""]


@pytest.mark.parametrize("make", [unigram, byte_level])
@pytest.mark.parametrize(
    "said", [{}, {KEY: False}, {KEY: True}, {KEY: True, CORRUPTS: True}, {CORRUPTS: True}]
)
def test_a_folder_says_whether_it_is_done(
    tmp_path: Path, make: Callable[[], tokenizers.Tokenizer], said: dict[str, bool]
) -> None:
    """Of byte pairs it is not, as they know where spaces are, unless that is said as well."""
    backend = make()
    save(backend, tmp_path, **said)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), **said)
    ours = Tokenizer.from_folder(tmp_path)
    for text in (*CORPUS, AWKWARD):
        prompt = backend.encode("So", add_special_tokens=False).ids
        rest = backend.encode(f" {text}", add_special_tokens=False).ids
        expected = str(theirs.decode([*prompt, *rest]))
        assert ours.decode([*prompt, *rest]) == expected
        spelled = ours.detokenizer(prompt)
        streamed = "".join([*map(spelled.push, rest), spelled.flush()])
        assert ours.decode(prompt) + streamed == expected
    cleaned = KEY in said and said[KEY] and (make is unigram or CORRUPTS in said)
    assert expected.endswith("isn't it? Yes, it's. A server've, it're! A'm") is cleaned
