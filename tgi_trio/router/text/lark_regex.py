"""Converts a Lark grammar without recursion to one regular expression.

A grammar without recursion is regular, so it can constrain text wherever an expression can: in a
JSON string, between two tags, and wherever else a family writes texts. The result matches what the
rules derive. Lark's lexer, which takes the longest terminal, matches that or less.

Source of the syntax: lark-parser's docs/grammar.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import orjson

from tgi_trio.errors import ValidationError

_FLOAT: Final = r"(?:[0-9]+(?:\.[0-9]*)?[eE][+-]?[0-9]+|[0-9]+\.[0-9]*|\.[0-9]+)"
_NUMBER: Final = r"(?:[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?)"
# What `%import common.NAME` imports, as in lark-parser.
_COMMON: Final[Mapping[str, str]] = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[a-fA-F0-9]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"(?:[0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": f"[+-]?{_FLOAT}",
    "NUMBER": _NUMBER,
    "SIGNED_NUMBER": f"[+-]?{_NUMBER}",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z0-9_]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
}
_TOKEN: Final = re.compile(
    r"""
    (?P<space>[ \t\r]+ | \\\n | (?://|\#)[^\n]*)
  | (?P<line>\n[ \t\r\n]*)
  | (?P<string>"(?:[^"\\\n]|\\.)*"i?)
  | (?P<regex>/(?:[^/\\\n]|\\.)+/[imslux]*)
  | (?P<directive>%[a-z]+)
  | (?P<name>(?:[?!]{1,2}(?=_?[a-z]))?[A-Za-z_][A-Za-z0-9_]*)
  | (?P<number>[0-9]+)
  | (?P<sign>->|\.\.|[:|()\[\]*+?~.,{}])
    """,
    re.VERBOSE,
)
_FLAGS: Final = "ims"
_DEEPEST: Final = 60  # nested names and brackets
_ESCAPES: Final[Mapping[str, str]] = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    at: int  # its position in the text


def lark_regex(text: str, most: int) -> str:
    """Return an expression, of at most `most` characters, for the texts that a grammar derives.

    Raises ValidationError for text that is not a grammar, and for recursion, `%ignore` and
    templates.
    """
    return _Expander(_Reader(text).read(), most).expand("start")


def _refuse(text: str, at: int, what: str) -> ValidationError:
    line = text.count("\n", 0, at) + 1
    return ValidationError(f"grammar is not valid: line {line}: {what}")


class _Reader:
    """Parses a grammar: name -> tokens of its right side, or an expression for imported names."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(_tokens(text))
        self._rules: dict[str, list[_Token] | str] = {}

    def read(self) -> dict[str, list[_Token] | str]:
        for statement in self._statements():
            first = statement[0]
            if first.kind == "directive":
                self._take_directive(statement)
            elif first.kind == "name":
                self._take_rule(statement)
            else:
                raise _refuse(self._text, first.at, f"unexpected `{first.text}`")
        return self._rules

    def _statements(self) -> Iterator[list[_Token]]:
        """Yield the tokens of each statement; a line that begins with `|` continues the last."""
        statement: list[_Token] = []
        depth = 0
        for i, token in enumerate(self._tokens):
            if token.kind != "line":
                depth += (token.text in ("(", "[")) - (token.text in (")", "]"))
                statement.append(token)
                continue
            following = self._tokens[i + 1].text if i + 1 < len(self._tokens) else ""
            if statement and depth <= 0 and following != "|":
                yield statement
                statement, depth = [], 0
        if statement:
            yield statement

    def _take_rule(self, statement: list[_Token]) -> None:
        first, *rest = statement
        if len(rest) > 2 and rest[0].text == "." and rest[1].kind == "number":  # a priority
            rest = rest[2:]
        if not rest or rest[0].text != ":":
            what = f"`{first.text}` needs `:` and what it stands for"
            if rest and rest[0].text == "{":
                what = "templates are not supported"
            raise _refuse(self._text, first.at, what)
        name = first.text.lstrip("?!")
        if name in self._rules:
            raise _refuse(self._text, first.at, f"`{name}` is there twice")
        self._rules[name] = rest[1:]

    def _take_directive(self, statement: list[_Token]) -> None:
        first, *rest = statement
        if first.text != "%import":
            what = f"`{first.text}` is not supported: `%import common.NAME` is"
            raise _refuse(self._text, first.at, what)
        words = [token.text for token in rest]
        if words[:2] == ["common", "("] and words[-1:] == [")"]:
            pairs = [(name, name) for name in words[2:-1] if name != ","]
        elif words[:2] == ["common", "."] and len(words) in (3, 5) and words[3:4] != ["."]:
            pairs = [(words[2], words[-1])]
        else:
            raise _refuse(self._text, first.at, "only names of `common` can be imported")
        for name, known_as in pairs:
            if name not in _COMMON:
                there = ", ".join(_COMMON)
                raise _refuse(self._text, first.at, f"`common` has no `{name}`: it has {there}")
            self._rules[known_as] = _COMMON[name]


class _Expander:
    """Expands names to the expressions for which they stand."""

    def __init__(self, rules: Mapping[str, list[_Token] | str], most: int) -> None:
        self._rules = rules
        self._most = most
        self._done: dict[str, str] = {}
        self._open: list[str] = []  # names that are being expanded
        self._depth = 0

    def expand(self, name: str) -> str:
        """Return the expression for a name. Raises ValidationError."""
        if name in self._done:
            return self._done[name]
        if name in self._open:
            way = " -> ".join([*self._open[self._open.index(name) :], name])
            raise ValidationError(
                f"grammar is not valid: `{name}` refers to itself ({way}), and recursion is not "
                "supported here"
            )
        right = self._rules.get(name)
        if right is None:
            raise ValidationError(f"grammar is not valid: `{name}` is not defined")
        self._open.append(name)
        with self.within():
            found = right if isinstance(right, str) else _Rule(self, right).read()
        self._open.pop()
        self._done[name] = found
        return found

    @contextmanager
    def within(self) -> Iterator[None]:
        """Count nested names and brackets."""
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ValidationError("grammar is not valid: it nests too deeply")
        yield
        self._depth -= 1

    def check_size(self, characters: int) -> None:
        """Raise ValidationError for more characters than allowed."""
        if characters > self._most:
            raise ValidationError(
                f"grammar is not valid: `{self._open[-1]}`, written out, has more than "
                f"{self._most} characters (--max-grammar-bytes)"
            )


class _Rule:
    """Parses the right side of one rule."""

    def __init__(self, names: _Expander, tokens: list[_Token]) -> None:
        self._names = names
        self._tokens = [token for token in tokens if token.kind != "line"]
        self._at = 0

    def read(self) -> str:
        found = self._choice()
        if (token := self._peek()) is not None:
            raise ValidationError(f"grammar is not valid: unexpected `{token.text}`")
        return found

    def _peek(self) -> _Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _take(self, *texts: str) -> str:
        """Return the next token's text and skip it, if it is one of these; else ""."""
        token = self._peek()
        if token is None or token.kind != "sign" or token.text not in texts:
            return ""
        self._at += 1
        return token.text

    def _choice(self) -> str:
        alternatives = [self._series()]
        while self._take("|"):
            alternatives.append(self._series())
        return alternatives[0] if len(alternatives) == 1 else f"(?:{'|'.join(alternatives)})"

    def _series(self) -> str:
        items, size = [], 0
        while (token := self._peek()) is not None and token.text not in ("|", ")", "]", "->"):
            items.append(self._item())
            size += len(items[-1])
            self._names.check_size(size)
        if self._take("->"):
            self._at += 1  # an alias, which only names a tree's node
        return "".join(items)

    def _item(self) -> str:
        one = self._atom()
        if sign := self._take("*", "+", "?"):
            return f"(?:{one}){sign}"
        if self._take("~"):
            least = self._number()
            return f"(?:{one}){{{least},{self._number() if self._take('..') else least}}}"
        return one

    def _number(self) -> int:
        token = self._peek()
        if token is None or token.kind != "number":
            raise ValidationError("grammar is not valid: a number must follow `~` and `..`")
        self._at += 1
        return int(token.text.lstrip("0")[:9] or 0)  # what has more digits is refused all the same

    def _atom(self) -> str:
        for opening, closing, behind in (("(", ")", ""), ("[", "]", "?")):
            if self._take(opening):
                with self._names.within():
                    inner = self._choice()
                if not self._take(closing):
                    raise ValidationError(f"grammar is not valid: `{closing}` is missing")
                return f"(?:{inner}){behind}"
        token = self._peek()
        assert token is not None  # `_series` has checked
        self._at += 1
        match token.kind:
            case "string":
                if self._take(".."):
                    return self._range(token)
                return _literal(token.text)
            case "regex":
                return _expression(token.text)
            case "name":
                return self._names.expand(token.text)
        raise ValidationError(f"grammar is not valid: unexpected `{token.text}`")

    def _range(self, first: _Token) -> str:
        last = self._peek()
        ends = [_unquote(first.text), "" if last is None else _unquote(last.text)]
        if any(len(end) != 1 for end in ends) or ends[0] > ends[1]:
            raise ValidationError(
                'grammar is not valid: a range goes from one character to another, as "a".."z"'
            )
        self._at += 1
        return "[" + "-".join(map(_escape, ends)) + "]"


def _tokens(text: str) -> Iterator[_Token]:
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise _refuse(text, at, f"unexpected `{text[at]}`")
        if found.lastgroup != "space":
            yield _Token(str(found.lastgroup), found[0], at)
        at = found.end()


def _unquote(text: str) -> str:
    """Return the value of a quoted string; "" if it is not one."""
    try:
        value = orjson.loads(text)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""


def _escape(text: str) -> str:
    return "".join(_ESCAPES.get(each) or re.escape(each) for each in text)


def _literal(text: str) -> str:
    quoted = text.removesuffix("i") if text.endswith('"i') else text
    value = _unquote(quoted)
    if not value and quoted != '""':
        raise ValidationError(f"grammar is not valid: {quoted} is no string")
    escaped = _escape(value)
    return f"(?i:{escaped})" if quoted != text else escaped


def _expression(text: str) -> str:
    """Return the expression between two slashes, with its flags."""
    end = text.rindex("/")
    inner, flags = text[1:end].replace("\\/", "/"), text[end + 1 :]
    if "x" in flags:
        raise ValidationError("grammar is not valid: the flag `x` is not supported")
    kept = "".join(sorted(set(flags) & set(_FLAGS)))
    return f"(?{kept}:{inner})"
