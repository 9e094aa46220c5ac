"""What has no room around a gap is left out, and no more; long texts are not counted whole."""

from __future__ import annotations

import re

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from tgi_trio.router.http.gap_fitting import fit_gap
from tgi_trio.router.text.infill import Gap, InfillFormat, OtherFile

FORMAT = InfillFormat("<P>", "<S>", "<M>", file=("<F>",))
BARE = 3 + 8  # tokens of an empty gap, and those that are kept in reserve
ADDED = frozenset({"<F>"})

# Tokens of very different lengths: a word, a character, a mark.
_TOKEN = re.compile(r"<[PSMF]>|\n|[a-z]+|[^a-z]")


class Counter:
    """Counts tokens, and the characters that were looked at for that."""

    def __init__(self) -> None:
        self.characters = 0

    async def count(self, text: str) -> int:
        self.characters += len(text)
        return len(_TOKEN.findall(text))


def fit(gap: Gap, most: int, counter: Counter | None = None) -> Gap:
    return trio.run(fit_gap, gap, FORMAT, ADDED, most, (counter or Counter()).count)


def tokens(text: str) -> int:
    return len(_TOKEN.findall(text))


def keep_end(text: str, most: int) -> str:
    """Return what `before` is to become: the longest end, by trying them all."""
    if tokens(text) <= most:
        return text
    fits = max((n for n in range(1, len(text)) if tokens(text[-n:]) <= most), default=0)
    part = text[len(text) - fits :]
    _, newline, rest = part.partition("\n")
    cut = fits and text[len(text) - fits - 1] != "\n"
    return rest if cut and newline and rest else part


def keep_beginning(text: str, most: int) -> str:
    if tokens(text) <= most:
        return text
    fits = max((n for n in range(1, len(text)) if tokens(text[:n]) <= most), default=0)
    whole, newline, _ = text[:fits].rpartition("\n")
    return whole + newline if newline else text[:fits]


# Characters of one token each, so that a longest part has just as many tokens as have room.
TEXTS = st.text(st.sampled_from("0123456789 \n"), max_size=120)


@given(before=TEXTS, behind=TEXTS, most=st.integers(0, 160))
@settings(deadline=None, max_examples=150)
def test_as_much_is_kept_as_has_room(before: str, behind: str, most: int) -> None:
    found = fit(Gap(before, behind), most)
    room = max(0, most - BARE)
    after = len(behind)
    if len(before) + len(behind) > room:
        after = min(len(behind), max(room // 4, room - len(before)))
    assert found.behind == keep_beginning(behind, after)
    all_fits = len(before) + len(behind) <= room
    assert found.before == (before if all_fits else keep_end(before, room - after))


@given(
    before=st.text(st.sampled_from("abc \n"), max_size=300),
    behind=st.text(st.sampled_from("abc \n"), max_size=300),
    most=st.integers(BARE, 300),
)
@settings(deadline=None, max_examples=150)
def test_words_are_never_more_than_have_room(before: str, behind: str, most: int) -> None:
    found = fit(Gap(before, behind), most)
    assert before.endswith(found.before) and behind.startswith(found.behind)
    assert tokens(found.before) + tokens(found.behind) <= most - BARE
    if tokens(before) + tokens(behind) <= most - BARE:
        assert (found.before, found.behind) == (before, behind)


@given(sizes=st.lists(st.integers(1, 40), max_size=6), most=st.integers(BARE, 150))
@settings(deadline=None, max_examples=100)
def test_the_nearest_files_are_kept(sizes: list[int], most: int) -> None:
    others = tuple(OtherFile("0" * size, f"{i}") for i, size in enumerate(sizes))
    own = 3  # tokens of the name of the gap's own file
    found = fit(Gap("0", "0", others), most + 2 + own)
    room, kept = most - BARE, 0
    for size in reversed(sizes):
        room -= size + 3  # its mark, its name, a line end
        if room < 0:
            break
        kept += 1
    assert found.others == others[len(others) - kept :]


@pytest.mark.parametrize(
    "text", ["longer words somewhere\n" * 40_000, "x " * 400_000, "0" * 800_000]
)
def test_a_long_text_is_counted_near_the_gap_alone(text: str) -> None:
    counter = Counter()
    found = fit(Gap(text, text, (OtherFile(text, "other"),)), 500 + BARE, counter)
    assert 450 <= tokens(found.before) + tokens(found.behind) <= 500
    assert found.others == ()
    assert counter.characters < 60 * 500, "of 2.4 million"
