"""Splits the rarer columns of a step's report by token and by row."""

from __future__ import annotations

from typing import TypeVar

from tgi_trio.ipc.messages import StepReport
from tgi_trio.router.scheduling.shard_commands import Top

_Item = TypeVar("_Item")


def tops_per_token(step: StepReport) -> list[list[Top]]:
    """Return every token's alternatives, best first."""
    return _split(list(zip(step.top_ids, step.top_logprobs, strict=True)), step.top_count)


def prompt_logprobs_per_row(step: StepReport) -> list[list[float]]:
    """Return every row's prompt log-probabilities."""
    return _split(step.prompt_logprobs, step.prompt_count)


def prompt_tops_per_row(step: StepReport) -> list[list[list[Top]]]:
    """Return the alternatives of every row's prompt log-probabilities, as many lists as those.

    A position has none where none were asked for, and the first token of a prompt has none.
    """
    pairs = list(zip(step.prompt_top_ids, step.prompt_top_logprobs, strict=True))
    return _split(_split(pairs, step.prompt_top_count), step.prompt_count)


def _split(flat: list[_Item], counts: list[int]) -> list[list[_Item]]:
    pieces, end = [], 0
    for count in counts:
        pieces.append(flat[end : end + count])
        end += count
    return pieces
