"""What the scheduler says: commands for the shard, progress for the clients."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from tgi_trio.ipc.frames import Finish
from tgi_trio.ipc.messages import ExtendRow, PrefillRow


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
class Extend:
    """More blocks for running sequences (EXTEND)."""

    number: int
    rows: list[ExtendRow]


@dataclass(frozen=True, slots=True)
class Prefill:
    """New sequences, in the order in which they are to be computed (PREFILL)."""

    number: int
    rows: list[PrefillRow]


Command: TypeAlias = Limits | Filter | Extend | Prefill

Top: TypeAlias = tuple[int, float]  # token id, log-probability


class Progress(NamedTuple):
    """What one step brought one sequence. A tuple, because there is one per row and step."""

    sequence_id: int
    token_ids: list[int]
    logprobs: list[float]
    tops: ListLike[ListLike[Top]]  # per token, best first; empty when none was asked for
    finish: Finish
    prompt_logprobs: ListLike[float]  # the next ones in prompt order; NaN for the first token
    first: bool  # these are the sequence's first tokens
