"""The text of a gap, which may have to end with a line: by its indentation, or after some time.

An editor shows what belongs into a gap while its user types. Lines that leave the block in which
the cursor stands belong to nobody, and what comes late is not looked at any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from tgi_trio.router.request import LineLimits, StoppingCriteria, TokenTexts
from tgi_trio.router.text.output import OutputText
from tgi_trio.router.text.tokenizer import IntArray

_INDENT = " \t"


class GapText(OutputText):
    """Turns tokens into text up to a line that must not follow; `matched` is None there."""

    __slots__ = ("_lines",)

    def __init__(
        self,
        tokenizer: TokenTexts,
        prompt_ids: Sequence[int] | IntArray,
        stopping: StoppingCriteria,
        limits: LineLimits,
    ) -> None:
        super().__init__(tokenizer, prompt_ids, stopping)
        self._lines = LineCutter(limits)

    def finish(self) -> str:
        text = super().finish()
        held = self._lines.flush()
        self._parts.append(held)
        return text + held

    def _release(self, text: str) -> str:
        text = self._lines.push(text)
        self.stopped = self.stopped or self._lines.over
        return super()._release(text)


class LineCutter:
    """Ends a text that arrives in pieces by its lines."""

    __slots__ = ("_began", "_clock", "_held", "_limits", "over")

    def __init__(self, limits: LineLimits, clock: Callable[[], float] = trio.current_time) -> None:
        """`clock`: seconds."""
        self._limits = limits
        self._clock = clock
        self._began: float | None = None
        self._held: str | None = None  # the beginning of a line whose indentation is not known yet
        self.over = False

    def push(self, text: str) -> str:
        """Return the part of the text that its client sees now.

        Spaces that begin a line are held back until enough of them are there.
        """
        if self._began is None and self._limits.seconds is not None:
            self._began = self._clock()
        seen = []
        while text and not self.over:
            if self._held is None:
                line, newline, text = text.partition("\n")
                seen.append(line + newline)
                if newline:
                    self.over = self._is_late()
                    self._held = "" if self._limits.indent else None
                continue
            rest = text.lstrip(_INDENT)
            held, text = self._held + text[: len(text) - len(rest)], rest
            if len(held) >= self._limits.indent:
                seen.append(held)
                self._held = None
            else:
                self.over, self._held = bool(rest), held
        return "".join(seen)

    def flush(self) -> str:
        """Return what was held back, once nothing follows; "" behind an end by a line."""
        held, self._held = self._held, None
        return "" if held is None or self.over else held

    def _is_late(self) -> bool:
        seconds, began = self._limits.seconds, self._began
        return seconds is not None and began is not None and self._clock() - began > seconds
