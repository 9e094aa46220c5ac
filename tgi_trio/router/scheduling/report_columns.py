"""Splits the rarer columns of a step's report by token and by row."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import TypeVar, overload

from tgi_trio.ipc.messages import StepReport
from tgi_trio.router.scheduling.shard_commands import Top

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True, eq=False)
class Tops(ListLike[Top]):
    """The alternatives of one token, best first.

    A pair is made when somebody looks at it: a step may have 100,000, which are looked at stream by
    stream, in several turns of the router's loop.
    """

    ids: list[int]
    logprobs: list[float]

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[Top]:
        return zip(self.ids, self.logprobs, strict=True)

    @overload
    def __getitem__(self, index: int) -> Top: ...
    @overload
    def __getitem__(self, index: slice) -> Tops: ...
    def __getitem__(self, index: int | slice) -> Top | Tops:
        if isinstance(index, slice):
            return Tops(self.ids[index], self.logprobs[index])
        return self.ids[index], self.logprobs[index]


def tops_per_token(step: StepReport) -> list[Tops]:
    """Return every token's alternatives."""
    return _split_tops(step.top_ids, step.top_logprobs, step.top_count)


def prompt_logprobs_per_row(step: StepReport) -> list[list[float]]:
    """Return every row's prompt log-probabilities."""
    return _split(step.prompt_logprobs, step.prompt_count)


def prompt_tops_per_row(step: StepReport) -> list[list[Tops]]:
    """Return the alternatives of every row's prompt log-probabilities, as many lists as those.

    A position has none where none were asked for, and the first token of a prompt has none.
    """
    tops = _split_tops(step.prompt_top_ids, step.prompt_top_logprobs, step.prompt_top_count)
    return _split(tops, step.prompt_count)


def _split_tops(ids: list[int], logprobs: list[float], counts: list[int]) -> list[Tops]:
    pieces = zip(_split(ids, counts), _split(logprobs, counts), strict=True)
    return [Tops(*piece) for piece in pieces]


def _split(flat: list[_Item], counts: list[int]) -> list[list[_Item]]:
    pieces, end = [], 0
    for count in counts:
        pieces.append(flat[end : end + count])
        end += count
    return pieces
