"""One family's call format, as a row of literal texts.

A model calls best in the format that it was trained on, and its chat template shows that. An answer
is

    prose  trigger  opening  name  middle  arguments  (next  name  middle  arguments)*  closing

where everything but prose, names and arguments is literal text of the format, with holes for what a
model fills in, such as a call's number. After the trigger the grammar allows nothing else, so one
row says both how calls are forced and how they are parsed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tgi_trio.router.text.tools.arguments_json import JSON
from tgi_trio.router.text.tools.functions import Function
from tgi_trio.router.text.tools.matching import HOLES, ID, INDEX

_HOLE = re.compile(f"[{''.join(HOLES)}]")

# What a family's templates accept as the id of a call: anything, nine letters and digits, or the
# name of the function and the number of the call in the conversation. `ids.py` makes them.
Ids = Literal["any", "nine", "counted"]


class ArgumentsReader(Protocol):
    """Converts the arguments of one call to JSON as they arrive."""

    ended: bool
    rest: str  # the text after them, once they have ended

    def push(self, text: str) -> str:
        """Take more text; return the JSON that it makes certain."""
        ...


class Arguments(Protocol):
    """How a format writes arguments."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Return its literal texts."""
        ...

    def write(self, arguments: Any) -> str:
        """Return arguments, a JSON value, as a model would write them; text is left unchanged."""
        ...

    def rules(self, name: str, function: Function, added: Mapping[str, int]) -> dict[str, str]:
        """Return Lark rules (name -> right side) for a function's arguments; `name` is the top one.

        `added`: text -> id of the tokenizer's added tokens. Raises ValidationError.
        """
        ...

    def reader(self, function: Function | None) -> ArgumentsReader:
        """Return a reader for the arguments of one call; None: of an unknown function."""
        ...


@dataclass(frozen=True, slots=True)
class Format:
    """One family's call format."""

    name: str
    families: str  # for display
    signs: tuple[str, ...]  # all of them are in a template of this family
    trigger: str  # ends the prose and begins the calls
    opening: str  # between the trigger and the first name
    middle: str  # between a name and its arguments
    next: str  # between arguments and the next name; "": one call at most
    closing: str  # after the last arguments
    anchored: bool = False  # the trigger counts only at the beginning of an answer
    arguments: Arguments = JSON
    token: str = ""  # an added token that shows the format, where templates do not
    short_middle: str | None = None  # what some answers have instead of `middle`
    first: int = 0  # the number of the first call, where calls are numbered
    ids: Ids = "any"
    channels: tuple[str, ...] = ()  # marks of messages, where answers consist of messages
    # Variants of the same family, in white space or words. The first of the row and its variants
    # that writes the same as the template is used.
    variants: tuple[Format, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """Return every literal text, in the order of an answer."""
        short = () if self.short_middle is None else (self.short_middle,)
        return (
            *(self.trigger, self.opening, self.middle, *short),
            *(*self.arguments.texts, self.next, self.closing, *self.channels),
        )

    @property
    def beginning(self) -> str:
        """Return the text that begins an answer's calls, up to the first name or hole."""
        return self.trigger + _cut(self.opening)

    def introduce(self, name: str) -> str:
        """Return what follows `beginning` if a function of this name is called."""
        return "" if _cut(self.opening) != self.opening else name + _cut(self.middle)

    def write(self, calls: Iterable[tuple[str, Any]], ids: Iterable[str] = ()) -> str:
        """Return calls as the model would write them.

        `calls`: at least one pair of name and arguments; arguments are a JSON value, or text that
        is used unchanged. `ids`: of the calls, for formats that write them. If the format has one
        call at most, several are joined without a separator.
        """
        known = list(ids)
        parts = [self.trigger]
        for i, (name, arguments) in enumerate(calls):
            id = known[i] if i < len(known) else f"{i:09}"
            for text in (self.next if i else self.opening, name, self.middle):
                parts.append(text.replace(INDEX, str(self.first + i)).replace(ID, id))
            parts.append(self.arguments.write(arguments))
        return "".join([*parts, self.closing])

    def fits(self, template: str, tokens: Iterable[str] = ()) -> bool:
        """Return whether a template, or the tokenizer's added tokens, show this format."""
        if self.signs and all(sign in template for sign in self.signs):
            return True
        return bool(self.token) and self.token in tokens


def _cut(text: str) -> str:
    """Return a text up to its first hole."""
    return _HOLE.split(text, maxsplit=1)[0]


def show_text(text: str) -> str:
    """Return a text of a format for display, with names for its holes."""
    for hole, name in zip(HOLES, ("N", "ID", "TYPE"), strict=True):
        text = text.replace(hole, f"{{{name}}}")
    return text
