"""TGI's batching loop in virtual time, as its behaviour is described: paged, chunked, cached.

One call in flight; an arrival during it waits for its end. A call that brings new requests is a
prefill of everything (chunks and decodes together), and a decode of everything follows it. Blocks
for prompt and `max_new_tokens` are reserved at admission, first in first out, and the first one
that does not fit holds up all behind it. Prompts are cached when their request ends.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from bench.schedule.virtual_shard import CostModel
from bench.schedule.workload import Job, Served
from tgi_trio.router.scheduling.blocks import BlockAllocator
from tgi_trio.router.scheduling.prefix_cache import PrefixCache
from tgi_trio.router.scheduling.prefix_nodes import Node

CALL_S = 0.35e-3  # gRPC round trip and the work around it, per call


@dataclass(eq=False, slots=True)
class Entry:
    """One scheduled request."""

    job: Job
    node: Node
    blocks: list[int]
    shared: int  # blocks
    computed: int
    chunk: int  # tokens of its next step; 1 once it decodes
    emitted: int = 0

    @property
    def prompt(self) -> int:
        return len(self.job.prompt)


class Tgi:
    """State of router and shard."""

    def __init__(self, blocks: int, block_size: int, prefill_tokens: int, cost: CostModel) -> None:
        self.block_size = block_size
        self.prefill_tokens = prefill_tokens
        self.cost = cost
        self.allocator = BlockAllocator(blocks - 1)
        self.cache = PrefixCache(block_size)
        self.queue: deque[Job] = deque()
        self.running: list[Entry] = []
        self.now = 0.0

    def run(self, jobs: list[Job]) -> list[Served]:
        """Serve `jobs`, sorted by arrival; returns one record for each."""
        arriving = deque(jobs)
        served = {job.id: Served(job) for job in jobs}
        while arriving or self.queue or self.running:
            if not self.queue and not self.running:
                self.now = max(self.now, arriving[0].arrival)
            while arriving and arriving[0].arrival <= self.now:
                self.queue.append(arriving.popleft())
            new = self._next_batch()
            if new or self.running:
                had = bool(self.running)
                self.running += new
                if new:
                    self._call(served)
                if (had or not new) and self.running:
                    self._call(served)  # the decode that follows every prefill
            elif self.queue:
                raise RuntimeError("a request can never fit")
        return list(served.values())

    def _next_batch(self) -> list[Entry]:
        budget = self.prefill_tokens - sum(entry.chunk for entry in self.running)
        taken: list[Entry] = []
        used = 0
        while self.queue and budget > used:
            job = self.queue[0]
            if self._has_left(job):
                self.queue.popleft()
                continue
            entry = self._allocate(job)
            if entry is None:
                break
            self.queue.popleft()
            postfix = entry.prompt - entry.computed
            entry.chunk = min(postfix, budget - used)
            used += postfix
            taken.append(entry)
        return taken

    def _allocate(self, job: Job) -> Entry | None:
        need = -(-(len(job.prompt) + job.max_new - 1) // self.block_size)
        key = job.prompt.tobytes()
        match = self.cache.match((0, ""), key, len(job.prompt) // self.block_size)
        short = need - len(match.blocks)
        if short > self.allocator.free + self.cache.evictable - match.evictable:
            return None
        node = self.cache.pin((0, ""), match)
        if short > self.allocator.free:
            self.allocator.give(self.cache.evict(short - self.allocator.free))
        shared = len(match.blocks)
        computed = min(shared * self.block_size, len(job.prompt) - 1)
        return Entry(job, node, match.blocks + self.allocator.take(short), shared, computed, 0)

    def _has_left(self, job: Job) -> bool:
        return job.leaves_after is not None and self.now >= job.arrival + job.leaves_after

    def _call(self, served: dict[int, Served]) -> None:
        """One forward over everything, one token for each whose prompt is complete."""
        tokens = kv = pairs = 0
        for entry in self.running:
            tokens += entry.chunk
            kv += entry.computed
            if entry.computed < entry.prompt:
                pairs += entry.chunk * (entry.computed + entry.chunk // 2)
        self.now += CALL_S + self.cost.step_s(tokens, kv, pairs)
        staying = []
        for entry in self.running:
            entry.computed += entry.chunk
            if entry.computed >= entry.prompt:
                entry.emitted += 1
                gone = self._has_left(entry.job)  # noticed when a token is to be sent
                if not gone:
                    served[entry.job.id].times.append(self.now)
                if gone or entry.emitted == len(entry.job.outputs):
                    self._free(entry)
                    continue
            staying.append(entry)
        self.running = staying
        budget = self.prefill_tokens - (len(staying) - 1)
        for entry in reversed(staying):
            entry.chunk = 1
            left = entry.prompt - entry.computed
            if left > 0:
                entry.chunk = max(1, min(left, budget))
                budget -= entry.chunk

    def _free(self, entry: Entry) -> None:
        whole = len(entry.job.prompt) // self.block_size
        tokens = entry.job.prompt.tobytes()[entry.shared * self.block_size * 4 :]
        own = entry.blocks[entry.shared :]
        node, spare = self.cache.insert(entry.node, tokens, own[: max(0, whole - entry.shared)])
        self.cache.unpin(node)
        self.allocator.give(spare + own[max(0, whole - entry.shared) :])
