"""Continuous batching: decides which sequence is computed when, and with which KV blocks.

The scheduler is pure: it is told what happened (`add`, `abort`, `commit`, ...) and asked which
commands to send (`schedule`). It reads no clock and does no I/O.

Cancellation is exact because of one rule: a sequence that is dropped keeps its blocks until a step
acknowledges the FILTER that names it. Until then a running step may still write to them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tgi_trio.errors import Overloaded, ValidationError
from tgi_trio.ipc.messages import ExtendRow, Fault, StepReport
from tgi_trio.ipc.transfers import Transfer
from tgi_trio.router.request import Request
from tgi_trio.router.scheduling import preemption
from tgi_trio.router.scheduling.admission import Admission
from tgi_trio.router.scheduling.deadlines import Deadlines
from tgi_trio.router.scheduling.image_pins import ImagePins, Pixels
from tgi_trio.router.scheduling.image_prefixes import ImagePrefixes
from tgi_trio.router.scheduling.isolation import Isolation
from tgi_trio.router.scheduling.kept_prefixes import Budget, Collected, KeptPrefixes
from tgi_trio.router.scheduling.kv_memory import KvMemory
from tgi_trio.router.scheduling.lifecycle import HELD, SequenceEvent, SequenceState
from tgi_trio.router.scheduling.limits import SchedulingLimits
from tgi_trio.router.scheduling.queue import WaitingQueue
from tgi_trio.router.scheduling.running_batch import RunningBatch
from tgi_trio.router.scheduling.sequence import Sequence
from tgi_trio.router.scheduling.sequence_table import SequenceTable
from tgi_trio.router.scheduling.shard_commands import (
    Command,
    Extend,
    Filter,
    Limits,
    Progress,
    copies,
    prefills,
)
from tgi_trio.router.scheduling.state_memory import StateSlots
from tgi_trio.router.scheduling.step_budget import DrainRate, StepBudget
from tgi_trio.router.scheduling.step_reports import StepReports
from tgi_trio.router.scheduling.ttft import TtftTarget


class Scheduler:
    """Owns the queue, the running batch, the KV blocks, and every sequence until its end.

    Every event has its time, `now`, in seconds of one clock. Where it decides nothing, a recording
    still shows it (`trace.RecordingScheduler`).
    """

    def __init__(self, limits: SchedulingLimits) -> None:
        self.limits = limits
        self._memory = KvMemory(
            limits.usable_blocks,
            limits.block_size,
            limits.prefix_caching,
            limits.state_slots,
            limits.host_blocks,
            limits.host_slots,
            limits.most_ahead,
        )
        self._ttft_target = TtftTarget(limits.target_ttft)
        self._queue = WaitingQueue(limits, self._ttft_target)
        self._batch = RunningBatch(limits, self._memory)
        self._pins = ImagePins()
        self._sequence_table = SequenceTable(self._queue, self._batch, self._memory, self._pins)
        self._image_prefixes = ImagePrefixes(limits.image_sight)
        self._isolation = Isolation()
        self._admission = Admission(
            limits, self._queue, self._batch, self._memory, self._isolation, self._pins
        )
        self._step_budget = StepBudget(limits)
        self._drain = DrainRate()
        self._deadlines = Deadlines(
            lambda each: self._sequence_table.find_listening(each) is not None
        )
        self._arrivals = 0
        self._admissions = 0
        self._number = 0  # of the last command
        self._changes = 0  # of what the memory holds
        self._budget_sent: int | None = None
        # added, admitted, finished, failed, expired, overloaded, refused_deadline, preempted,
        # replayed, aborted_<state>; in tokens: prefill_tokens, prefix_hit_tokens, of which
        # host_hit_tokens were copied back; in blocks: copied_out, copied_back; in slots of states:
        # states_copied_out, states_copied_back.
        self.counters: Counter[str] = Counter()
        self._reports = StepReports(
            self._sequence_table, self._batch, self._ttft_target, self.counters
        )

    def use_pixels(self, pixels: Pixels) -> None:
        """Set where images' pixels are kept; `schedule` has to be called when some are decoded."""
        self._pins.use(pixels)

    # -- what happened -------------------------------------------------------------------------

    def add(self, sequence_id: int, request: Request, now: float) -> None:
        """Put a validated request into the queue.

        Raises Overloaded if the queue is full or the deadline cannot be met, ValidationError if the
        request can never fit into memory (validation against the same limits rules that out), and
        ValueError if the id is in use, or if there are images but `use_pixels` was not called.
        """
        limits, queued = self.limits, self._queue.tokens
        if sequence_id in self._sequence_table.living:
            raise ValueError(f"sequence {sequence_id} is known already")
        self._pins.check(request)
        sequence = Sequence(sequence_id, request, self._arrivals, now, limits.speculate)
        if self._memory.blocks_for(sequence.need) > self._memory.total:
            raise ValidationError(
                f"{sequence.need} KV tokens are needed, the cache holds "
                f"{self._memory.total * limits.block_size}: "
                "raise `--max-batch-total-tokens` or shorten the request"
            )
        self._image_prefixes.enter(sequence)
        if sequence.uncut > limits.max_batch_prefill_tokens:
            raise ValidationError(
                f"{sequence.uncut} tokens around an image must be computed in one step, which has "
                f"{limits.max_batch_prefill_tokens}: raise `--max-batch-prefill-tokens` or send a "
                "smaller image or a shorter text"
            )
        full = len(self._queue) >= limits.max_queued_requests
        if full or (queued and queued + sequence.length > limits.max_queued_tokens):
            self.counters["overloaded"] += 1
            raise Overloaded(retry_after=self._drain.retry_after(queued))
        if sequence.deadline is not None:
            wait = self._drain.seconds_for(queued)
            if now + wait >= sequence.deadline:
                self.counters["refused_deadline"] += 1
                raise Overloaded(
                    "The request's deadline cannot be met: "
                    f"{len(self._queue)} requests are waiting, for about {wait:.1f} s",
                    retry_after=self._drain.retry_after(queued),
                )
            self._deadlines.add(sequence.deadline, sequence_id)
        self._arrivals += 1
        self._sequence_table.enter(sequence)
        self.counters["added"] += 1

    def abort(self, sequence_id: int, now: float) -> bool:
        """Cancel a sequence in any state; returns False if there is none. Idempotent.

        A queued one is forgotten at once. One on the shard is named in the next FILTER, and its
        blocks are free once that is acknowledged.
        """
        sequence = self._sequence_table.find_listening(sequence_id)
        if sequence is None:
            return False
        self._abort(sequence)
        return True

    def _abort(self, sequence: Sequence) -> None:
        self.counters[f"aborted_{sequence.state.value}"] += 1
        self._sequence_table.leave(sequence)

    def finish(self, sequence_id: int, now: float) -> None:
        """End a sequence at a stop string: as `abort`, but counted as success."""
        sequence = self._sequence_table.find_listening(sequence_id)
        if sequence is None:
            return
        self.counters["finished"] += 1
        self._sequence_table.leave(sequence)

    def expire(self, now: float, most: int | None = None) -> list[int]:
        """Abort and return the sequences whose deadline has passed; the first `most` of them."""
        expired: list[int] = []
        while len(expired) != most and (sequence_id := self._deadlines.take(now)) is not None:
            self.counters["expired"] += 1
            self._abort(self._sequence_table.living[sequence_id])
            expired.append(sequence_id)
        return expired

    def evict_adapter(self, adapter: int, now: float) -> None:
        """Free the cached prefixes of an adapter number that will not be used again."""
        self._changes += 1
        self._memory.evict_adapter(adapter)

    def commit(self, step: StepReport, now: float) -> list[Progress]:
        """Apply a step's report; returns the progress of every row whose client still listens."""
        self._changes += 1
        self._sequence_table.ended.clear()
        self._sequence_table.acknowledge(step.acknowledged)
        if step.seen_sequence:
            self._pins.take_in(step, self._sequence_table.living)
        self._step_budget.observe(step)
        self._memory.note_copied(step.copied)
        return self._reports.apply_step(step, now)

    def fault(self, faults: list[Fault], acknowledged: int, now: float) -> list[int]:
        """End the sequences that a step failed on; returns those whose clients must be told."""
        self._changes += 1
        self._sequence_table.ended.clear()
        self._sequence_table.acknowledge(acknowledged)
        failed = []
        for fault in faults:
            sequence = self._sequence_table.living.get(fault.sequence)
            if sequence is None or sequence.state not in HELD:
                continue
            if sequence.state is not SequenceState.LEAVING:
                failed.append(sequence.id)
                self.counters["failed"] += 1
            self._sequence_table.end(sequence, SequenceEvent.FAIL, sound=False)
        return failed

    def shard_lost(self, now: float) -> list[int]:
        """The shard has died: forget all blocks, and queue its sequences again with their tokens.

        Returns the sequence that crashed the shard if `Isolation` has found it; it has failed.
        """
        self._step_budget = StepBudget(self.limits)
        self._changes += 1
        self._number = 0
        self._budget_sent = None
        on_board = (SequenceState.PREFILLING, SequenceState.RUNNING)
        living = self._sequence_table.living.values()
        culprit = self._isolation.lose(s for s in living if s.state in on_board)
        self.counters["failed"] += culprit is not None
        self.counters["replayed"] += self._sequence_table.lose(culprit)
        return [culprit.id] if culprit is not None else []

    def collect_prefixes(self, budget: Budget) -> Iterator[Collected | None]:
        """Yield None piece by piece, then the computed prefixes to keep beyond the shard's end.

        Others may run between two pieces. If anything has changed then, nothing is found.
        """
        before = self._changes
        yield from self._memory.collect_prefixes(budget, lambda: self._changes != before)

    def restore_prefixes(self, kept: KeptPrefixes, on_device: int) -> None:
        """Take prefixes that a new shard has read, so many runs of them into the device's memory;
        before anything else is sent to it.
        """
        self._changes += 1
        self._memory.restore_prefixes(kept, on_device)

    # -- what to send --------------------------------------------------------------------------

    def schedule(self, now: float) -> list[Command]:
        """Return the commands to send now, in order; empty if there are none."""
        extended = self._grow() if self._batch.starving else []
        admitted = self._admit(now) if self._queue else []
        commands: list[Command] = []
        if self._sequence_table.pending_frees.owe_filter:
            number = self._next_number()
            commands.append(Filter(number, self._sequence_table.pending_frees.name(number)))
        soon = self.limits.prompt_blocks + self._batch.growing_blocks
        if transfers := self._memory.take_transfers(soon):
            self._count_copies(transfers)
            commands += copies(transfers, self._next_number)
        if extended:
            commands.append(Extend(self._next_number(), extended))
        budget = self._step_budget.budget(self._batch, self._admission.behind if self._queue else 0)
        if budget != self._budget_sent:
            self._budget_sent = budget
            commands.append(Limits(self._next_number(), budget))
        rows = [sequence.prefill_row() for sequence in admitted]
        commands += prefills(rows, self._next_number)
        self._changes += bool(commands)
        return commands

    def _count_copies(self, transfers: list[Transfer]) -> None:
        for each in transfers:
            way = "copied_back" if each.back else "copied_out"
            self.counters[f"states_{way}" if each.states else way] += 1
            if each.back and not each.states:
                self.counters["host_hit_tokens"] += self.limits.block_size

    def _grow(self) -> list[ExtendRow]:
        rows = preemption.extend_blocks(self._batch, self._memory, self.limits)
        if self._batch.starving:
            dropped = self._sequence_table.pending_frees.members
            for victim in preemption.victims(self._batch, self._memory, self.limits, dropped):
                self.counters["preempted"] += 1
                self._sequence_table.drop(victim, SequenceEvent.PREEMPT)
        return rows

    def _admit(self, now: float) -> list[Sequence]:
        admitted = self._admission.admit(now)
        counters = self.counters
        for sequence in admitted:
            counters["admitted"] += 1
            counters["prefill_tokens"] += sequence.length
            counters["prefix_hit_tokens"] += sequence.computed
            if sequence.started is None:
                self._admissions += 1
                sequence.order = self._admissions
                sequence.started = now
                sequence.cached = min(sequence.computed, sequence.prompt_length)
        if admitted:
            self._drain.note(sum(s.length for s in admitted), bool(self._queue), now)
        return admitted

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    # -- questions -----------------------------------------------------------------------------

    def find(self, sequence_id: int) -> Sequence | None:
        """Return a sequence that has not ended, or that the last report has ended."""
        return self._sequence_table.living.get(sequence_id) or self._sequence_table.ended.get(
            sequence_id
        )

    def is_queued(self, sequence_id: int) -> bool:
        """Return whether a sequence waits to go to the shard, for the first time or again."""
        sequence = self._sequence_table.living.get(sequence_id)
        return sequence is not None and sequence.state is SequenceState.WAITING

    def emitted(self, sequence_id: int) -> list[int]:
        """Return the token ids generated so far."""
        sequence = self.find(sequence_id)
        return list(sequence.emitted) if sequence else []

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of a sequence that has not ended; None without any."""
        return self._deadlines.earliest

    @property
    def loss_explained(self) -> bool:
        """Whether the last death of the shard is blamed on its sequences (`Isolation`)."""
        return self._isolation.explained

    @property
    def makes_room(self) -> bool:
        """Whether a long prompt is looked for or given room bit by bit, and `schedule` goes on."""
        return bool(self._queue) and self._admission.makes_room

    @property
    def queue_size(self) -> int:
        return len(self._queue)

    @property
    def batch_size(self) -> int:
        return len(self._batch)

    @property
    def total_blocks(self) -> int:
        return self._memory.total

    @property
    def free_blocks(self) -> int:
        return self._memory.free

    @property
    def cached_blocks(self) -> int:
        return self._memory.cached

    @property
    def held_blocks(self) -> int:
        return self._memory.held

    @property
    def state_slots(self) -> StateSlots:
        """Counts of slots for recurrent states; all 0 if the model has none."""
        states = self._memory.states
        if states is None:
            return StateSlots(0, 0, 0)
        return StateSlots(states.total, states.free, states.snapshots)

    @property
    def host_blocks(self) -> tuple[int, int]:
        """How many blocks the host's memory holds copies of, and of how many there is room."""
        tier = self._memory.tier
        return (0, 0) if tier is None else (tier.held, tier.total)

    def check(self) -> None:
        """Raise AssertionError if any invariant is broken; for tests and idle moments."""
        self._sequence_table.check()
        living = self._sequence_table.living.values()
        listening = (s for s in living if s.state is not SequenceState.LEAVING)
        self._deadlines.check({s.id for s in listening if s.deadline is not None})
        self._isolation.check(self._sequence_table.living.values())
