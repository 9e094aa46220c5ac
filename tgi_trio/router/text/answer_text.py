"""The text of a generation whose answer is parsed as it arrives, for clients of chats.

Stop strings are searched for in content only, so they may occur in thoughts and calls.
"""

from __future__ import annotations

from collections.abc import Sequence

from tgi_trio.router.delta import Delta
from tgi_trio.router.request import (
    AnswerEnd,
    AnswerForm,
    ReadToken,
    Request,
    StoppingCriteria,
    Token,
    TokenTexts,
)
from tgi_trio.router.text.answer import fold
from tgi_trio.router.text.gap_text import GapText
from tgi_trio.router.text.output import OutputText, Tops
from tgi_trio.router.text.stop import StopMatcher
from tgi_trio.router.text.tokenizer import IntArray


def output_text(tokenizer: TokenTexts, request: Request) -> OutputText:
    """Return the object that turns a request's tokens into what its client sees.

    `tokenizer`: that of requests that have none of their own.
    """
    tokenizer = request.tokenizer or tokenizer
    ids, stopping = request.prompt_ids, request.stopping
    if request.answer is not None:
        return AnswerText(tokenizer, ids, stopping, request.answer)
    if stopping.lines is not None:
        return GapText(tokenizer, ids, stopping, stopping.lines)
    return OutputText(tokenizer, ids, stopping)


class AnswerText(OutputText):
    """Turns the tokens of one answer into `ReadToken`s."""

    __slots__ = (
        "_answering",
        "_end",
        "_last",
        "_marks",
        "_reading",
        "_thinking",
        "_thought_tokens",
        "_undecided",
    )

    def __init__(
        self,
        tokenizer: TokenTexts,
        prompt_ids: Sequence[int] | IntArray,
        stopping: StoppingCriteria,
        form: AnswerForm,
    ) -> None:
        super().__init__(tokenizer, prompt_ids, stopping)
        self._marks = form.marks
        self._reading = form.read()
        self._thinking = self._reading.thinking
        self._answering = self._reading.answering
        self._thought_tokens = 0
        self._undecided: list[ReadToken] = []  # they may belong to a thought, or not
        self._last: ReadToken | None = None
        self._end: AnswerEnd | None = None

    @property
    def answer_end(self) -> AnswerEnd | None:
        return self._end

    def push(self, token_id: int, logprob: float, tops: Tops = (), eos: bool = False) -> ReadToken:
        """Return the next token with what it makes certain."""
        special = token_id in self._special
        if special:
            text = self._text_of(token_id)
            shown = self._marks.get(token_id, "")
        else:
            text = shown = self._detokenizer.push(token_id)
            self._parts.append(text)
        if self._until_stop:
            self._count_until_stop()
        if self._stop_ids and self._is_stop_id(token_id) and not eos:
            self.stopped, self._stop_id = True, token_id
            eos = True  # it ends the generation, whatever stop string it completes
            shown = shown if self._keep_stop else ""
        reading = self._reading
        delta = reading.push(shown) if shown else Delta()
        if self._stop is not None:
            if delta.content or delta.calls:
                self._look_for_stop(self._stop, delta, eos)
            elif special and not (shown or eos) and reading.answering and not reading.calls:
                self.stopped = self._stop.name(text)
        self._last = token = ReadToken(token_id, text, logprob, special, (), delta)
        if not self._answering:
            self._count(token)
        elif delta.thought:  # harmony can think between messages
            token.thought = True
            self._thought_tokens += 1
        if tops:
            token.top = [Token(i, self._text_of(i), p, i in self._special) for i, p in tops]
        return token

    def finish(self) -> str:
        """Return the text still held back at the end; "" the second time."""
        text = self._detokenizer.flush()
        self._parts.append(text)
        if self._end is None:
            reading = self._reading
            delta = fold((reading.push(text) if text else Delta(), reading.finish()))
            thinking = reading.thinking
            if thinking:
                self._think()  # it was no call
            called = reading.complete and not self._cut
            if self._stop is not None:
                delta.content, matched = self._stop.push(delta.content)
                self.stopped = self.stopped or matched
                delta.content += self._stop.flush()
            if self._last is not None:
                self._last.end = delta
            self._end = AnswerEnd(called, thinking, self._thought_tokens)
        return text

    @property
    def _cut(self) -> bool:
        """Whether a stop string has ended the answer, so that later calls are cut off."""
        return self._stop is not None and self._stop.matched

    def _count(self, token: ReadToken) -> None:
        """Mark a token that belongs to a thought; there is none once the answer has begun."""
        reading = self._reading
        thinking, self._thinking = self._thinking or reading.thinking, reading.thinking
        if reading.thinking and reading.calling and not token.delta:
            self._undecided.append(token)
            token.silent = True
        elif thinking and not (reading.answering and reading.calls):  # a call ends it as a mark
            self._undecided.append(token)
            self._think()
            token.silent = not token.delta
        elif reading.answering:
            self._answering = True
            if self._thought_tokens and not thinking:
                for each in self._undecided:  # white space after a thought belongs to the thought
                    each.thought = each.text.isspace()
            self._undecided.clear()
        else:
            self._undecided.append(token)
            token.silent = True

    def _think(self) -> None:
        """Count the tokens that were undecided as tokens of a thought."""
        for each in self._undecided:
            each.thought = True
        self._thought_tokens += len(self._undecided)
        self._undecided.clear()

    def _look_for_stop(self, stop: StopMatcher, delta: Delta, eos: bool) -> None:
        """Cut content at a stop string; calls after it in the same piece are dropped."""
        if eos:
            delta.content = stop.flush() + delta.content
            return
        delta.content, self.stopped = stop.push(delta.content)
        if self.stopped:
            delta.calls.clear()
        elif delta.calls:
            delta.content += stop.flush()
