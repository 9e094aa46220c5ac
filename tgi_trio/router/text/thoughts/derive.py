"""Derives the marks around a model's thoughts, so that no flag is needed.

From these sources, in this order: `response_template` of tokenizer_config.json, what the template
renders around a thought of an earlier turn, known marks that are both in the template's text, and
known marks that are both added tokens. Always two marks, since an end mark alone gives false
positives. Pure: a template, a configuration and texts in, marks out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from tgi_trio.errors import TemplateError
from tgi_trio.router.text.chat_template import ChatTemplate
from tgi_trio.router.text.thoughts.marks import ANSWERS, KNOWN, Marks


@dataclass(frozen=True, slots=True)
class Thoughts:
    """How a model thinks, as far as its answers and prompts show."""

    marks: Marks
    header: str  # what a prompt has before each of the model's messages; "" if nothing was found
    source: str  # where the marks were found
    parts: bool = False  # templates take earlier ones as parts of the content, not as a field

    def describe(self) -> dict[str, str]:
        """Return what /info shows."""
        return {"start": self.marks.start, "end": self.marks.end, "source": self.source}


@dataclass(frozen=True, slots=True)
class ThoughtSettings:
    """The setting `--reasoning`: derive the marks, separate no thoughts, or given marks."""

    read: bool = True
    given: Marks | None = None

    @classmethod
    def parse(cls, text: str) -> ThoughtSettings:
        """Return the setting for `auto`, `none` or `START,END`. Raises ValueError."""
        if text in ("auto", "none"):
            return cls(read=text == "auto")
        start, comma, end = (part.strip() for part in text.partition(","))
        if not (start and comma and end) or "," in end or start == end:
            raise ValueError(
                "auto, none, or two marks as START,END: what begins a thought and what ends it, "
                "such as <think>,</think>"
            )
        return cls(given=_known_or(start, end))


def derive_thoughts(
    template: ChatTemplate,
    response_template: Mapping[str, Any] | None,
    added: Collection[str],
    settings: ThoughtSettings = ThoughtSettings(),
) -> Thoughts | None:
    """Return how the model of `template` thinks; None if no source says that it does.

    `added`: the texts of the tokenizer's added tokens.
    """
    if not settings.read:
        return None
    source = template.source() + template.source(tools=True)
    sources: tuple[tuple[str, Callable[[], Marks | None]], ...] = (
        ("--reasoning", lambda: settings.given),
        ("response_template", lambda: _in_response_template(response_template)),
        ("rendered thought", lambda: _in_rendered_thought(template)),
        ("template", lambda: _among(lambda mark: mark in source)),
        ("added tokens", lambda: _among(lambda mark: mark in added)),
    )
    for name, find in sources:
        marks = find()
        if marks is not None:
            marks = _with_answer(marks, source)
            return Thoughts(marks, _find_header(template, marks), name, _takes_parts(template))
    return None


def _known_or(start: str, end: str) -> Marks:
    """Return the row of `KNOWN` for two marks, or a new one."""
    for marks in KNOWN:
        if (marks.start, marks.end) == (start, end):
            return marks
    return Marks(start, end)


def _among(present: Callable[[str], bool]) -> Marks | None:
    """Return the first row of `KNOWN` whose marks are both `present`."""
    return next((each for each in KNOWN if present(each.start) and present(each.end)), None)


def _with_answer(marks: Marks, source: str) -> Marks:
    """Add the marks around the answer, if the template contains them."""
    if not marks.opening:
        for opening, closing in ANSWERS:
            if opening in source and closing in source:
                return replace(marks, opening=opening, closing=closing)
    return marks


# ---- response_template -------------------------------------------------------------------------


def _in_response_template(spec: Mapping[str, Any] | None) -> Marks | None:
    fields = spec.get("fields") if isinstance(spec, Mapping) else None
    if not isinstance(fields, Mapping):
        return None
    for name in ("thinking", "reasoning_content", "reasoning"):
        field = fields.get(name)
        if isinstance(field, Mapping):
            start, end = (_literal(field, side) for side in ("open", "close"))
            if start and end:
                return _known_or(start, end)
    return None


def _literal(field: Mapping[str, Any], side: str) -> str:
    """Return the mark of one side; "" if it is not a literal text."""
    given = field.get(side, field.get(f"{side}_pattern"))
    if isinstance(given, list):
        given = given[0] if given else None
    if not isinstance(given, str):
        return ""
    pattern = side not in field
    text = given.removeprefix("\\s*").removesuffix("\\s*") if pattern else given
    text = text.replace("\\n", "\n") if pattern else text
    return "" if pattern and any(each in text for each in "\\^$.*+?()") else text.strip()


# ---- probes ------------------------------------------------------------------------------------

_THOUGHT = "qzThoughtqz"  # a word that occurs in no template
_QUESTION, _ANSWER = "qzQuestionqz", "qzAnswerqz"
_CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "f", "arguments": {"x": "y"}}}
_FIELD = {"reasoning_content": _THOUGHT}
_PART: Mapping[str, Any] = {
    "content": [{"type": "thinking", "thinking": _THOUGHT}, {"type": "text", "text": _ANSWER}]
}
_AS_IS: Any = {}
_ON: Any = {"enable_thinking": True, "thinking": True, "drop_thinking": False}


def _in_rendered_thought(template: ChatTemplate) -> Marks | None:
    """Return the known marks that the template renders around a thought of an earlier turn."""
    for text in _render_thoughts(template, (_FIELD, _PART)):
        before, found, behind = text.partition(_THOUGHT)
        before, behind = before.rstrip(), behind.lstrip()
        for marks in KNOWN if found else ():
            if before.endswith(marks.start) and behind.startswith(marks.end):
                return marks
    return None


def _takes_parts(template: ChatTemplate) -> bool:
    """Return whether the template renders thoughts only if they are parts of the content."""
    fields, parts = (
        any(_THOUGHT in text for text in _render_thoughts(template, [form]))
        for form in (_FIELD, _PART)
    )
    return parts and not fields


def _render_thoughts(template: ChatTemplate, forms: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    """Yield chats with a thought in each of `ways`, as the template renders them."""
    question = {"role": "user", "content": _QUESTION}
    result = {"role": "tool", "tool_call_id": _CALL["id"], "name": "f", "content": "z"}
    for variables, form in itertools.product((_AS_IS, _ON), forms):
        spoken = {"role": "assistant", "content": "", **form}
        for chat in (
            [question, {**spoken, "tool_calls": [_CALL]}, result],
            [question, {**spoken, "content": spoken["content"] or _ANSWER}],
        ):
            with suppress(TemplateError):
                yield template.render(chat, add_generation_prompt=False, **variables)


def _find_header(template: ChatTemplate, marks: Marks) -> str:
    """Return what the template renders before each of the model's messages, without thoughts.

    That is the generation prompt; without one, what is between a question and its answer. "" if
    neither can be rendered.
    """
    question = [{"role": "user", "content": _QUESTION}]
    answered = [*question, {"role": "assistant", "content": _ANSWER}]
    with suppress(TemplateError):
        bare = template.render(question, add_generation_prompt=False)
        prompted = template.render(question)
        if prompted != bare and prompted.startswith(bare):
            return _before_marks(prompted[len(bare) :], marks)
    with suppress(TemplateError):
        text = template.render(answered, add_generation_prompt=False)
        between = text.partition(_QUESTION)[2].partition(_ANSWER)[0]
        return _before_marks(between, marks)
    return ""


def _before_marks(text: str, marks: Marks) -> str:
    places = [text.find(mark) for mark in (marks.start, marks.end) if mark in text]
    # White space after a header may be missing where the model's message is continued.
    return text[: min(places, default=len(text))].strip()
