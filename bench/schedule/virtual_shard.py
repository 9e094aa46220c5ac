"""A shard that computes nothing: it takes commands, counts tokens and says how long a step takes.

Times are virtual, from a cost model of an accelerator, so hours of service pass in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tgi_trio.ipc.messages import StepReport
from tgi_trio.router.scheduling import Command, Extend, Filter, Limits, Prefill


@dataclass(frozen=True)
class CostModel:
    """Time of one forward step: an 8-billion-parameter model in bfloat16 on an 80 GB card.

    A step reads all weights once (or is bound by arithmetic when it has many tokens) and reads
    the KV of every context it attends to.
    """

    fixed_s: float = 0.5e-3  # launches, sampling
    weights_s: float = 16e9 / 3.0e12  # 16 GB at 3.0 TB/s
    token_s: float = 2 * 8e9 / 550e12  # 2 operations a parameter at 550 TFLOP/s
    kv_token_s: float = 131_072 / 3.0e12  # 128 KiB of K and V per token
    attend_s: float = 4 * 32 * 4096 / 400e12  # per pair of query and context token, in prefill

    def step_s(self, tokens: int, kv_tokens: int, pairs: int) -> float:
        """Seconds for `tokens` new tokens over `kv_tokens` of context read."""
        compute = max(self.weights_s, tokens * self.token_s)
        return self.fixed_s + compute + kv_tokens * self.kv_token_s + pairs * self.attend_s


@dataclass(slots=True)
class Row:
    """One sequence on the shard."""

    length: int  # known tokens
    computed: int
    room: int  # KV tokens its blocks hold
    left: int  # tokens until it ends, by EOS or length


@dataclass
class VirtualShard:
    """Keeps the wire's promises towards a Scheduler."""

    block_size: int
    cost: CostModel
    outputs: dict[int, list[int]]  # sequence: all tokens it generates
    shortest_first: bool = True  # among prompts; otherwise in order of admission
    budget: int = 0
    applied: int = 0
    steps: int = 0
    rows: dict[int, Row] = field(default_factory=dict)
    stalled: int = 0
    prefilled: int = 0

    def apply(self, commands: Iterable[Command]) -> None:
        """Take commands in order."""
        for command in commands:
            self.applied = command.number
            match command:
                case Limits(token_budget=budget):
                    self.budget = budget
                case Prefill(rows=rows):
                    for row in rows:
                        generated = len(row.token_ids) - row.prompt_length
                        self.rows[row.sequence] = Row(
                            len(row.token_ids),
                            row.cached_length,
                            len(row.block_ids) * self.block_size,
                            len(self.outputs[row.sequence]) - generated,
                        )
                case Extend(rows=extends):
                    for extend in extends:
                        if (held := self.rows.get(extend.sequence)) is not None:
                            held.room += len(extend.block_ids) * self.block_size
                case Filter(sequences=sequences):
                    for sequence in sequences:
                        self.rows.pop(sequence, None)

    def step(self) -> tuple[StepReport, float]:
        """Run one step; returns its report and its seconds."""
        self.steps += 1
        report = StepReport(self.steps, self.applied)
        decodes = [(i, r) for i, r in self.rows.items() if r.computed == r.length - 1]
        budget = self.budget - len(decodes)
        tokens = kv = pairs = 0
        work: list[tuple[int, Row, int]] = []
        for sequence, row in decodes:
            if row.computed < row.room:
                work.append((sequence, row, 1))
                tokens += 1
                kv += row.length
            else:
                report.stalled_rows += 1
        report.decode_rows = len(work)
        if len(decodes) < len(self.rows) and budget > 0:
            prompts = [(i, r) for i, r in self.rows.items() if r.computed < r.length - 1]
            if self.shortest_first:
                prompts.sort(key=lambda item: item[1].length - item[1].computed)
            for sequence, row in prompts:
                chunk = min(budget, row.length - row.computed)
                if chunk <= 0:
                    break
                budget -= chunk
                tokens += chunk
                kv += row.computed
                pairs += chunk * (row.computed + chunk // 2)
                report.prefill_tokens += chunk
                work.append((sequence, row, chunk))
        for sequence, row, count in work:
            self._advance(report, sequence, row, count)
        self.stalled += report.stalled_rows
        self.prefilled += report.prefill_tokens
        report.held = len(self.rows)
        seconds = self.cost.step_s(tokens, kv, pairs) if tokens else 0.0
        report.forward_ns = int(seconds * 1e9)
        return report, seconds

    def _advance(self, report: StepReport, sequence: int, row: Row, count: int) -> None:
        row.computed += count
        sampled = row.computed == row.length
        finish = 0
        if sampled:
            outputs = self.outputs[sequence]
            report.token_ids.append(outputs[len(outputs) - row.left])
            report.logprobs.append(0.0)
            report.top_count.append(0)
            row.length += 1
            row.left -= 1
            finish = 2 if row.left == 0 else 0
        report.sequence.append(sequence)
        report.computed.append(row.computed)
        report.token_count.append(int(sampled))
        report.prompt_count.append(0)
        report.finish.append(finish)
        if finish:
            del self.rows[sequence]
