"""The sequences the shard works on, and how much of it is still prefill."""

from __future__ import annotations

from tgi_trio.router.scheduling.lifecycle import Event, State
from tgi_trio.router.scheduling.limits import SchedulingLimits
from tgi_trio.router.scheduling.memory import KvMemory
from tgi_trio.router.scheduling.sequence import NEVER, Sequence


class Batch:
    """Sequences that are PREFILLING or RUNNING."""

    def __init__(self, limits: SchedulingLimits, memory: KvMemory) -> None:
        self._limits = limits
        self._memory = memory
        self.members: dict[int, Sequence] = {}
        self.starving: dict[int, Sequence] = {}  # members near the end of their blocks
        self.pending_tokens = 0  # of members, sent for prefill and not yet computed
        self.prefilling = 0  # members that are PREFILLING

    def __len__(self) -> int:
        return len(self.members)

    @property
    def running(self) -> int:
        """Members that generate."""
        return len(self.members) - self.prefilling

    @property
    def has_room(self) -> bool:
        """Whether another sequence may enter, memory aside."""
        most = self._limits.max_batch_size
        if most is not None and len(self.members) >= most:
            return False
        return self.pending_tokens < self._limits.max_batch_prefill_tokens

    def enter(self, sequence: Sequence) -> None:
        """Take in a sequence whose blocks have been granted."""
        sequence.advance(Event.ADMIT)
        sequence.target = sequence.length
        sequence.prompt_logprobs_reported = 0
        self.members[sequence.id] = sequence
        self.prefilling += 1
        self.pending_tokens += sequence.target - sequence.computed
        self.watch(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Take out a sequence that ends, leaves or is pushed out; before its state changes."""
        del self.members[sequence.id]
        self.starving.pop(sequence.id, None)
        sequence.extend_at = NEVER  # steps from before its FILTER must not ask for blocks
        if sequence.state is State.PREFILLING:
            self.prefilling -= 1
            self.pending_tokens -= sequence.target - sequence.computed

    def prefill(self, sequence: Sequence, computed: int, sampled: bool) -> None:
        """A step computed a chunk of a prompt; with its first token the sequence runs."""
        done = sequence.target if sampled else min(computed, sequence.target)
        self.pending_tokens -= done - sequence.computed
        sequence.computed = done
        self._memory.publish(sequence)
        if sampled:
            sequence.advance(Event.COMPUTE)
            self.prefilling -= 1
            self._memory.settle(sequence)

    def watch(self, sequence: Sequence) -> None:
        """Set at which length `sequence` asks for more blocks."""
        granted = len(sequence.blocks) * self._limits.block_size
        if granted >= sequence.need:
            sequence.extend_at = NEVER
        else:
            sequence.extend_at = granted - self._limits.ask_tokens
            if sequence.computed >= sequence.extend_at:
                self.starving[sequence.id] = sequence
                return
        self.starving.pop(sequence.id, None)

    def clear(self) -> None:
        """Forget everybody: the shard is gone."""
        self.members.clear()
        self.starving.clear()
        self.pending_tokens = self.prefilling = 0

    def check(self) -> None:
        """Raise AssertionError when the accounting is wrong."""
        prefilling = [s for s in self.members.values() if s.state is State.PREFILLING]
        if len(prefilling) != self.prefilling:
            raise AssertionError(f"{len(prefilling)} prefill, {self.prefilling} counted")
        pending = sum(s.target - s.computed for s in prefilling)
        if pending != self.pending_tokens:
            raise AssertionError(f"{pending} tokens are pending, {self.pending_tokens} counted")
        for sequence in self.members.values():
            if sequence.state not in (State.PREFILLING, State.RUNNING):
                raise AssertionError(f"{sequence} is a member of the batch")
            if sequence.computed >= sequence.extend_at and sequence.id not in self.starving:
                raise AssertionError(f"{sequence} runs out of blocks and nobody knows")
        if not self.starving.keys() <= self.members.keys():
            raise AssertionError("someone starves outside the batch")
