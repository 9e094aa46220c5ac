"""The running batch: the sequences on the shard, and how many of their tokens are still prefill."""

from __future__ import annotations

from collections.abc import Iterable

from tgi_trio.router.scheduling.kv_memory import KvMemory
from tgi_trio.router.scheduling.lifecycle import SequenceEvent, SequenceState
from tgi_trio.router.scheduling.limits import SchedulingLimits
from tgi_trio.router.scheduling.sequence import NEVER, Sequence


class RunningBatch:
    """Sequences that are PREFILLING or RUNNING."""

    def __init__(self, limits: SchedulingLimits, memory: KvMemory) -> None:
        self._limits = limits
        self._memory = memory
        self.members: dict[int, Sequence] = {}
        self.starving: dict[int, Sequence] = {}  # members that soon need more blocks
        self.prefilling: dict[int, Sequence] = {}  # members whose prompt is being computed
        self.running: dict[int, Sequence] = {}  # all other members: they generate
        self.pending_tokens = 0  # uncomputed prompt tokens of `prefilling`
        # A lower bound of the tokens that may still pass every one of `prefilling`.
        self._patience = NEVER

    def __len__(self) -> int:
        return len(self.members)

    @property
    def is_full(self) -> bool:
        """Whether `max_batch_size` is reached."""
        most = self._limits.max_batch_size
        return most is not None and len(self.members) >= most

    @property
    def growing_blocks(self) -> int:
        """Blocks that the members will be granted soon."""
        limits = self._limits
        each = 0 if limits.reserve else -(-limits.grant_tokens // limits.block_size)
        return each * len(self.members)

    def has_turn(self, tokens: int, queued: Iterable[Sequence] = ()) -> bool:
        """Whether a prompt of `tokens` uncomputed tokens may be sent to the shard now.

        The shard computes the prompt with the fewest remaining tokens first. So a prompt waits
        while those that would be computed before it have `max_batch_prefill_tokens` tokens. And a
        longer prompt, in the batch or among the `queued` ones that would be passed, lets shorter
        ones pass only until these are together as long as itself or a full step, so that it takes
        about twice as long at worst.
        """
        most = self._limits.max_batch_prefill_tokens
        if tokens > self._patience or self.pending_tokens >= most:
            ahead, turn = 0, True
            self._patience = NEVER
            for member in self.prefilling.values():
                left, patience = member.target - member.computed, self._patience_of(member)
                self._patience = min(self._patience, patience)
                if left <= tokens:
                    ahead += left
                elif tokens > patience:
                    turn = False
            if not turn or ahead >= most:
                return False
        return all(tokens <= self._patience_of(other) for other in queued)

    def _patience_of(self, sequence: Sequence) -> int:
        """Return how many tokens of shorter prompts may still pass `sequence`."""
        return max(sequence.length, self._limits.token_budget) - sequence.overtaken

    def enter(self, sequence: Sequence) -> None:
        """Add a sequence whose blocks have been granted."""
        sequence.advance(SequenceEvent.ADMIT)
        sequence.target = sequence.length
        sequence.prompt_logprobs_reported = 0
        tokens = sequence.target - sequence.computed
        patience = min(self._patience, self._patience_of(sequence))
        for member in self.prefilling.values():
            if member.target - member.computed > tokens:
                member.overtaken += tokens
                patience = min(patience, self._patience_of(member))
        self.members[sequence.id] = self.prefilling[sequence.id] = sequence
        self.pending_tokens += tokens
        self._patience = patience
        self.watch(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Remove a sequence that ends, leaves or is preempted; called before its state changes."""
        del self.members[sequence.id]
        self.starving.pop(sequence.id, None)
        sequence.extend_at = NEVER  # steps that run before its FILTER must not ask for blocks
        if self.prefilling.pop(sequence.id, None) is not None:
            self.pending_tokens -= sequence.target - sequence.computed
        else:
            del self.running[sequence.id]

    def prefill(self, sequence: Sequence, computed: int, sampled: bool) -> None:
        """Note that a step computed a chunk of a prompt; `sampled`: the last one, with a token."""
        done = sequence.target if sampled else min(computed, sequence.target)
        self.pending_tokens -= done - sequence.computed
        sequence.computed = done
        self._memory.publish(sequence)
        if sampled:
            sequence.advance(SequenceEvent.COMPUTE)
            self.running[sequence.id] = self.prefilling.pop(sequence.id)
            self._memory.settle(sequence)

    def watch(self, sequence: Sequence) -> None:
        """Set the length at which `sequence` asks for more blocks."""
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
        """Forget all sequences; for a shard that has died."""
        self.members.clear()
        self.starving.clear()
        self.prefilling.clear()
        self.running.clear()
        self.pending_tokens = 0
        self._patience = NEVER

    def check(self) -> None:
        """Raise AssertionError if the accounting is wrong."""
        prefilling = {s.id for s in self.members.values() if s.state is SequenceState.PREFILLING}
        if prefilling != self.prefilling.keys():
            raise AssertionError(f"{prefilling} prefill, {list(self.prefilling)} are noted")
        if self.running.keys() != self.members.keys() - prefilling:
            raise AssertionError("not every member either prefills or runs")
        if any(self._patience > self._patience_of(s) for s in self.prefilling.values()):
            raise AssertionError("a prompt may be passed by more than it has patience for")
        pending = sum(s.target - s.computed for s in self.prefilling.values())
        if pending != self.pending_tokens:
            raise AssertionError(f"{pending} tokens are pending, {self.pending_tokens} counted")
        for sequence in self.members.values():
            if sequence.state not in (SequenceState.PREFILLING, SequenceState.RUNNING):
                raise AssertionError(f"{sequence} is a member of the batch")
            if sequence.computed >= sequence.extend_at and sequence.id not in self.starving:
                raise AssertionError(f"{sequence} runs out of blocks and nobody knows")
        if not self.starving.keys() <= self.members.keys():
            raise AssertionError("someone starves outside the batch")
