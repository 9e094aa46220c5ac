"""Harmony: answers of several messages, each on a channel that says what it is.

Thoughts are on `analysis`, content for the client is on `final`, and what the model says before a
call on `commentary`. A message to a function is a call, whatever channel it is on, and wherever in
its header the recipient is named.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from tgi_trio.router.delta import CallDelta, Delta
from tgi_trio.router.text import grammars
from tgi_trio.router.text.tools.arguments_json import JsonReader
from tgi_trio.router.text.tools.formats_harmony import MARKS
from tgi_trio.router.text.tools.functions import ToolUse
from tgi_trio.router.text.tools.terms import escape_regex, write_terms

_START, _CHANNEL, _CONSTRAIN, _MESSAGE, _END, _CALL, _RETURN = MARKS
_FUNCTIONS = "functions."
_NO_MARK = f" & ~/(?s:.*)({'|'.join(map(escape_regex, MARKS))})(?s:.*)/"

# ---- writing rules ------------------------------------------------------------------------------


Begun = Literal["thought", "answer"] | None  # kind of the message that the prompt has begun


@dataclass(frozen=True, slots=True)
class ChannelRules:
    """The rules of an answer on channels, and the grammars to which they refer."""

    rules: dict[str, str]
    subs: list[dict[str, str]]


def channel_rules(
    use: ToolUse | None,
    added: Mapping[str, int],
    *,
    begun: Begun = None,
    budget: int | None = None,
    final: str | None = None,
) -> ChannelRules:
    """Return the rules of an answer that may, or must, call; `start` matches all of it.

    `use`: None if nothing may be called. `added`: text -> id of the tokenizer's added tokens.
    `begun`: kind of the message that the prompt has begun. `budget`: most tokens of thoughts; None:
    no limit. `final`: a term that an answer without calls must match, and then nothing but thoughts
    precedes it; None: any text. Raises ValidationError for a schema that has no grammar.
    """
    return _Writer(use, added, budget, final).write(begun)


class _Writer:
    """Writes the rules for one answer."""

    def __init__(
        self, use: ToolUse | None, added: Mapping[str, int], budget: int | None, final: str | None
    ) -> None:
        self._use = use
        self._added = {mark: added[mark] for mark in MARKS if mark in added}
        self._terms = {mark: write_terms(mark, self._added) for mark in MARKS}
        self._budget = budget
        self._final = final
        self._rules: dict[str, str] = {}
        self._subs: list[dict[str, str]] = []

    def write(self, begun: Begun) -> ChannelRules:
        rules = self._rules
        may_answer = self._use is None or not self._use.required
        rules["start"] = ""  # reserves the first place
        rules["TEXT"] = f"/(?s:.+)/{_NO_MARK}"
        end = self._added.get(_RETURN)
        final_text = f"{self._final or 'TEXT?'}{'' if end is None else f' <[{end}]>?'}"
        rules["final"] = f'{self._terms[_CHANNEL]} "final" {self._terms[_MESSAGE]} {final_text}'
        self._write_body()
        self._write_thought()
        if self._use is not None:
            self._write_calls(self._use)
        if begun == "thought":
            rules["start"] = f"thought {self._next(self._budget is None, may_answer)}"
        elif begun == "answer" and may_answer:
            rules["start"] = final_text
        elif begun == "answer":
            rules["start"] = f"body {self._next(True, False)}"
        else:
            rules["start"] = self._item(True, may_answer)
        return ChannelRules(rules, self._subs)

    def _item(self, may_think: bool, may_answer: bool) -> str:
        """Return the name of the rule for a message and all that follow it."""
        name = f"item{'_thought' if may_think else ''}{'_answer' if may_answer else ''}"
        if name in self._rules:
            return name
        self._rules[name] = ""
        channel, message = self._terms[_CHANNEL], self._terms[_MESSAGE]
        alternatives = ["final"] if may_answer else []
        if may_think:
            then = self._next(self._budget is None, may_answer)
            alternatives.append(f'{channel} "analysis" {message} thought {then}')
        if self._use is not None:
            alternatives.append("call")
        if self._use is not None or self._final is None:
            # Text before a call. An answer that must match `final` cannot begin with it.
            then = self._next(may_think, may_answer and self._final is None)
            alternatives.append(f'{channel} "commentary" {message} body {then}')
        self._rules[name] = " | ".join(alternatives)
        return name

    def _next(self, may_think: bool, may_answer: bool) -> str:
        return f'{self._terms[_START]} "assistant" {self._item(may_think, may_answer)}'

    def _write_body(self) -> None:
        """Write the rule for a message's text and its end."""
        end = self._added.get(_END)
        if end is None:
            self._rules["SPELLED"] = f"/(?s:.*)/{_NO_MARK}"
            self._rules["body"] = "ENDED"
            self._rules["ENDED"] = f"SPELLED {grammars.literal(_END)}"
        else:
            self._rules["body"] = f"TEXT? <[{end}]>"

    def _write_thought(self) -> None:
        rules, budget, end = self._rules, self._budget, self._added.get(_END)
        if budget is None:
            rules["thought"] = "body"
        elif budget == 0:
            rules["thought"] = self._terms[_END]
        elif end is None:
            # A terminal cannot give back text that turns out to begin the mark, and one that the
            # budget ends looks like one that the mark has ended. So the mark's first character is
            # excluded.
            rules[f"bounded[max_tokens={budget}]"] = "UNSIGNED"
            rules["UNSIGNED"] = f"/[^{_END[0]}]*/"
            rules["thought"] = f"bounded {grammars.literal(_END)}"
        else:
            # What precedes a grammar that is referred to is counted as its first token.
            rules[f"bounded[max_tokens={budget + 1}]"] = "@thought_body"
            rules["thought"] = f"bounded <[{end}]>"
            lark = f"start: TEXT?\nTEXT: {rules['TEXT']}"
            self._subs.append({"name": "thought_body", "lark_grammar": lark})

    def _write_calls(self, use: ToolUse) -> None:
        """Write the rules for calls, with the recipient after the channel or before it."""
        rules, terms = self._rules, self._terms
        first, last = (
            " | ".join(f"{name}_{i}" for i in range(len(use.functions)))
            for name in ("first", "last")
        )
        rules["call"] = f"(first | last) {terms[_CALL]}?"
        rules["first"] = f'{terms[_CHANNEL]} "commentary to=functions." ({first})'
        rules["last"] = f'" to=functions." ({last})'
        for i, function in enumerate(use.functions):
            json = f'{terms[_CONSTRAIN]} "json" {terms[_MESSAGE]} arguments_{i}'
            rules[f"first_{i}"] = f"{grammars.literal(function.name + ' ')} {json}"
            plain = f'" json" {terms[_MESSAGE]} arguments_{i}'
            name = write_terms(function.name + _CHANNEL, self._added)
            rules[f"last_{i}"] = f'{name} "commentary" ({plain} | " " {json})'
            rules[f"arguments_{i}"] = grammars.embed_schema(function.schema)


# ---- reading -------------------------------------------------------------------------------------


class _State(enum.Enum):
    BEGIN = "begin"  # of the answer: a header, or a message without its header
    HEADER = "header"
    BODY = "body"
    CALL = "call"
    BETWEEN = "between"  # messages


class _Part(enum.Enum):
    THOUGHT = "thought"
    CONTENT = "content"


_RECIPIENT = re.compile(r"to=([^\s<]+)")
_NAMED = re.compile(re.escape(_CHANNEL) + r"\s*([a-z]+)")
_ANY_MARK = re.compile("|".join(map(re.escape, MARKS)))
_ENDS = re.compile("|".join(map(re.escape, (_START, _CHANNEL, _END, _CALL, _RETURN))))
_HEADERS = (_START, _CHANNEL, f"to={_FUNCTIONS}")
_LONGEST_HEADER = 400


class ChannelReader:
    """Parses one answer on channels; an empty line separates messages of the same kind."""

    def __init__(self, new_id: Callable[[str], str], *, required: bool = False) -> None:
        """`new_id` returns the id of a call, given its function's name.

        `required`: none of the answer is content.
        """
        self._new_id = new_id
        self._required = required
        self._state = _State.BEGIN
        self._part = _Part.CONTENT
        self._text = ""
        self._arguments = JsonReader()
        self._kinds_seen: set[_Part] = set()  # kinds that have had text
        self._apart = False  # the next text begins another message of its kind
        self.calls = 0  # begun so far
        self._delta = Delta()

    @property
    def complete(self) -> bool:
        """Whether there are calls, all of them complete."""
        return self.calls > 0 and self._arguments.ended

    def push(self, text: str) -> Delta:
        """Take more text; return what it makes certain."""
        self._text += text
        self._delta = Delta()
        while _STEPS[self._state](self):
            pass
        return self._delta

    def finish(self) -> Delta:
        """Return what was held back, now that the answer has ended."""
        self._delta = Delta()
        if self._state is _State.BODY or self._state is _State.BEGIN:
            self._emit(self._text)
        self._text = ""
        return self._delta

    # Each consumes what is certain of the text, and returns whether the state changed.

    def _begin(self) -> bool:
        text = self._text.lstrip()
        if text.startswith(_HEADERS):
            self._state = _State.HEADER
            return True
        if any(each.startswith(text) for each in _HEADERS):
            return False
        self._state = _State.BODY
        return True

    def _header(self) -> bool:
        head, found, rest = self._text.partition(_MESSAGE)
        if not found:
            if len(self._text) <= _LONGEST_HEADER:
                return False
            # No header: its text is shown, without marks.
            self._text, self._state = _ANY_MARK.sub("", self._text), _State.BODY
            self._part = _Part.CONTENT
            return True
        self._text = rest
        recipient = _RECIPIENT.findall(head)
        if recipient and recipient[-1].startswith(_FUNCTIONS):
            name = recipient[-1].removeprefix(_FUNCTIONS)
            self._delta.calls.append(CallDelta(self.calls, self._new_id(name), name))
            self.calls += 1
            self._arguments, self._state = JsonReader(), _State.CALL
            return True
        named = _NAMED.findall(head)
        thought = bool(named) and named[-1] == "analysis"
        self._part = _Part.THOUGHT if thought else _Part.CONTENT
        self._apart = self._part in self._kinds_seen
        self._state = _State.BODY
        return True

    def _body(self) -> bool:
        end = _ENDS.search(self._text)
        certain = end.start() if end is not None else len(self._text) - _held(self._text)
        text = self._text[:certain]
        if end is None or end[0] != _RETURN:  # white space before another message is dropped
            text = text.rstrip()
        self._emit(text)
        self._text = self._text[len(text) if end is None else certain :]
        if end is not None:
            self._state = _State.BETWEEN
        return end is not None

    def _call(self) -> bool:
        written = self._arguments.push(self._text)
        self._text = ""
        if written:
            self._delta.last_call(self.calls - 1).arguments += written
        if self._arguments.ended:
            self._text, self._state = self._arguments.rest, _State.BETWEEN
        return self._arguments.ended

    def _between(self) -> bool:
        """Drop text after a message, up to the next header."""
        places = [at for mark in (_START, _CHANNEL) if (at := self._text.find(mark)) >= 0]
        if not places:
            self._text = self._text[len(self._text) - _held(self._text) :]
            return False
        self._text, self._state = self._text[min(places) :], _State.HEADER
        return True

    def _emit(self, text: str) -> None:
        if not text:
            return
        if self._apart:
            text, self._apart = f"\n\n{text}", False
        self._kinds_seen.add(self._part)
        if self._part is _Part.THOUGHT:
            self._delta.thought += text
        elif not self._required:
            self._delta.content += text


_STEPS = {
    _State.BEGIN: ChannelReader._begin,
    _State.HEADER: ChannelReader._header,
    _State.BODY: ChannelReader._body,
    _State.CALL: ChannelReader._call,
    _State.BETWEEN: ChannelReader._between,
}


def _held(text: str) -> int:
    """Return the length of the end of `text` that may begin a mark."""
    start = text.rfind("<")
    rest = text[start:] if start >= 0 else ""
    return len(rest) if rest and any(mark.startswith(rest) for mark in MARKS) else 0
