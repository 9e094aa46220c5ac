"""The contract of a backend: the protocols of what computes steps, and of what drafts for it.

Torch, the CPU kernels and several ranks together are each a `Runner`; the worker's loop knows
nothing else about them. `contract.py` has what goes in and comes out. No torch in this file.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from tgi_trio.errors import PeerError
from tgi_trio.ipc.startup import ShardInfo, WarmupRequest, WarmupResult
from tgi_trio.shard.adapter_host import AdapterHost
from tgi_trio.shard.contract import (
    ShardSequence,
    StepPlan,
    StepResult,
)
from tgi_trio.shard.prefixes.host_copies import HostCopies
from tgi_trio.shard.prefixes.kept_prefixes import Prefixes


class Pending(Protocol):
    """A step that has been launched."""

    def proceed(self) -> None:
        """Launch what depends on the previous step's tokens, which the sequences have by now.

        Call it once that step has been settled; otherwise `result` does it. Raises what launching
        raises.
        """
        ...

    def result(self) -> StepResult:
        """Wait for the step and return what it chose. Raises what computing it has raised."""
        ...


@dataclass(slots=True)
class Computed:
    """A step of a runner that computes at once: nothing is left to wait for."""

    found: StepResult

    def proceed(self) -> None:
        return None

    def result(self) -> StepResult:
        return self.found


class DraftRow(NamedTuple):
    """A sequence that decodes in a step, and may be drafted for."""

    place: int  # among the step's rows
    sequence: ShardSequence
    room: int  # most tokens that may be drafted


class Drafter(Protocol):
    """Drafts the next tokens of sequences; `speculation/` has a file for each kind."""

    def draft_rows(self, rows: ListLike[DraftRow], spare: int) -> dict[int, int]:
        """Write drafts into `token_ids`, after the known tokens, at most `spare` in all.

        Returns how many each row got, by place, for the rows that got any.
        """
        ...


@runtime_checkable
class FollowingDrafter(Drafter, Protocol):
    """One whose drafts the runner makes on the device: the next step may follow unread ones."""

    @property
    def follows(self) -> bool:
        """Whether the runner does so here; if not, the other methods are never called."""
        ...

    def follow(self, rows: ListLike[DraftRow], spare: int) -> dict[int, int]:
        """Return how many drafts rows get, by place, in a step whose last tokens are unknown."""
        ...

    def judge(self, sequence: ShardSequence, count: int, right: int) -> None:
        """Note how many of a sequence's `count` drafts in a step were right."""
        ...


class Runner(Protocol):
    """A model that can step. `step` must leave sequences untouched: the worker moves them."""

    @property
    def info(self) -> ShardInfo: ...

    @property
    def adapters(self) -> AdapterHost | None:
        """What loads adapters; None where none are served."""
        ...

    @property
    def prefixes(self) -> Prefixes:
        """What keeps computed prefixes in files; of the memory that `warm_up` allocates."""
        ...

    @property
    def host_copies(self) -> HostCopies | None:
        """What copies blocks to the host's memory and back, once `warm_up` has made room there.

        None: nothing does.
        """
        ...

    def warm_up(self, request: WarmupRequest) -> WarmupResult:
        """Run the largest step, size and allocate the KV cache."""
        ...

    def launch(self, plan: StepPlan) -> Pending:
        """Begin to compute the plan's tokens, to write their K and V, and to choose next tokens.

        A runner that computes at once returns `Computed(self.step(plan))`.
        """
        ...

    def runs_ahead(self, plan: StepPlan) -> bool:
        """Return whether the step after `plan` may be launched before `plan` has been read.

        Then `plan` itself may be launched with tokens that only the runner knows
        (`StepPlan.inputs`). For a plan with drafts, or before one (`StepPlan.leads`), the runner
        must judge drafts, move rows by those that were right (`StepPlan.moves`), and draft.
        """
        ...

    def step(self, plan: StepPlan) -> StepResult:
        """Compute a plan, and return what was chosen."""
        ...

    def drafter(self, most: int) -> Drafter | None:
        """Return the drafter of the model, for up to `most` drafts a row (`--speculate`)."""
        ...

    def prepare(self, sequence: ShardSequence | None) -> bool:
        """Start what a sequence with a grammar needs before its first step; return if it is ready.

        Called before every step until it is; the sequence sits them out. None, once the model is
        ready: start what the first such sequence would have to wait for.
        """
        ...

    def drop(self, sequence: ShardSequence) -> None:
        """Free whatever is held for `sequence`."""
        ...

    def prove_sound(self) -> None:
        """Compute a made-up token with the whole model, and choose the next; after `warm_up` only.

        Raises whatever a broken device raises, RuntimeError where nothing but NaN comes out. Does
        not affect any sequence.
        """
        ...


class GroupBroken(PeerError):
    """A step failed on this rank: the others may be in the middle of it, so the group ends."""
