"""The scheduler's output: commands for the shard, and progress for the clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from tgi_trio.ipc.frames import Finish
from tgi_trio.ipc.messages import ExtendRow, PrefillRow
from tgi_trio.ipc.transfers import Transfer


@dataclass(frozen=True, slots=True)
class Limits:
    """Standing token budget of a step (LIMITS)."""

    number: int
    token_budget: int


@dataclass(frozen=True, slots=True)
class Filter:
    """Sequences to drop (FILTER)."""

    number: int
    sequences: list[int]


@dataclass(frozen=True, slots=True)
class Copy:
    """Blocks to copy between the device and the host's memory, in this order (TRANSFER)."""

    number: int
    transfers: list[Transfer]


@dataclass(frozen=True, slots=True)
class Extend:
    """More blocks for running sequences (EXTEND)."""

    number: int
    rows: list[ExtendRow]


@dataclass(frozen=True, slots=True)
class Prefill:
    """New sequences, in the order in which they are to be computed (PREFILL)."""

    number: int
    rows: list[PrefillRow]

    @property
    def is_long(self) -> bool:
        """Whether it is a single row that is larger than others together may be."""
        return len(self.rows) == 1 and _bytes(self.rows[0]) > _PREFILL_BYTES


# Largest PREFILL: a frame may take half of a ring, and a single row is much smaller than the rest.
_PREFILL_BYTES = 2**19
_IMAGE_BYTES = 64  # of an image's columns, without its runs


_MOST_TRANSFERS = 2**16  # of a TRANSFER: 10 bytes each


def copies(transfers: list[Transfer], number: Callable[[], int]) -> Iterator[Copy]:
    """Yield the transfers in order, in as few commands as fit frames."""
    for start in range(0, len(transfers), _MOST_TRANSFERS):
        yield Copy(number(), transfers[start : start + _MOST_TRANSFERS])


def prefills(rows: Iterable[PrefillRow], number: Callable[[], int]) -> Iterator[Prefill]:
    """Yield the rows in order, in as few commands as fit frames; `number` numbers commands."""
    part: list[PrefillRow] = []
    size = 0
    for row in rows:
        size += _bytes(row)
        if part and size > _PREFILL_BYTES:
            yield Prefill(number(), part)
            part, size = [], _bytes(row)
        part.append(row)
    if part:
        yield Prefill(number(), part)


def _bytes(row: PrefillRow) -> int:
    """Return an upper bound of the bytes that a row takes in columns of variable length."""
    sampling = row.sampling
    images = sum(_IMAGE_BYTES + 8 * len(image.runs) for image in row.images)
    # A character takes 4 bytes at most.
    return 4 * (len(row.token_ids) + len(sampling.grammar)) + 8 * len(sampling.logit_bias) + images


Command: TypeAlias = Limits | Filter | Copy | Extend | Prefill

Top: TypeAlias = tuple[int, float]  # token id, log-probability


class Progress(NamedTuple):
    """One sequence's result of one step. A tuple for speed: there is one per row and step."""

    sequence_id: int
    token_ids: list[int]
    logprobs: list[float]
    tops: ListLike[ListLike[Top]]  # per token, best first; empty when none was asked for
    finish: Finish
    prompt_logprobs: ListLike[float]  # the next ones in prompt order; NaN for the first token
    prompt_tops: ListLike[ListLike[Top]]  # per logprob, best first; empty when none was asked for
    first: bool  # these are the sequence's first tokens
