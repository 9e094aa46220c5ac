"""One client's stream of tokens: what `Engine.submit` hands out.

A stream is a *synchronous* context manager: leaving it aborts an unfinished generation without
awaiting, so a cancelled handler cannot be interrupted half-way through its own clean-up. It ends
in exactly one terminal state (see `END`), and the engine counts that once.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Self

import trio

from tgi_trio.errors import GenerationError
from tgi_trio.ipc.frames import Finish
from tgi_trio.router.request import FinishReason, Outcome, Request, Sink, Timings, Token
from tgi_trio.router.scheduling.shard_commands import Progress
from tgi_trio.router.text.output import OutputText

_REASONS = {Finish.LENGTH: FinishReason.LENGTH, Finish.EOS: FinishReason.EOS_TOKEN}


class StreamEnd(enum.Enum):
    """The terminal states of an accepted request: accepted = finished + cancelled + failed."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


class TokenStream:
    """One request's tokens. Iterate it, or `attach` a sink that the engine calls at each step."""

    __slots__ = (
        "_failure",
        "_leave",
        "_news",
        "_outcome",
        "_pending",
        "_sink",
        "cached_tokens",
        "end",
        "generated",
        "id",
        "output",
        "prompt_logprobs",
        "prompt_tops",
        "request",
        "timings",
    )

    def __init__(
        self,
        id: int,
        request: Request,
        output: OutputText,
        timings: Timings,
        leave: Callable[[TokenStream], None],
    ) -> None:
        """`leave` is called, synchronously, when the stream's block is left."""
        self.id = id
        self.request = request
        self.output = output  # text state; only the engine pushes into it
        self.timings = timings
        self.end: StreamEnd | None = None
        self.prompt_logprobs: list[float] = []  # set by the engine as the prefill reports them
        # Alternatives for each of these, if requested.
        self.prompt_tops: list[Sequence[tuple[int, float]]] = []
        self.generated = len(request.emitted)  # tokens delivered so far, here or elsewhere
        self.cached_tokens = 0  # prompt tokens from the prefix cache; set by the engine
        self._leave = leave
        self._outcome: Outcome | None = None
        self._failure: BaseException | None = None
        self._pending: list[Token] = []  # bounded by max_new_tokens
        self._news = trio.Event()
        self._sink: Sink | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._sink = None
        self._leave(self)

    @property
    def outcome(self) -> Outcome:
        """How it ended. Raises the generation's error, or GenerationError while unfinished."""
        if self._failure is not None:
            raise self._failure
        if self._outcome is None:
            raise GenerationError("the generation has not ended yet")
        return self._outcome

    def attach(self, sink: Sink) -> None:
        """Deliver to `sink(tokens, end)` from the engine's fan-out, instead of by iteration.

        What has arrived already is delivered at once. The sink must not block and must not raise.
        """
        self._sink = sink
        if self._pending or self.end is not None:
            tokens, self._pending = self._pending, []
            sink(tokens, self._outcome or self._failure)

    async def __aiter__(self) -> AsyncIterator[list[Token]]:
        """Yield lists of tokens: everything that arrived since the last one.

        Raises GenerationError when the generation failed.
        """
        while True:
            while not self._pending and self.end is None:
                self._news = trio.Event()
                await self._news.wait()
            tokens, self._pending = self._pending, []
            if tokens:
                yield tokens
                continue
            if self._failure is not None:
                raise self._failure
            return

    def take(self, progress: Progress, tokens: list[Token]) -> FinishReason | None:
        """Append a step's tokens, up to the one that ends the generation; returns why it ends.

        The result is as if each token had come in a step of its own. The shard's finish reason
        belongs to the last token. So a stop string that is complete at an earlier token wins over
        it, but not one that is complete at the last (TGI's order: length, EOS, stop strings).
        Called by the engine only.
        """
        if progress.prompt_logprobs:
            self.prompt_logprobs += progress.prompt_logprobs
            self.prompt_tops += progress.prompt_tops
        output, finish, last = self.output, progress.finish, len(progress.token_ids) - 1
        for i, token_id in enumerate(progress.token_ids):
            top = progress.tops[i] if progress.tops else ()
            end = finish if i == last else Finish.NONE
            tokens.append(output.push(token_id, progress.logprobs[i], top, end is Finish.EOS))
            if output.stopped and not end:
                return FinishReason.STOP_SEQUENCE
        return _REASONS[finish] if finish else None

    def conclude(self, reason: FinishReason, tokens: Sequence[Token]) -> Outcome:
        """Return the outcome of the generation; `tokens`: the last ones, not delivered yet.

        Called by the engine only, once: the text that was held back leaves with it.
        """
        matched: str | int | None = None
        if reason is FinishReason.STOP_SEQUENCE:
            matched = self.output.matched
        elif reason is FinishReason.EOS_TOKEN and tokens:
            matched = tokens[-1].id
        tail, sampling = self.output.finish(), self.request.sampling
        return Outcome(
            reason=reason,
            text=self.output.generated_text,
            generated_tokens=self.generated + len(tokens),
            prompt_tokens=len(self.request.prompt_ids),
            cached_tokens=self.cached_tokens,
            seed=sampling.seed if sampling.sample else None,
            tail=tail,
            matched=matched,
            prompt_logprobs=tuple(self.prompt_logprobs),
            prompt_tops=tuple(self.prompt_tops),
            answer=self.output.answer_end,
        )

    def deliver(self, tokens: list[Token], end: Outcome | BaseException | None) -> None:
        """Hand over tokens and perhaps the end. Called by the engine only."""
        self.generated += len(tokens)
        if isinstance(end, BaseException):
            self.end, self._failure = StreamEnd.FAILED, end
        elif end is not None:
            self.end, self._outcome = StreamEnd.FINISHED, end
        if self._sink is not None:
            self._sink(tokens, end)
            return
        self._pending += tokens
        self._news.set()

    def cancel(self) -> None:
        """Mark the stream as left by its client. Called by the engine only."""
        self.end = StreamEnd.CANCELLED
        self._failure = GenerationError("the client has left")
        self._news.set()
