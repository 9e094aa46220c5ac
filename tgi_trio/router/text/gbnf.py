"""Parses grammars of llama.cpp (GBNF) and xgrammar (EBNF) into a tree.

    root ::= "yes" | "no, " reason{1,3}   # the first rule is `root`
    reason ::= [a-z ]+ [.;]

A rule ends where the next one begins, so alternatives may be on lines of their own. Errors name
line and column. `gbnf_lark.write_lark` converts the tree for llguidance.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tgi_trio.errors import ValidationError

ROOT = "root"
MOST_CHARACTERS = 2**15  # of a grammar; parsing one blocks the router
_DEEPEST = 100  # nested groups
_LARGEST = 0x10FFFF  # code point


@dataclass(frozen=True, slots=True)
class Characters:
    """One character of a class; `ranges` are pairs of code points, both inclusive."""

    ranges: tuple[tuple[int, int], ...]
    negated: bool = False  # any code point but these


@dataclass(frozen=True, slots=True)
class Literal:
    """A literal text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reference:
    """A reference to a rule by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class Series:
    """The parts in sequence; without parts, the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alternation:
    """Any one of the parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part `least` to `most` times (None: any number of times)."""

    part: Node
    least: int
    most: int | None


Node = Characters | Literal | Reference | Series | Alternation | Repeat
ANY = Characters((), negated=True)

_TOKENS = re.compile(
    r"""(?P<space>(?:\s|\#[^\r\n]*)+)
    |(?P<name>[A-Za-z0-9_-]+)
    |(?P<is>::=)
    |(?P<text>"(?:[^"\\]|\\.)*")
    |(?P<class>\[\^?(?:[^]\\]|\\.)*\])
    |(?P<repeat>[*+?]|\{\s*[0-9]{1,9}\s*(?:,\s*[0-9]{0,9}\s*)?\})
    |(?P<mark>[()|.])""",
    re.VERBOSE | re.DOTALL,
)
_RULE = re.compile(r"^[ \t]*[A-Za-z0-9_-]+[ \t]*::=", re.MULTILINE)
_ESCAPES = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))|(.)", re.DOTALL
)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t"}
_THEMSELVES = frozenset('"\\[]-^/')
_UNSERVED = {"<": "tokens by name or id (`<...>`)", "!": "tokens that must not come (`!<...>`)"}


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    at: int  # characters from the start


def looks_like_gbnf(text: str) -> bool:
    """Return whether a grammar defines rules with `::=`, as GBNF does and Lark (`:`) does not."""
    return _RULE.search(text) is not None


def parse(text: str) -> dict[str, Node]:
    """Return a grammar's rules by name. Raises ValidationError with line and column.

    Every `Reference` names one of them, and `root` is among them.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValidationError(
            f"grammar is not valid: it has {len(text)} characters, {MOST_CHARACTERS} are allowed"
        )
    return _GbnfParser(text).rules()


class _GbnfParser:
    """A recursive-descent parser; only groups recurse."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = [token for token in _tokens(text) if token.kind != "space"]
        self._end = _Token("end", "", len(text))
        self._place = 0
        self._depth = 0
        self._used: dict[str, _Token] = {}  # rule -> its first reference

    def rules(self) -> dict[str, Node]:
        rules: dict[str, Node] = {}
        while (name := self._next()).kind != "end":
            if name.kind != "name" or self._next().kind != "is":
                raise _syntax_error(self._text, name.at, "a rule begins with `name ::=`")
            if name.text in rules:
                raise _syntax_error(self._text, name.at, f"the rule `{name.text}` is there already")
            rules[name.text] = self._choice()
        if ROOT not in rules:
            raise _syntax_error(self._text, 0, f"there is no rule `{ROOT}`")
        for missing in self._used.keys() - rules.keys():
            at = self._used[missing].at
            raise _syntax_error(self._text, at, f"there is no rule `{missing}`")
        return rules

    def _peek(self, ahead: int = 0) -> _Token:
        place = self._place + ahead
        return self._tokens[place] if place < len(self._tokens) else self._end

    def _next(self) -> _Token:
        token = self._peek()
        self._place += 1
        return token

    def _choice(self) -> Node:
        parts = [self._series()]
        while self._peek().text == "|":
            self._next()
            parts.append(self._series())
        return parts[0] if len(parts) == 1 else Alternation(tuple(parts))

    def _series(self) -> Node:
        parts: list[Node] = []
        while (part := self._item()) is not None:
            if self._peek().kind == "repeat":
                part = self._repeat(part, self._next())
            parts.append(part)
        return parts[0] if len(parts) == 1 else Series(tuple(parts))

    def _item(self) -> Node | None:
        """Return the next part of a series; None at its end."""
        token = self._peek()
        if token.text in ("|", ")") or token.kind == "end":
            if token.text == ")" and not self._depth:
                raise _syntax_error(self._text, token.at, "this `)` closes nothing")
            return None
        if token.kind == "name" and self._peek(1).kind == "is":  # the next rule
            return None
        self._next()
        match token.kind:
            case "name":
                self._used.setdefault(token.text, token)
                return Reference(token.text)
            case "text":
                return Literal("".join(map(chr, self._codes(token.text[1:-1], token.at + 1))))
            case "class":
                return self._class(token)
            case "repeat":
                raise _syntax_error(self._text, token.at, f"`{token.text}` has nothing to repeat")
            case "is":
                raise _syntax_error(self._text, token.at, "no name comes before `::=`")
        return ANY if token.text == "." else self._group(token)

    def _group(self, opening: _Token) -> Node:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise _syntax_error(
                self._text, opening.at, f"more than {_DEEPEST} groups in one another"
            )
        inner = self._choice()
        if self._next().text != ")":
            raise _syntax_error(self._text, opening.at, "this `(` is never closed")
        self._depth -= 1
        return inner

    def _repeat(self, part: Node, token: _Token) -> Node:
        if token.text in "*+?":
            return Repeat(part, int(token.text == "+"), 1 if token.text == "?" else None)
        least, comma, most = token.text[1:-1].replace(" ", "").partition(",")
        fewest, largest = int(least), int(most) if most.strip() else None
        if not comma:
            largest = fewest
        if largest is not None and largest < fewest:
            raise _syntax_error(self._text, token.at, f"`{token.text}` can never be met")
        return Series(()) if largest == 0 else Repeat(part, fewest, largest)

    def _class(self, token: _Token) -> Characters:
        negated = token.text.startswith("[^")
        start = 2 if negated else 1
        codes = list(self._codes(token.text[start:-1], token.at + start, dashes=True))
        ranges: list[tuple[int, int]] = []
        i = 0
        while i < len(codes):
            low = high = abs(codes[i])
            if codes[i + 1 : i + 2] == [_DASH] and i + 2 < len(codes):
                high = abs(codes[i + 2])
                i += 2
            if high < low:
                raise _syntax_error(
                    self._text, token.at, f"a range of `{token.text}` is upside down"
                )
            ranges.append((low, high))
            i += 1
        if not ranges and not negated:
            raise _syntax_error(self._text, token.at, "`[]` holds no character")
        return Characters(tuple(ranges), negated)

    def _codes(self, body: str, at: int, dashes: bool = False) -> Iterator[int]:
        """Yield the code points of a text or class; if `dashes`, bare dashes as `_DASH`."""
        for found in _ESCAPES.finditer(body):
            *numbers, letter, plain = found.groups()
            where = at + found.start()
            if plain is not None:
                yield _DASH if dashes and plain == "-" else ord(plain)
            elif letter is not None:
                if letter not in _LETTERS and letter not in _THEMSELVES:
                    raise _syntax_error(self._text, where, f"`\\{letter}` is no escape sequence")
                yield ord(_LETTERS.get(letter, letter))
            else:
                code = int(next(filter(None, numbers)), 16)
                if code > _LARGEST or 0xD800 <= code <= 0xDFFF:
                    raise _syntax_error(self._text, where, f"`{found.group()}` is no character")
                yield code


_DASH = -ord("-")  # a dash that may separate the ends of a range


def _tokens(text: str) -> Iterator[_Token]:
    """Yield the tokens. Raises ValidationError."""
    at = 0
    while at < len(text):
        found = _TOKENS.match(text, at)
        if found is None:
            raise _syntax_error(text, at, _unexpected(text[at]))
        yield _Token(found.lastgroup or "", found.group(), at)
        at = found.end()


def _unexpected(character: str) -> str:
    if character in _UNSERVED:
        return f"{_UNSERVED[character]} are not served"
    if character in '"[':
        return f"this `{character}` is never closed"
    return f"unexpected `{character}`"


def _syntax_error(text: str, at: int, what: str) -> ValidationError:
    line = text.count("\n", 0, at) + 1
    column = at - (text.rfind("\n", 0, at) + 1) + 1
    return ValidationError(f"grammar is not valid: line {line}, column {column}: {what}")
