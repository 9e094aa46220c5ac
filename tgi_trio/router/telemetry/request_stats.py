"""Statistics of a generation: its tokens and times (`receipt` in the last event)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tgi_trio.router.request import Outcome, Timings


@dataclass(frozen=True, slots=True)
class RequestStats:
    """One generation, or the sum of several. Times in seconds, by TGI's definitions (spec 1.11).

    validation + queue + inference = total, and inference = prefill + decode.
    """

    total: float  # received to ended
    validation: float  # received to queued
    queue: float  # queued to first sent to the shard
    prefill: float  # first sent to the shard to first token
    decode: float  # first token to ended
    prompt_tokens: int
    cached_tokens: int  # of the prompt, not computed again
    output_tokens: int
    seed: int | None = None  # None: greedy, or several generations

    @property
    def inference(self) -> float:
        """First sent to the shard to ended."""
        return self.prefill + self.decode

    @property
    def per_token(self) -> float:
        """Inference time per output token."""
        return self.inference / max(self.output_tokens, 1)

    @classmethod
    def of(cls, timings: Timings, outcome: Outcome, now: float) -> RequestStats:
        """Return the statistics of a generation that ended without an error at `now`.

        Times are on the trio clock.
        """
        queued = timings.queued if timings.queued is not None else timings.received
        started = timings.started if timings.started is not None else queued
        first = timings.first_token if timings.first_token is not None else now
        return cls(
            total=now - timings.received,
            validation=queued - timings.received,
            queue=started - queued,
            prefill=first - started,
            decode=now - first,
            prompt_tokens=outcome.prompt_tokens,
            cached_tokens=outcome.cached_tokens,
            output_tokens=outcome.generated_tokens,
            seed=outcome.seed,
        )

    @classmethod
    def sum(cls, all_stats: Iterable[RequestStats]) -> RequestStats:
        """Return the sum over the generations of one call; a single one is unchanged."""
        first, *others = all_stats
        for other in others:
            first = cls(
                *(getattr(first, name) + getattr(other, name) for name in _ADDED),
            )
        return first

    def fields(self) -> dict[str, Any]:
        """Return the fields of a request's log line, TGI's first; times in milliseconds."""
        return {
            "total_time": _ms(self.total),
            "validation_time": _ms(self.validation),
            "queue_time": _ms(self.queue),
            "inference_time": _ms(self.inference),
            "time_per_token": _ms(self.per_token),
            "seed": self.seed,
            "prefill_time": _ms(self.prefill),
            "decode_time": _ms(self.decode),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.output_tokens,
        }

    def json(self) -> bytes:
        """Return the `receipt` for the last event of a stream; times in milliseconds."""
        return (
            b'{"queue_ms":%.3f,"prefill_ms":%.3f,"decode_ms":%.3f,'
            b'"prompt_tokens":%d,"cached_tokens":%d,"output_tokens":%d}'
            % (
                1e3 * self.queue,
                1e3 * self.prefill,
                1e3 * self.decode,
                self.prompt_tokens,
                self.cached_tokens,
                self.output_tokens,
            )
        )


_ADDED = tuple(name for name in RequestStats.__dataclass_fields__ if name != "seed")


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 3)
