"""The parts of a step's report that few rows have, cut per token and per row."""

from __future__ import annotations

from tgi_trio.ipc.messages import StepReport
from tgi_trio.router.scheduling.commands import Top


def tops_per_token(step: StepReport) -> list[list[Top]]:
    """Return every token's alternatives, best first."""
    pairs = list(zip(step.top_ids, step.top_logprobs, strict=True))
    pieces, end = [], 0
    for count in step.top_count:
        pieces.append(pairs[end : end + count])
        end += count
    return pieces


def prompt_logprobs_per_row(step: StepReport) -> list[list[float]]:
    """Return every row's prompt log-probabilities."""
    pieces, end = [], 0
    for count in step.prompt_count:
        pieces.append(step.prompt_logprobs[end : end + count])
        end += count
    return pieces
