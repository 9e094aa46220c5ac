"""The text of one generation: detokenised, special tokens set apart, cut at a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tgi_trio.router.request import StoppingCriteria, Token
from tgi_trio.router.text.stop import StopMatcher
from tgi_trio.router.text.tokenizer import IntArray, Tokenizer

Tops = Iterable[tuple[int, float]]  # token id, logprob


class OutputText:
    """Turns the tokens of one generation into what its client sees.

    The texts of the tokens that are not special, and then `finish`, concatenate to
    `generated_text`. Runs once per token of every stream: a few microseconds at most.
    """

    __slots__ = ("_detokenizer", "_parts", "_special", "_stop", "_stops", "_text_of", "stopped")

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int] | IntArray,
        stopping: StoppingCriteria,
    ) -> None:
        self._detokenizer = tokenizer.detokenizer(prompt_ids)
        self._special = tokenizer.special_ids
        self._text_of = tokenizer.token_text
        self._stops = tuple(filter(None, stopping.stop))
        self._stop = StopMatcher(self._stops, stopping.keep_stop) if self._stops else None
        self._parts: list[str] = []
        self.stopped = False  # a stop string is complete: the generation ends with this token

    @property
    def generated_text(self) -> str:
        """Return all text released so far; whole after `finish`."""
        return "".join(self._parts)

    def push(self, token_id: int, logprob: float, tops: Tops = ()) -> Token:
        """Return the next token with the text that became certain with it.

        The text of a special token is its own and no part of `generated_text`. Do not push on once
        `stopped` is set: such tokens have no text.
        """
        special = token_id in self._special
        text = self._special_text(token_id) if special else self._plain_text(token_id)
        token = Token(token_id, text, logprob, special)
        if tops:
            token.top = [Token(i, self._text_of(i), p, i in self._special) for i, p in tops]
        return token

    def finish(self) -> str:
        """Return the text still held back, now that no token will follow; "" the second time."""
        text = self._detokenizer.flush()
        if self._stop is not None:
            text, matched = self._stop.push(text)
            self.stopped = self.stopped or matched
            text += self._stop.flush()
        self._parts.append(text)
        return text

    def _plain_text(self, token_id: int) -> str:
        text = self._detokenizer.push(token_id)
        if text:
            if self._stop is not None:
                text, self.stopped = self._stop.push(text)
            self._parts.append(text)
        return text

    def _special_text(self, token_id: int) -> str:
        text = self._text_of(token_id)
        # A special token can only be named whole (`</s>`), never in part or with other text.
        if any(stop in text for stop in self._stops):
            self.stopped = True
        return text
