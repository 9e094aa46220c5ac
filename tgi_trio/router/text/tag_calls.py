"""Where calls of tools begin in a structural tag that a chat has beside its tools.

Free text at the end of an answer may go over into calls, in the model's own form; a form without
such text is the whole answer, or calls are. Nothing else may hold the text that begins calls, since
it would be read as one. Where a tag itself speaks of that text, the tag alone says what follows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tgi_trio.router.text import grammars
from tgi_trio.router.text.tag_terms import is_open
from tgi_trio.router.text.tools.format import Format
from tgi_trio.router.text.tools.terms import spell_json, write_terms

CALLS: Final = "tool_calls"  # name of the grammar of what follows the trigger


@dataclass(frozen=True, slots=True)
class CallPlace:
    """How the model's calls begin."""

    trigger: str | None  # None: in no text of an answer
    anchored: bool = False  # only at the beginning of an answer
    never: tuple[str, ...] = ()  # texts that free text does not hold

    @classmethod
    def of(cls, form: Format) -> CallPlace:
        """Return that of a family's format."""
        if form.channels:  # an answer is on one of them, and does not begin another
            return cls(None, never=form.channels)
        return cls(form.trigger, form.anchored)

    def kept_out(self, *, last: bool) -> tuple[str, ...]:
        """Return what free text does not hold; `last`: the answer may end with it."""
        if self.trigger is None or (last and not self.anchored):
            return self.never
        return (*self.never, self.trigger)

    def begin(self, form: str, root: Any, added: Mapping[str, int]) -> str:
        """Return terms for an answer that is of a form, or calls from its beginning on.

        `form`: terms; `root`: the format that they were made of; `added`: text -> id of the
        tokenizer's added tokens.
        """
        if self.trigger is None:
            return form
        if not self.anchored:
            if ends_open(root):
                return form  # which calls are a part of
            return f"{form} | {write_terms(self.trigger, added)} @{CALLS}"
        if ends_open(root):  # its text does not hold the trigger, which is one terminal
            return f"{form} | {grammars.literal(self.trigger)} @{CALLS}"
        return f"{form} | {spell_json(self.trigger)} @{CALLS}"

    def is_spoken_of(self, given: Any) -> bool:
        """Whether a structural tag says itself what follows the text that begins calls."""
        trigger = self.trigger
        return trigger is not None and any(
            trigger in text or (searched and bool(text) and text in trigger)
            for text, searched in _texts(given)
        )


def ends_open(given: Any) -> bool:
    """Return whether a format, the last of an answer, can end with free text."""
    if not isinstance(given, Mapping):
        return False
    match given.get("type"), given.get("elements"):
        case "sequence", [*_, last]:
            return ends_open(last)
        case "or", [*all]:
            return any(map(ends_open, all))
    if given.get("type") == "tag" and given.get("end") in ("", [""]):
        return ends_open(given.get("content"))
    return is_open(given)


def _texts(given: Any) -> Iterator[tuple[str, bool]]:
    """Yield the texts that a tag writes, and whether they are searched for in free text."""
    if isinstance(given, list):
        for each in given:
            yield from _texts(each)
    if not isinstance(given, Mapping):
        return
    for name, value in given.items():
        match name, value:
            case "begin" | "value", str():
                yield value, False
            case "triggers", [*texts]:
                yield from ((each, True) for each in texts if isinstance(each, str))
            case "rules", [*rules]:
                pairs = [each for each in rules if isinstance(each, list) and len(each) == 2]
                yield from ((each, True) for each, _ in pairs if isinstance(each, str))
                yield from _texts([form for _, form in pairs])
            case "content" | "elements" | "tags", _:
                yield from _texts(value)
