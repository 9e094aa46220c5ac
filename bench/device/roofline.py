"""The least that a step must move and multiply, and what the device manages of either.

A decode step reads every weight that its tokens use and every K and V that they see, or that an
index lets them see; a prefill multiplies every weight by every token. The state of a row is read
and written once in a step, and moved by each of its tokens. All is counted from the model's spec
alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.device.attended import Kept, list_kept
from bench.device.recurring import Recurring, find_recurring
from bench.device.timing import Timer
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.matrices.layer_work import head_work, layer_work
from tgi_trio.model.specs.decoder import DecoderSpec

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
class LayerSize:
    """Numbers of a layer that count; parameters of matrices alone."""

    dense: int  # that multiply every token
    router: int
    expert: int  # of each expert
    experts: int
    used: int  # by a token
    kept: tuple[Kept, ...]
    recurring: Recurring

    @classmethod
    def of(cls, spec: DecoderSpec, index: int, work: int) -> LayerSize:
        """Return those of layer `index`, whose matrices multiply a token by `work` weights."""
        layer, hidden = spec.layers[index], spec.hidden_size
        kept, experts = tuple(list_kept(spec, layer)), layer.experts
        recurring = find_recurring(layer)
        if experts is None:
            return cls(work, 0, 0, 0, 0, kept, recurring)
        expert = (3 if spec.gated else 2) * hidden * experts.width
        router = hidden * experts.count
        dense = work - router - experts.per_token * expert
        return cls(dense, router, expert, experts.count, experts.per_token, kept, recurring)

    def expected_experts(self, tokens: int) -> float:
        """Return how many experts some tokens use, if each takes any with equal odds."""
        if not self.experts:
            return 0.0
        return self.experts * (1 - (1 - self.used / self.experts) ** tokens)


@dataclass(frozen=True, slots=True)
class Size:
    """Numbers of a model that count."""

    layers: tuple[LayerSize, ...]
    head: int

    @classmethod
    def of(cls, config: ModelConfig) -> Size:
        """Return them for a model of the generic decoder."""
        spec = decoder_spec(config)
        if spec is None:
            raise ValueError(f"the generic decoder has no model type {config.model_type}")
        each = enumerate(layer_work(spec))
        return cls(tuple(LayerSize.of(spec, i, work) for i, work in each), head_work(spec))

    def step(
        self, rows: int, queries: int, context: int, itemsize: int, stored: float | None = None
    ) -> Work:
        """Return the work of `rows` with `queries` tokens each, the last of which sees `context`.

        `itemsize`: bytes of a number; `stored`: of a linear layer's weight, if not that. Logits are
        of the rows' last tokens alone. The tokens of a row are taken to read the same of the cache.
        """
        weight = itemsize if stored is None else stored
        tokens, seen = rows * queries, context - (queries - 1) / 2  # keys, on the average
        moved, operations = weight * self.head, 2.0 * rows * self.head
        for layer in self.layers:
            used = layer.dense + layer.router + layer.used * layer.expert
            attended = sum(each.multiplied * each.read(seen) for each in layer.kept)
            operations += 2 * tokens * (used + attended) + tokens * layer.recurring.operations
            cached = sum(
                rows * (each.read(context) * each.numbers + queries * each.written)
                for each in layer.kept
            )
            moved += itemsize * (layer.router + cached)
            moved += rows * layer.recurring.moved(itemsize) + 4 * layer.recurring.gates
            moved += weight * (layer.dense + layer.expected_experts(tokens) * layer.expert)
        return Work(moved, operations)


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
