"""Texts of gaps that end with a line, wherever their pieces are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.router.http.fake_engine import byte_tokenizer
from tgi_trio.router.request import LineLimits, StoppingCriteria
from tgi_trio.router.text.gap_text import GapText, LineCutter

TEXTS = st.text("ab \t\n", max_size=30)


def indented(text: str, least: int) -> str:
    """Return what is left of a text, by the definition: the lines are looked at from behind it."""
    first, *others = text.split("\n")
    kept = [first]
    for i, line in enumerate(others):
        indent = len(line) - len(line.lstrip(" \t"))
        last = i == len(others) - 1
        if indent < least and (line.strip() or not last):
            return "\n".join([*kept, ""])  # the new line before it stays
        kept.append(line)
    return "\n".join(kept)


@given(TEXTS, st.integers(1, 3), st.lists(st.integers(0, 30)))
def test_lines_have_the_indentation_wherever_pieces_are_cut(
    text: str, least: int, cuts: list[int]
) -> None:
    cutter = LineCutter(LineLimits(indent=least), clock=lambda: 0.0)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    seen = "".join(cutter.push(text[a:b]) for a, b in pairwise(places))
    whole = seen + cutter.flush()
    assert whole == indented(text, least)
    assert cutter.over == (whole != text)


@pytest.mark.parametrize(("seconds", "seen"), [(2.5, "a\nb\nc\n"), (None, "a\nb\nc\nd\n")])
def test_a_line_that_ends_late_is_the_last(seconds: float | None, seen: str) -> None:
    times = iter(range(100))  # a second at each look: at the first piece, and behind each line
    cutter = LineCutter(LineLimits(seconds=seconds), clock=lambda: float(next(times)))
    assert "".join(map(cutter.push, ["a", "\nb\n", "c", "\nd\n"])) == seen
    assert cutter.over == (seconds is not None)


def test_the_generation_ends_there_and_not_by_a_stop_string() -> None:
    tokenizer = byte_tokenizer()
    stopping = StoppingCriteria(99, stop=("z",), keep_stop=False, lines=LineLimits(indent=2))
    output = GapText(tokenizer, [], stopping, LineLimits(indent=2))
    texts = []
    for token in tokenizer.encode_ids("ab\n  c\n d", add_special_tokens=False).tolist():
        assert not output.stopped
        texts.append(output.push(token, -1.0).text)
    assert texts == ["a", "b", "\n", "", "  ", "c", "\n", "", ""]
    assert output.stopped and output.matched is None
    assert output.finish() == "" and output.generated_text == "ab\n  c\n"


def test_spaces_at_the_end_are_not_lost() -> None:
    tokenizer = byte_tokenizer()
    output = GapText(tokenizer, [], StoppingCriteria(99), LineLimits(indent=4))
    for token in tokenizer.encode_ids("a\n  ", add_special_tokens=False).tolist():
        output.push(token, -1.0)
    assert output.finish() == "  " and output.generated_text == "a\n  " and not output.stopped
