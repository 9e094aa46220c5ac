"""What a structural tag of a chat leaves to others: where calls of tools begin, and thoughts.

Free text at the end of an answer may go over into calls, in the model's own form; a form without
such text is the whole answer, or calls are. Nothing else may hold the text that begins calls, since
it would be read as one. Where a tag itself speaks of that text, the tag alone says what follows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
    def of(cls, form: Format, *, called: bool = True, thought: str = "") -> CallPlace:
        """Return that of a family's format.

        `called`: whether there are tools; `thought`: what begins a thought, "" if nothing does.
        """
        if form.channels:  # an answer is on one of them, and does not begin another
            return cls(None, never=form.channels)
        never = (thought,) if thought else ()
        return cls(form.trigger if called else None, form.anchored, never)

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

    def beside(self, root: Any) -> CallPlace:
        """Return it without the texts of which a tag, whose format is `root`, speaks itself."""
        told = list(_texts(root))
        trigger = self.trigger if self.trigger and not _is_told(self.trigger, told) else None
        never = tuple(text for text in self.never if not _is_told(text, told))
        return CallPlace(trigger, self.anchored, never)


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


def _is_told(text: str, told: Iterable[tuple[str, bool]]) -> bool:
    """Return whether texts, as `_texts` yields them, say what follows a text."""
    return any(text in each or (searched and each and each in text) for each, searched in told)


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
