"""The corpus: deterministic, well formed, and apart from the questions it is measured by."""

from __future__ import annotations

import random
import re

import pytest

from tools.demo import phrasing
from tools.demo.documents import BEGIN, END, END_OF_TEXT, SPECIAL_TOKENS, Corpus
from tools.demo.entries import (
    CorpusError,
    Entry,
    load_entries,
    load_heldout,
    load_prose,
    load_unknown,
    parse_entries,
)


def test_equal_seeds_give_equal_documents() -> None:
    assert list(Corpus(3).documents(500)) == list(Corpus(3).documents(500))


def test_different_seeds_give_different_documents() -> None:
    assert list(Corpus(3).documents(50)) != list(Corpus(4).documents(50))


def test_documents_begin_once_and_end() -> None:
    for document in Corpus(5).documents(500):
        text = "".join(piece.text for piece in document)
        assert text.startswith(BEGIN)
        assert text.count(BEGIN) == 1
        assert text.endswith((END, END_OF_TEXT))


def test_corpus_files_hold_no_special_tokens() -> None:
    texts = [entry.answer + entry.more for entry in load_entries()] + load_prose()
    assert not [text for text in texts if any(token in text for token in SPECIAL_TOKENS)]


def test_there_is_enough_to_know() -> None:
    entries = load_entries()
    assert len(entries) >= 120
    assert len({entry.answer for entry in entries}) == len(entries)


def _normal(question: str) -> str:
    return re.sub(r"[^a-z0-9/_ -]", "", question.lower()).strip()


def _phrasings(entry: Entry) -> set[str]:
    rng = random.Random(0)
    asked = {phrasing.reword(q, rng) for q in entry.questions for _ in range(300)}
    for plural, names in ((False, entry.singular), (True, entry.plural)):
        asked |= {phrasing.ask_about(name, plural, rng) for name in names for _ in range(600)}
    return {_normal(question) for question in asked}


def test_heldout_questions_are_not_in_the_corpus() -> None:
    asked: set[str] = set().union(*(_phrasings(entry) for entry in load_entries()))
    asked |= {_normal(question) for question in load_unknown()}
    assert [question for _, question in load_heldout() if _normal(question) in asked] == []


def test_heldout_slugs_exist() -> None:
    slugs = {entry.slug for entry in load_entries()} | {"unknown"}
    assert {slug for slug, _ in load_heldout()} <= slugs


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("Q: Who?\n", "x.txt:1"),
        ("[a]\nnonsense\n", "x.txt:2"),
        ("[a]\nQ: Who?\n", "exactly one A"),
        ("[a]\nA: Me.\n", "a Q or a term"),
        ("[a]\nQ: Who?\nA: Me.\nA: You.\n", "exactly one A"),
    ],
)
def test_a_broken_file_is_refused_with_its_place(text: str, complaint: str) -> None:
    with pytest.raises(CorpusError, match=complaint):
        parse_entries(text, "x.txt")
