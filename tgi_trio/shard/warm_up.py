"""Sizing the KV cache: a synthetic step that shows what activations take, then the arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from tgi_trio.errors import ConfigurationError
from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.shard.kv_cache import BLOCK_SIZE
from tgi_trio.shard.memory import free_bytes, peak_bytes, reset_peak
from tgi_trio.shard.step import ModelInfo, Sequence, StepPlan, WarmupRequest

_MEMORY_SHARE = 0.9  # of what is free after the warm-up step
# On a CPU activations grow with the tokens of a step and nothing else, so a part of the largest
# step shows the whole; running all of it would cost seconds at every start.
_CPU_PROBE_TOKENS = 512
_CPU_LEAST_TOKENS = 65536
_CPU_SEQUENCES = 16
_DEFAULT_LENGTH = 4096  # where neither the model nor a flag bounds a sequence


@dataclass(frozen=True, slots=True)
class LargestStep:
    """A synthetic step and what its result must be multiplied by."""

    plan: StepPlan
    blocks: int
    factor: float

    def measure(self, device: torch.device, run: Callable[[], None]) -> int:
        """Run the step; return the bytes that activations of the largest step take."""
        before = reset_peak(device)
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return int(max(0, peak_bytes(device) - before) * self.factor)


def warm_up_plan(
    request: WarmupRequest, info: ModelInfo, device: torch.device
) -> LargestStep | None:
    """Return the largest step the limits allow, or the part of it a CPU needs to run."""
    largest = request.max_prefill_tokens
    tokens = min(largest, _CPU_PROBE_TOKENS) if device.type == "cpu" else largest
    longest = min(filter(None, (request.max_total_tokens, info.max_positions, tokens)), default=0)
    if longest <= 0:
        return None
    counts = [longest] * (tokens // longest)
    if tokens % longest:
        counts.append(tokens % longest)
    widths = [-(-count // BLOCK_SIZE) for count in counts]
    tables = np.zeros((len(counts), max(widths)), dtype=np.int32)
    slots, block = [], 1
    for row, (count, width) in enumerate(zip(counts, widths, strict=True)):
        tables[row, :width] = np.arange(block, block + width)
        slots.append(block * BLOCK_SIZE + np.arange(count))
        block += width
    plan = StepPlan(
        rows=[_sequence(i, count) for i, count in enumerate(counts)],
        token_ids=np.arange(tokens, dtype=np.int64) % max(1, info.vocab_size),
        positions=np.concatenate([np.arange(count) for count in counts]),
        kv_slots=np.concatenate(slots).astype(np.int64),
        query_starts=np.concatenate(([0], np.cumsum(counts))).astype(np.int32),
        context_lengths=np.array(counts, dtype=np.int32),
        block_tables=tables,
        samples=np.zeros(len(counts), dtype=np.bool_),
    )
    return LargestStep(plan, block, largest / tokens)


def _sequence(index: int, count: int) -> Sequence:
    ids = np.zeros(count, dtype=np.int32)
    return Sequence(index, ids, count, count, 0, [], 0, 0, SamplingParameters())


def longest_sequence(request: WarmupRequest, info: ModelInfo) -> int:
    """Return the tokens that the longest sequence may have."""
    return request.max_total_tokens or info.max_positions or _DEFAULT_LENGTH


def kv_tokens(
    request: WarmupRequest,
    info: ModelInfo,
    device: torch.device,
    activation: int,
    ranks: int = 1,
) -> tuple[int, int]:
    """Return (KV tokens to allocate, free bytes they come from).

    Never more than `max_batch_total_tokens` where that is given. On a CPU, where all of memory is
    seldom ours, otherwise enough for sixteen of the longest sequences; `ranks` share its memory.
    Raises ConfigurationError when one longest sequence does not fit.
    """
    free = free_bytes(device) // (ranks if device.type == "cpu" else 1)
    spare = max(0, int(free * _MEMORY_SHARE) - activation)
    fits = spare // info.kv_bytes_per_token
    longest = longest_sequence(request, info)
    if request.max_batch_total_tokens:
        wanted = request.max_batch_total_tokens
        if wanted > fits:
            raise ConfigurationError(
                _too_small(wanted, fits, spare, info, "--max-batch-total-tokens")
            )
    elif device.type == "cpu":
        wanted = min(fits, max(_CPU_SEQUENCES * longest, _CPU_LEAST_TOKENS))
    else:
        wanted = fits
    needed = min(longest, request.max_batch_total_tokens or longest)
    if wanted < needed:
        raise ConfigurationError(_too_small(needed, fits, spare, info, "--max-total-tokens"))
    return wanted, spare


def _too_small(wanted: int, fits: int, spare: int, info: ModelInfo, flag: str) -> str:
    return (
        f"The KV cache would need {wanted} tokens of {info.kv_bytes_per_token} bytes, but the "
        f"{spare >> 20} MiB left hold {fits}; lower {flag}, or use a smaller --dtype."
    )
