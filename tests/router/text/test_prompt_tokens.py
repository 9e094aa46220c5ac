"""Long prompts in pieces: the same tokens as in one piece, and what was seen is not done again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from tests.router.text.kinds import BACKENDS, CORPUS, served, unhurried
from tgi_trio.errors import ValidationError
from tgi_trio.router.text import prompt_tokens
from tgi_trio.router.text.prompt_tokens import JOINED, PromptTokens

PARTS = st.sampled_from(
    [*CORPUS, "<s>", "</s>", "<|user|>", "<think>", "  \n", " ", "\n\n", "x", "<", "<|user", "|>"]
)


class Listed:
    """An encoding that notes how many ids are made a list of at once."""

    def __init__(self, encoding: tokenizers.Encoding, note: Callable[[int], None]) -> None:
        self._encoding, self._note = encoding, note

    def __len__(self) -> int:
        return len(self._encoding)

    @property
    def ids(self) -> list[int]:
        self._note(len(self))
        return list(self._encoding.ids)


class Counting:
    """A tokenizer that counts the characters it is given, and notes which lists are made."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self.characters = self.longest = 0
        self.lists: list[int] = []

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool) -> Any:
        self.characters += sum(map(len, texts))
        self.longest = max(self.longest, *map(len, texts))
        found = self._backend.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        return [Listed(each, self.lists.append) for each in found]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


@pytest.mark.parametrize("kind", BACKENDS)
@unhurried
@given(parts=st.lists(PARTS, max_size=30))
def test_pieces_have_the_tokens_of_the_whole(kind: str, parts: list[str]) -> None:
    backend, text = served(kind)._backend, "".join(parts)
    expected = backend.encode(text, add_special_tokens=False).ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_tokens, "WORTH", 20)
        patch.setattr(prompt_tokens, "JOINED", 30)
        tokens = PromptTokens(backend)
        for _ in range(2):
            assert tokens.encode(text)[0].tolist() == expected


def test_what_was_seen_is_not_tokenised_again() -> None:
    backend = Counting(served("byte_level")._backend)
    tokens = PromptTokens(backend)  # type: ignore[arg-type]
    head = "<s>" + CORPUS[0] * 60 + "</s>"
    first, second = head + "<|user|>Hello</s>", head + "<|user|>Hello</s>Yes.<|user|>Bye"
    for text, few in ((first, len(first)), (first, 20), (second, 40)):
        backend.characters = 0
        found = tokens.encode(text)[0].tolist()
        assert found == backend.encode(text, add_special_tokens=False).ids
        assert 0 < backend.characters <= few


def test_a_great_many_short_pieces_do_not_become_one() -> None:
    """A piece's ids become a list in one call, for which all other threads wait."""
    backend = Counting(served("byte_level")._backend)
    text = "<s>" + "<|user|>Hello</s>Yes.</s>" * 10_000
    found = PromptTokens(backend).encode(text)[0].tolist()  # type: ignore[arg-type]
    assert found == backend.encode(text, add_special_tokens=False).ids
    assert backend.longest <= JOINED < len(text) / 3


def test_what_is_only_counted_is_listed_where_it_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads wait while a list is made, and a million tokens take 40 ms."""
    monkeypatch.setattr(prompt_tokens, "COUNTED", 5000)
    backend = Counting(served("byte_level")._backend)
    tokens = PromptTokens(backend)  # type: ignore[arg-type]
    text = f"<s>{CORPUS[0] * 60}</s>{CORPUS[0] * 400}"
    whole = backend.encode(text, add_special_tokens=False).ids
    ids, count = tokens.encode(text, len(whole) - 1)
    assert (ids.tolist(), count) == ([], len(whole))
    assert backend.lists and 1000 < max(backend.lists) <= 5000 < len(whole) - 5000
    backend.lists.clear()
    assert tokens.encode(text, len(whole))[0].tolist() == whole
    assert sorted(backend.lists)[:-1] == [1], "the short one is known by now"
    assert tokens.encode(text, 1)[1] == len(whole)


def test_the_oldest_are_forgotten() -> None:
    tokens = PromptTokens(served("byte_level")._backend, most=3000)
    for i in range(8):
        tokens.encode(f"<s>{i}" + CORPUS[0] * 40)
    assert 0 < tokens._held <= 3000
    assert tokens._held == sum(map(len, tokens._known.values()))


def test_a_token_that_is_not_apart_cuts_nothing() -> None:
    """Behind one that takes the space after it, and beside one that must be a word."""
    for options in ({"rstrip": True}, {"lstrip": True}):
        backend = BACKENDS["byte_level"]()
        backend.add_special_tokens([tokenizers.AddedToken("<|cut|>", **options)])
        tokens = PromptTokens(backend)
        text = "a <|cut|> b<s>d"
        assert list(tokens._places(text)) == [text.index("d")]
    backend.add_tokens([tokenizers.AddedToken("word", single_word=True)])
    assert list(PromptTokens(backend)._places("a<s>b")) == []
    # Metaspace puts a space before the first word of a text alone.
    first = BACKENDS["unigram"]()
    first.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    assert list(PromptTokens(first)._places("a<s>b")) == []


def test_long_prompts_of_a_tokenizer() -> None:
    tokenizer = served("byte_level")
    text = "<s>" + CORPUS[1] * 80
    whole = tokenizer.encode_ids(text, add_special_tokens=False).tolist()
    for _ in range(2):
        ids, length = tokenizer.encode_prompt(text, False, None, 10**6)
        assert (ids.tolist(), length) == (whole, len(whole))
        ids, length = tokenizer.encode_prompt(text, False, 7, 10**6)
        assert (ids.tolist(), length) == (whole[-7:], 7)
        ids, length = tokenizer.encode_prompt(text, False, None, 10)
        assert (len(ids), length) == (0, len(whole))
    with pytest.raises(ValidationError, match="tokenizer error"):
        tokenizer.encode_prompt("<s>" + "\ud800" * 5000, False, None, 10**6)
