"""Regular expressions of `stop_regex`: Python's syntax, without what takes more than linear time.

An expression becomes a Glushkov automaton: one position per character as written (a repetition
counts as often as it may repeat), at most `MOST_POSITIONS`. Sets of positions are the bits of an
integer, so each character of text costs at most an OR per live position, and usually only two
look-ups. What a position matches is asked of `re`, a character at a time. Refused by name and
place: look-around, anchors, backreferences, possessive and atomic parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from tgi_trio.errors import ValidationError

MOST_POSITIONS = 128
_MOST_CHARACTERS = 1000  # of an expression
_MOST_STEPS = 4096  # of building an automaton, since empty groups have no positions to count
_DEEPEST = 50  # nested groups
_REMEMBERED = 1024  # most cached results for characters, and for sets of positions

Test = Callable[[str], object]  # of one character; what is true or not


@dataclass(slots=True, eq=False)
class Automaton:
    """Matches an expression one character at a time; never matches the empty text."""

    text: str  # the expression
    first: int = 0  # positions, as bits, with which a match may begin
    last: int = 0  # those with which it may end
    follow: list[int] = field(default_factory=list)  # those that may follow
    _tests: list[tuple[Test, int]] = field(default_factory=list)  # and the positions that have it
    _taking: dict[str, int] = field(default_factory=dict)
    _after: dict[int, int] = field(default_factory=dict)

    def taking(self, character: str) -> int:
        """Return the positions, as bits, that match a character."""
        bits = self._taking.get(character)
        if bits is None:
            bits = 0
            for test, positions in self._tests:
                if test(character):
                    bits |= positions
            if len(self._taking) >= _REMEMBERED:
                self._taking.clear()
            self._taking[character] = bits
        return bits

    def after(self, positions: int) -> int:
        """Return all positions that may follow these."""
        reached = self._after.get(positions)
        if reached is None:
            reached, left = 0, positions
            while left:
                lowest = left & -left
                reached |= self.follow[lowest.bit_length() - 1]
                left ^= lowest
            if len(self._after) >= _REMEMBERED:
                self._after.clear()
            self._after[positions] = reached
        return reached


def compile_regex(text: str) -> Automaton:
    """Return the automaton of an expression. Raises ValidationError that says what is wrong."""
    if len(text) > _MOST_CHARACTERS:
        raise ValidationError(
            f"`stop_regex` has {len(text)} characters, {_MOST_CHARACTERS} are allowed"
        )
    return _Compiler(text, _RegexParser(text).parse()).automaton


# ---- reading ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _One:
    test: Test


@dataclass(frozen=True, slots=True)
class _Series:
    parts: list[_Node]


@dataclass(frozen=True, slots=True)
class _Choice:
    parts: list[_Node]


@dataclass(frozen=True, slots=True)
class _Repeat:
    part: _Node
    least: int
    most: int | None


_Node = _One | _Series | _Choice | _Repeat

_FLAGS = re.compile(r"\(\?([a-zA-Z]+)\)")
_GROUP = re.compile(r"\((?:\?:|\?P<[A-Za-z_]\w*>)?(?!\?)")
_COUNT = re.compile(r"\{(\d*)(,?)(\d*)\}")
_CODE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U(00[01][0-9a-fA-F]{5}))")
_OCTAL = re.compile(r"\\(0[0-7]{0,2})")
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}
_KINDS = frozenset({r"\d", r"\D", r"\s", r"\S", r"\w", r"\W"})
_NO_FLAGS = "of its flags only `i`, `m`, `s` and `u` are served"


class _RegexParser:
    """A recursive-descent parser; only groups recurse."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._flags = re.NOFLAG

    def parse(self) -> _Node:
        """Return the expression's tree."""
        if flags := _FLAGS.match(self._text):
            if set(flags[1]) - set("imsu"):
                self._refuse(_NO_FLAGS)
            for letter, flag in (("i", re.IGNORECASE), ("s", re.DOTALL)):
                self._flags |= flag if letter in flags[1] else re.NOFLAG
            self._at = flags.end()
        node = self._choice()
        if self._at < len(self._text):
            self._refuse("this `)` closes nothing")
        return node

    def _refuse(self, what: str, at: int | None = None) -> NoReturn:
        where = self._at if at is None else at
        raise ValidationError(f"`stop_regex` is not valid at character {where + 1}: {what}")

    def _peek(self) -> str:
        return self._text[self._at : self._at + 1]

    def _choice(self) -> _Node:
        parts = [self._series()]
        while self._peek() == "|":
            self._at += 1
            parts.append(self._series())
        return _Choice(parts)

    def _series(self) -> _Node:
        parts: list[_Node] = []
        while self._peek() not in ("", "|", ")"):
            part = self._atom()
            parts.append(self._read_repetition(part))
        return _Series(parts)

    def _read_repetition(self, part: _Node) -> _Node:
        counts = self._counts()
        if counts is None:
            return part
        if self._peek() == "+":
            self._refuse("possessive repetitions are not served")
        if self._peek() == "?":  # lazy: no difference, as the first end counts
            self._at += 1
        if self._counts() is not None:
            self._refuse("a repetition is repeated: put it into a group")
        return _Repeat(part, *counts)

    def _counts(self) -> tuple[int, int | None] | None:
        start = self._at
        sign = self._peek()
        if sign and sign in "*+?":
            self._at += 1
            return int(sign == "+"), 1 if sign == "?" else None
        found = _COUNT.match(self._text, self._at)
        if found is None or found[0] == "{}":  # a plain brace
            return None
        self._at = found.end()
        least, most = int(found[1][:9] or 0), int(found[3][:9]) if found[3] else None
        if not found[2]:
            most = least
        if most is not None and most < least:
            self._refuse("the repetition can never be met", start)
        if max(least, most or 0) > MOST_POSITIONS:
            self._refuse(f"no more than {MOST_POSITIONS} repetitions are served", start)
        return least, most

    def _atom(self) -> _Node:
        sign = self._peek()
        if sign == "(":
            return self._group()
        if sign == "[":
            return self._leaf(self._class())
        if sign == "\\":
            return self._leaf(_quote(self._escaped()))
        if sign in "^$":
            self._refuse(f"`{sign}` is not served: where a line ends is not known while it comes")
        start = self._at
        if self._counts() is not None:
            self._refuse(f"`{self._text[start : self._at]}` has nothing to repeat", start)
        self._at += 1
        return self._leaf("." if sign == "." else re.escape(sign))

    def _leaf(self, source: str) -> _One:
        """Return what matches one character, as `re` does."""
        return _One(re.compile(source, self._flags).fullmatch)

    def _group(self) -> _Node:
        opening = self._at
        found = _GROUP.match(self._text, self._at)
        if found is None:
            self._refuse("look-around, inner flags, conditions and atomic groups are not served")
        self._at = found.end()
        self._depth += 1
        if self._depth > _DEEPEST:
            self._refuse(f"more than {_DEEPEST} groups in one another")
        inner = self._choice()
        if self._peek() != ")":
            self._refuse("this `(` is never closed", opening)
        self._at += 1
        self._depth -= 1
        return inner

    def _class(self) -> str:
        """Return a class as `re` reads it, whatever its characters mean elsewhere."""
        opening = self._at
        self._at += 1
        negated = self._peek() == "^"
        self._at += negated
        members: list[str] = []
        while self._peek() != "]" or not members:  # a `]` at the beginning is literal
            if not self._peek():
                self._refuse("this `[` is never closed", opening)
            members.append(self._member())
        self._at += 1
        return f"[{'^' * negated}{''.join(members)}]"

    def _member(self) -> str:
        """Return one entry of a class: a character, a kind, or a range."""
        start = self._at
        low = self._read_single()
        if self._peek() != "-" or self._text[self._at + 1 : self._at + 2] in ("", "]"):
            return _quote(low)
        self._at += 1
        high = self._read_single()
        if {low, high} & _KINDS or high < low:
            self._refuse("the range has no such ends", start)
        return f"{_quote(low)}-{_quote(high)}"

    def _read_single(self) -> str:
        if self._peek() != "\\":
            self._at += 1
            return self._text[self._at - 1]
        return self._escaped()

    def _escaped(self) -> str:
        """Return the character, or one of `_KINDS`, for an escape sequence."""
        start = self._at
        letter = self._text[start + 1 : start + 2]
        if code := _CODE.match(self._text, start):
            self._at = code.end()
            number = int(next(filter(None, code.groups())), 16)
            return chr(number) if number < 0x110000 else self._refuse("no such character", start)
        if octal := _OCTAL.match(self._text, start):
            self._at = octal.end()
            return chr(int(octal[1], 8))
        self._at += 2
        if letter in _CONTROLS:
            return _CONTROLS[letter]
        if f"\\{letter}" in _KINDS:
            return f"\\{letter}"
        if not letter or letter.isalnum():
            self._refuse(f"`\\{letter}` is not served", start)
        return letter


def _quote(single: str) -> str:
    """Return a character or one of `_KINDS` as it is written in an expression."""
    return single if single in _KINDS else re.escape(single)


# ---- making the automaton ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Fragment:
    """A part of the automaton: whether it may be empty, and where it begins and ends."""

    empty: bool = True
    first: int = 0
    last: int = 0


class _Compiler:
    """Builds the automaton of one tree."""

    def __init__(self, text: str, tree: _Node) -> None:
        self.automaton = Automaton(text)
        self._positions: dict[int, tuple[Test, int]] = {}  # by the identity of the tree's leaf
        self._steps = 0
        whole = self._fragment(tree)
        if whole.empty:
            raise ValidationError(
                f"`stop_regex` matches the empty text, which is everywhere: {text}"
            )
        self.automaton.first, self.automaton.last = whole.first, whole.last
        self.automaton._tests.extend(self._positions.values())

    def _fragment(self, node: _Node) -> _Fragment:
        self._steps += 1
        if self._steps > _MOST_STEPS:
            self._too_large()
        match node:
            case _One(test):
                return self._position(node, test)
            case _Series(parts):
                whole = _Fragment()
                for part in parts:
                    whole = self._join(whole, self._fragment(part))
                return whole
            case _Choice(parts):
                found = [self._fragment(part) for part in parts]
                return _Fragment(
                    any(each.empty for each in found),
                    _union(each.first for each in found),
                    _union(each.last for each in found),
                )
            case _Repeat(part, least, most):
                return self._repeat(part, least, most)

    def _repeat(self, part: _Node, least: int, most: int | None) -> _Fragment:
        whole = _Fragment()
        for _ in range(least if most is not None else max(least - 1, 0)):
            whole = self._join(whole, self._fragment(part))
        if most is None:
            loop = self._fragment(part)
            self._link(loop.last, loop.first)
            return self._join(whole, loop if least else _Fragment(True, loop.first, loop.last))
        # Each optional repetition may only follow the previous one, so that few positions are live
        # at a time.
        behind = whole
        for _ in range(most - least):
            one = self._fragment(part)
            self._link(behind.last, one.first)
            first = whole.first | (one.first if behind.empty and whole.empty else 0)
            whole = _Fragment(whole.empty, first, whole.last | one.last)
            behind = _Fragment(False, one.first, one.last)
        return whole

    def _join(self, a: _Fragment, b: _Fragment) -> _Fragment:
        self._link(a.last, b.first)
        return _Fragment(
            a.empty and b.empty,
            a.first | (b.first if a.empty else 0),
            b.last | (a.last if b.empty else 0),
        )

    def _link(self, last: int, first: int) -> None:
        follow = self.automaton.follow
        while last:
            lowest = last & -last
            follow[lowest.bit_length() - 1] |= first
            last ^= lowest

    def _position(self, leaf: _One, test: Test) -> _Fragment:
        follow = self.automaton.follow
        if len(follow) >= MOST_POSITIONS:
            self._too_large()
        bit = 1 << len(follow)
        follow.append(0)
        _, bits = self._positions.get(id(leaf), (test, 0))
        self._positions[id(leaf)] = test, bits | bit
        return _Fragment(False, bit, bit)

    def _too_large(self) -> NoReturn:
        raise ValidationError(
            f"`stop_regex` is too large: it may hold {MOST_POSITIONS} characters, each counted as "
            f"often as it may repeat: {self.automaton.text}"
        )


def _union(sets: Iterator[int]) -> int:
    union = 0
    for each in sets:
        union |= each
    return union
