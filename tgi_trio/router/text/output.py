"""The text of one generation: detokenised, without special tokens, cut at stop strings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tgi_trio.router.request import AnswerEnd, StoppingCriteria, Token, TokenTexts
from tgi_trio.router.text.stop import StopMatcher
from tgi_trio.router.text.tokenizer import IntArray

Tops = Iterable[tuple[int, float]]  # token id, logprob


class OutputText:
    """Turns the tokens of one generation into what its client sees.

    The texts of all tokens that are not special, and of `finish`, concatenate to `generated_text`.
    This runs once per token of every stream, so it must take a few microseconds at most.
    """

    __slots__ = (
        "_detokenizer",
        "_keep_stop",
        "_parts",
        "_special",
        "_stop",
        "_stop_id",
        "_stop_ids",
        "_text_of",
        "_until_stop",
        "stopped",
    )

    def __init__(
        self,
        tokenizer: TokenTexts,
        prompt_ids: Sequence[int] | IntArray,
        stopping: StoppingCriteria,
    ) -> None:
        self._detokenizer = tokenizer.detokenizer(prompt_ids)
        self._special = tokenizer.special_ids
        self._text_of = tokenizer.token_text
        stops, regexes = tuple(filter(None, stopping.stop)), stopping.stop_regex
        self._keep_stop = stopping.keep_stop
        self._stop = StopMatcher(stops, self._keep_stop, regexes) if stops or regexes else None
        self._stop_ids = stopping.stop_ids
        self._stop_id: int | None = None
        self._until_stop = stopping.min_new_tokens + 1  # tokens; with 0 left, one may end the text
        if self._stop is not None:
            self._stop.waits = True
        self._parts: list[str] = []
        self.stopped = False  # a stop string is complete, so the generation ends with this token

    @property
    def matched(self) -> str | int | None:
        """Return what set `stopped`: the stop string, expression or token id, as it was given."""
        if self._stop_id is not None or self._stop is None:
            return self._stop_id
        return self._stop.found

    @property
    def answer_end(self) -> AnswerEnd | None:
        """Return how a parsed answer ended, after `finish`; None for text that is not parsed."""
        return None

    @property
    def generated_text(self) -> str:
        """Return all text released so far; it is complete after `finish`."""
        return "".join(self._parts)

    def push(self, token_id: int, logprob: float, tops: Tops = (), eos: bool = False) -> Token:
        """Return the next token with the text that it completes.

        The text of a special token is in the token, but not in `generated_text`. `eos`: it ends the
        generation, whatever stop string it completes. Do not push after `stopped` is set: such
        tokens have no text.
        """
        special = token_id in self._special
        if self._until_stop:
            self._count_until_stop()
        if self._stop_ids and self._is_stop_id(token_id) and not eos:
            text = self._stopping_text(token_id, special)
        else:
            text = self._special_text(token_id, eos) if special else self._plain_text(token_id, eos)
        token = Token(token_id, text, logprob, special)
        if tops:
            token.top = [Token(i, self._text_of(i), p, i in self._special) for i, p in tops]
        return token

    def finish(self) -> str:
        """Return the text still held back at the end; "" the second time."""
        text = self._detokenizer.flush()
        if self._stop is not None:
            text, matched = self._stop.push(text)
            self.stopped = self.stopped or matched
            text += self._stop.flush()
        return self._release(text)

    def _release(self, text: str) -> str:
        """Take a text that is certain into `generated_text`; returns what its client sees of it."""
        self._parts.append(text)
        return text

    def _count_until_stop(self) -> None:
        """Count a token that comes before one may end the text, or is the first that may."""
        self._until_stop -= 1
        if not self._until_stop and self._stop is not None:
            self._stop.waits = False

    def _is_stop_id(self, token_id: int) -> bool:
        """Return whether a token's id ends the generation."""
        return not self._until_stop and token_id in self._stop_ids

    def _plain_text(self, token_id: int, eos: bool) -> str:
        text = self._detokenizer.push(token_id)
        if text:
            if self._stop is not None:
                if eos:
                    text = self._stop.flush() + text
                else:
                    text, self.stopped = self._stop.push(text)
            text = self._release(text)
        return text

    def _stopping_text(self, token_id: int, special: bool) -> str:
        """Return the text of a token whose id ends the generation."""
        self.stopped, self._stop_id = True, token_id
        if special:
            return self._text_of(token_id)
        return self._plain_text(token_id, eos=True) if self._keep_stop else ""

    def _special_text(self, token_id: int, eos: bool) -> str:
        text = self._text_of(token_id)
        if self._stop is not None and not eos and text:
            self.stopped = self._stop.name(text)
        return text
