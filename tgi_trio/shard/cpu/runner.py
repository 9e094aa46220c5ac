"""The runner of the CPU backend: a plan in, chosen tokens out."""

from __future__ import annotations

import math
import time
import weakref

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.cpu.forward import Forward, Tokens
from tgi_trio.shard.kv_sizing import kv_tokens, longest_sequence
from tgi_trio.shard.memory import free_bytes
from tgi_trio.shard.model_config import ModelConfig
from tgi_trio.shard.sampling import RowSampler
from tgi_trio.shard.speculation import verify
from tgi_trio.shard.step import (
    BLOCK_SIZE,
    ModelInfo,
    RowResult,
    Sequence,
    StepPlan,
    StepResult,
    WarmupRequest,
    WarmupResult,
    prompt_span,
)

_LOGITS_AT_ONCE = 64  # rows of prompt logits that are computed together


class CpuRunner:
    """A model in kernels; see the Runner protocol. `close` ends its threads."""

    def __init__(
        self,
        config: ModelConfig,
        forward: Forward,
        *,
        dtype: str,
        sampler: RowSampler,
        load_ns: int = 0,
    ) -> None:
        self.sampler = sampler
        self._forward = forward
        self.close = weakref.finalize(self, forward.close)
        spec, team = forward.spec, forward.team
        self._info = ModelInfo(
            vocab_size=config.vocab_size,
            block_size=BLOCK_SIZE,
            layers=len(spec.layers),
            kv_bytes_per_token=forward.program.kv_bytes_per_token,
            max_positions=config.max_positions,
            eos_ids=config.eos_ids,
            dtype=dtype,
            device="cpu",
            backend=f"numba ({forward.variant.instructions}, {len(team.cores)} threads)",
            load_ns=load_ns,
            drafts=True,
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    def warm_up(self, request: WarmupRequest) -> WarmupResult:
        """Make room for the largest step, and the KV cache.

        Raises ConfigurationError when memory does not hold even one sequence.
        """
        began = time.monotonic_ns()
        forward, program = self._forward, self._forward.program
        longest = longest_sequence(request, self._info)
        wanted = max(request.max_batch_size, _LOGITS_AT_ONCE)
        activation = forward.reserve(request.max_prefill_tokens, wanted, longest)
        tokens, spare = kv_tokens(request, self._info, free_bytes(), activation, host=True)
        blocks = 1 + math.ceil(tokens / BLOCK_SIZE)  # block 0 is never handed out
        kv_bytes = program.allocate_kv(blocks)
        return WarmupResult(
            blocks=blocks,
            block_size=BLOCK_SIZE,
            weight_bytes=program.weight_bytes,
            activation_bytes=activation,
            kv_bytes=kv_bytes,
            spare_bytes=max(0, spare - kv_bytes),
            warmup_ns=time.monotonic_ns() - began,
        )

    def step(self, plan: StepPlan) -> StepResult:
        began = time.monotonic_ns()
        sampled = np.flatnonzero(plan.samples)
        places = verify.choice_places(plan, sampled).astype(np.int32)
        logits = self._forward.run(Tokens.of(plan), places)
        chosen = time.monotonic_ns()
        results = [RowResult() for _ in plan.rows]
        if len(sampled):
            rows = verify.choose(self.sampler, logits, plan, sampled)
            for i, row in zip(sampled.tolist(), rows, strict=True):
                results[i] = row
        ended = time.monotonic_ns()
        for i, result in enumerate(results):
            result.prompt_logprobs = self._prompt_logprobs(plan, i)
        prompts_ns = time.monotonic_ns() - ended
        return StepResult(results, chosen - began + prompts_ns, ended - chosen)

    def prepare(self, sequence: Sequence) -> bool:
        return self.sampler.prepare(sequence)

    def drop(self, sequence: Sequence) -> None:
        self.sampler.drop(sequence)

    def _prompt_logprobs(self, plan: StepPlan, index: int) -> list[float]:
        """Return what the row's prompt tokens get in this step; see `PromptLogprobs`."""
        span = prompt_span(plan, index)
        if span is None:
            return []
        (first, end), start = span, int(plan.query_starts[index])
        targets = plan.rows[index].token_ids[first + 1 : end + 1]
        values = [math.nan] if first == 0 else []
        for begin in range(0, len(targets), _LOGITS_AT_ONCE):
            part = targets[begin : begin + _LOGITS_AT_ONCE]
            wanted = np.arange(start + begin, start + begin + len(part), dtype=np.int32)
            values += _log_softmax_at(self._forward.logits(wanted), part)
        return values


def _log_softmax_at(logits: NDArray[np.float32], ids: NDArray[np.int32]) -> list[float]:
    """Return the log-softmax of one entry of each row: logits [n, vocabulary], ids [n]."""
    best = logits.max(axis=1, keepdims=True)
    masses = np.exp(logits - best).sum(axis=1, dtype=np.float64)
    own = logits[np.arange(len(ids)), ids] - best[:, 0]
    result: list[float] = (own - np.log(masses)).tolist()
    return result
