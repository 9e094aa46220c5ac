"""The scheduler's settings."""

from __future__ import annotations

from dataclasses import dataclass

from tgi_trio.model.image_families import ImageAttention


@dataclass(frozen=True)
class SchedulingLimits:
    """The scheduler's settings, from flags and the shard's warm-up reply."""

    blocks: int  # KV blocks of the shard, block 0 included (it is never handed out)
    block_size: int  # tokens per KV block
    max_batch_size: int | None  # most sequences in the batch; None: as many as fit
    max_batch_prefill_tokens: int  # prompts are admitted up to this many uncomputed tokens
    max_batch_total_tokens: int  # most KV tokens in use; 0: as many as the blocks hold
    max_total_tokens: int  # longest sequence; enforced by validation, here for the record
    waiting_served_ratio: float  # queued per generating sequence at which prompts get full steps
    max_waiting_tokens: int  # steps a request may wait in the queue before prompts get full steps
    max_queued_requests: int
    max_queued_tokens: int  # prompt tokens of all queued requests
    token_budget: int  # tokens a step may compute at most
    reserve: bool  # True: blocks for prompt and max_new_tokens at once; False: grow by EXTEND
    # (always False in a server; `bench.schedule.policies` compares it with True)
    prefix_caching: bool
    state_slots: int = 0  # for recurrent states, without slot 0 (never granted); 0: no states
    host_blocks: int = 0  # copies of evicted prefixes' blocks that the shard's host memory holds
    host_slots: int = 0  # likewise, of snapshots of states
    speculate: int = 0  # tokens the shard may draft per step; they need KV room too
    skip_limit: int = 16  # how many later requests may pass one that does not fit yet
    ask_ahead: int = 16  # tokens of room left at which a sequence is granted more blocks
    grant_ahead: int = 64  # tokens of room it is granted then
    stretch: float = 2.0  # how many times as long prompts may make a step, while others generate
    target_itl: float = 0.05  # seconds that a step may take in any case while requests wait
    target_ttft: float | None = None  # seconds to first token; None: derived from prompts' times
    image_sight: ImageAttention = "causal"  # which tokens of prompts with images attend both ways
    patience: int = 64  # how many later requests lateness or priorities may put before one

    @property
    def usable_blocks(self) -> int:
        """Number of blocks that may be handed out."""
        usable = self.blocks - 1
        if self.max_batch_total_tokens > 0:
            usable = min(usable, -(-self.max_batch_total_tokens // self.block_size))
        return usable

    @property
    def prompt_blocks(self) -> int:
        """Blocks of as many prompt tokens as are admitted at a time."""
        return -(-self.max_batch_prefill_tokens // self.block_size)

    @property
    def most_ahead(self) -> int:
        """Blocks that are copied to the host's memory before they have to go: no large part of
        either memory, since it has them twice then.
        """
        return min(self.usable_blocks, self.host_blocks) // 4

    @property
    def ask_tokens(self) -> int:
        """`ask_ahead`, plus drafts for the two steps that a grant may take to arrive."""
        return self.ask_ahead + 2 * self.speculate

    @property
    def grant_tokens(self) -> int:
        """`grant_ahead`, but at least twice `ask_tokens`."""
        return max(self.grant_ahead, 2 * self.ask_tokens)
