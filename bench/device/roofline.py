"""The least that a step must move and multiply, and what the device manages of either.

A decode step reads every weight that its tokens use and every K and V that they see; a prefill
multiplies every weight by every token. Both are counted from the model's configuration alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.device.timing import Timer
from tgi_trio.model.config import ModelConfig

_COPIED = 1 << 30  # bytes of a probe: far beyond any cache
_SIDE = 8192  # of the matrices multiplied


@dataclass(frozen=True, slots=True)
class Work:
    """What a step needs at least."""

    moved: float  # bytes read and written
    operations: float  # multiplications and additions


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What the device does in the same run."""

    bytes_per_second: float
    operations_per_second: float

    def seconds(self, work: Work) -> float:
        """Return the least time that the work can take: memory and matrix units work at once."""
        return max(work.moved / self.bytes_per_second, work.operations / self.operations_per_second)


@dataclass(frozen=True, slots=True)
class Size:
    """Numbers of a model that count; parameters of matrices alone."""

    layers: int
    hidden: int
    query: int  # heads * head_dim
    key: int  # KV heads * head_dim
    attention: int  # parameters of a layer
    expert: int  # parameters of one expert, or of the whole MLP
    experts: int  # of a layer; 1: a dense MLP
    used: int  # by a token
    router: int
    head: int

    @classmethod
    def of(cls, config: ModelConfig) -> Size:
        """Return them for a Llama-like decoder, dense or a mixture."""
        hidden, heads = config.need("hidden_size"), config.need("num_attention_heads")
        dim = config.get("head_dim", hidden // heads)
        query, key = heads * dim, config.get("num_key_value_heads", heads) * dim
        experts = config.get("num_experts", 1)
        inner = config.need("moe_intermediate_size" if experts > 1 else "intermediate_size")
        return cls(
            layers=config.need("num_hidden_layers"),
            hidden=hidden,
            query=query,
            key=key,
            attention=hidden * (query + 2 * key) + query * hidden,
            expert=3 * hidden * inner,
            experts=experts,
            used=config.get("num_experts_per_tok", 1),
            router=hidden * experts if experts > 1 else 0,
            head=hidden * config.vocab_size,
        )

    def expected_experts(self, tokens: int) -> float:
        """Return how many experts of a layer some tokens use, if each takes any with equal odds."""
        return self.experts * (1 - (1 - self.used / self.experts) ** tokens)

    def step(
        self, rows: int, queries: int, context: int, itemsize: int, stored: float | None = None
    ) -> Work:
        """Return the work of `rows` with `queries` tokens each, the last of which sees `context`.

        `itemsize`: bytes of a number; `stored`: of a linear layer's weight, if not that. Logits are
        of the rows' last tokens alone.
        """
        weight = itemsize if stored is None else stored
        tokens = rows * queries
        matrices = self.attention + self.expected_experts(tokens) * self.expert
        used = self.attention + self.router + self.used * self.expert
        seen = context - (queries - 1) / 2  # keys, by a token on the average
        cached = rows * (context + queries) * 2 * self.key  # read, and the new ones written
        return Work(
            moved=itemsize * self.layers * (self.router + cached)
            + weight * self.layers * matrices
            + weight * self.head,
            operations=2 * tokens * self.layers * (used + 2 * seen * self.query)
            + 2 * rows * self.head,
        )


def measure_ceiling(timer: Timer, dtype: torch.dtype, *, small: bool = False) -> Ceiling:
    """Measure the bandwidth of a copy and the rate of a square product in `dtype`.

    Of random numbers, as products of zeros or ones take less power and run at higher clocks.
    `small`: for a dry run.
    """
    side = 64 if small else _SIDE
    source = torch.empty(1 << 16 if small else _COPIED, dtype=torch.uint8, device=timer.device)
    target = torch.empty_like(source)
    copied = timer.best(lambda: target.copy_(source))
    one = torch.empty((side, side), dtype=dtype, device=timer.device).normal_()
    out = torch.empty_like(one)
    multiplied = timer.median(lambda: torch.mm(one, one, out=out))
    return Ceiling(2 * source.numel() / copied, 2 * side**3 / multiplied)
