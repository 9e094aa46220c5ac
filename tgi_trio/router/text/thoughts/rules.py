"""Grammar rules for the thought before an answer: free text up to its end mark.

Thought and answer are in one grammar, so nothing has to be handed over between two. If the prompt
has begun a thought, its end mark must come before what is forced; if the model may begin one, the
thought is optional. A budget bounds the thought's tokens, and then the end mark follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tgi_trio.router.text import grammars
from tgi_trio.router.text.thoughts.marks import HARMONY, Marks
from tgi_trio.router.text.thoughts.place import Place
from tgi_trio.router.text.tools.terms import escape_regex, write_terms, write_tokens

_BODY = "thought_body"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The tokens that are not ordinary text."""

    added: Mapping[str, int]  # text -> id of the tokenizer's added tokens
    special: frozenset[int]  # ids of special tokens, which are never part of a text


@dataclass(frozen=True, slots=True)
class Trigger:
    """What begins calls where they are forced, which ends a thought."""

    text: str
    opening: str  # between the trigger and the first name


class ThoughtRules:
    """The rules for the thought of one answer."""

    def __init__(
        self,
        marks: Marks,
        place: Place,
        vocabulary: Vocabulary,
        *,
        budget: int | None = None,
        trigger: Trigger | None = None,
    ) -> None:
        """`budget`: most tokens of the thought. `trigger`: calls are forced, and it begins them.

        No special token occurs in a thought: it could end the text before what is forced.
        """
        self.place = place
        self._marks = marks
        self.added = vocabulary.added
        self.budget = budget
        self._trigger = trigger
        # The added token with which the end mark begins; "" if the mark is spelled.
        self._end_token = max(
            (text for text in self.added if text and marks.end.startswith(text)),
            key=len,
            default="",
        )
        never = {self.added.get(self._end_token), None if trigger is None else self._trigger_id}
        if budget is not None:
            # llguidance lets an added token follow the last one of a budget. Most of those that
            # begin like the mark (`<|fim_pad|>`) are hardly less likely there than the mark.
            never |= {id for text, id in self.added.items() if text[:1] == marks.end[:1]}
        allowed = set(self.added.values()) - vocabulary.special - never
        others = write_tokens(id for id in allowed if id is not None)
        self._pieces = f"(THOUGHT? {others})* " if allowed else ""
        self.subs: list[dict[str, Any]] = []  # grammars to which the rules refer
        self.rules: dict[str, str] = {}
        if place is not Place.CLOSED:
            self._write()

    def start(self, *, forced: bool) -> str:
        """Return the right side of `start`, which ends with the rule `answer`.

        `forced`: the answer must come. Otherwise the text may end within a thought, unless that has
        a budget, which promises the end mark.
        """
        answer = "answer"
        if self._marks.opening:
            self.rules["answer_opening"] = write_terms(self._marks.opening, self.added)
            ending = self._marks.ending
            closing = write_terms(self._marks.closing, self.added)
            if ending:
                closing = f"{closing} ({write_terms(ending, self.added)})?"
            self.rules["answer_closing"] = closing
            # If calls are forced, the text before them may be empty, and closed.
            opening = "answer_opening?"
            if self._trigger is not None and self._marks.closing:
                opening = "(answer_opening answer_closing?)?"
            answer = f"{opening} answer answer_closing?"
        if self.place is Place.CLOSED:
            return answer
        begin = "" if self.place is Place.INSIDE else "thought_begin "
        alternatives = [f"{begin}thought WHITE? {answer}"]
        if not begin and self._marks.start in self.added:  # the model may repeat it
            alternatives[0] = f"thought_begin? {alternatives[0]}"
        if begin:
            alternatives.append(answer)
        if not forced and self.budget is None:
            alternatives.append(f"{begin}unended")
        elif forced and self._trigger_id is not None and self.budget != 0:
            alternatives.append(f"{begin}unended <[{self._trigger_id}]> calls")
        return " | ".join(alternatives)

    @property
    def on_channels(self) -> bool:
        """Whether thoughts are messages among others, with rules in `tools/channels.py`."""
        return self._marks == HARMONY

    @staticmethod
    def can_be_bounded(marks: Marks, added: Mapping[str, int]) -> bool:
        """Return whether a budget can be kept: the end mark begins with a token or punctuation."""
        first = marks.end[0]
        spelled = not (first.isalnum() or first.isspace())
        return spelled or any(text and marks.end.startswith(text) for text in added)

    @property
    def begin_token(self) -> int | None:
        """Return the token that begins a thought, if one may begin with a token."""
        return self.added.get(self._marks.start) if self.place is Place.MAY_OPEN else None

    @property
    def not_begun(self) -> str:
        """Return an intersection for terminals of the answer: text that begins no thought."""
        if self.place is not Place.MAY_OPEN:
            return ""
        return f" & ~/\\s*{escape_regex(self._marks.start)}(?s:.*)/"

    @property
    def _trigger_id(self) -> int | None:
        return None if self._trigger is None else self.added.get(self._trigger.text)

    def _write(self) -> None:
        end, added = self._marks.end, self.added
        without = [escape_regex(end)]
        if self._trigger is not None:
            without.append(escape_regex(self._trigger.text + self._trigger.opening))
        excluded = "".join(f" & ~/(?s:.*){text}(?s:.*)/" for text in without)
        spelled = f"/(?s:.*)/ {grammars.literal(end)}"
        rules = self.rules
        rules["WHITE"] = r"/[ \n\r\t]{1,8}/"
        rules["THOUGHT"] = f"/(?s:.+)/{excluded}"
        if self.place is Place.MAY_OPEN or self._marks.start in added:
            rules["thought_begin"] = write_terms(self._marks.start, added)
        text = f"{self._pieces}THOUGHT?"
        if self.budget is None:
            rules["unended"] = text
            if self._end_token:
                rules["thought"] = f"unended {self._end_terms()}"
            else:
                rules["thought"] = f"{self._pieces}thought_lead"
                rules["thought_lead[lazy]"] = spelled
        elif self.budget == 0:
            rules["unended"] = '""'
            rules["thought"] = self._end_terms()
        elif self._end_token:
            # What precedes a grammar that is referred to is counted as its first token.
            most = self.budget + (self.place is Place.MAY_OPEN)
            rules[f"unended[max_tokens={most}]"] = f"@{_BODY}"
            rules["thought"] = f"unended {self._end_terms()}"
            body = {"start": text, "THOUGHT": rules.pop("THOUGHT")}
            self.subs.append({"name": _BODY, **_lark(body)})
        else:
            # A terminal cannot give back text that turns out to begin the mark, and one that the
            # budget ends looks like one that the mark has ended. So the mark's first character is
            # excluded.
            rules[f"unended[max_tokens={self.budget}]"] = "THOUGHT"
            rules["THOUGHT"] = f"/[^{escape_regex(end[0])}]*/"
            rules["thought"] = f"unended {grammars.literal(end)}"

    def _end_terms(self) -> str:
        """Return terms for the end mark; a token with which it begins is not spelled."""
        token, rest = self._end_token, self._marks.end[len(self._end_token) :]
        first = f"<[{self.added[token]}]>" if token else ""
        return f"{first} {write_terms(rest, self.added) if rest else ''}".strip()


def _lark(rules: Mapping[str, str]) -> dict[str, str]:
    return {"lark_grammar": "\n".join(f"{name}: {rule}" for name, rule in rules.items())}
