"""Runs text models through transformers, for types of which we have no model of our own.

There are three ways to run a causal model. Each is compared at load with a plain forward pass over
the whole sequence, in float32 on a small twin, and the first that agrees is used (`probe.py`).

paged      one flat forward for all rows, our paged attention registered with transformers
cached     a forward per row, over a cache object of transformers for each
recompute  a forward per row over its whole sequence, for models without a usable cache

Ranks divide models in the paged way alone (`division.py`): only there does a plan say all that they
need to know of sequences. Encoder-decoder models are run by `seq2seq.py`. Only this room of the
backend imports transformers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tgi_trio.errors import ConfigurationError
from tgi_trio.ipc.startup import BLOCK_SIZE, ShardInfo, WarmupRequest, WarmupResult
from tgi_trio.model.config import ModelConfig
from tgi_trio.shard.adapter_host import AdapterHost
from tgi_trio.shard.contract import (
    RowResult,
    ShardSequence,
    StepPlan,
    StepResult,
)
from tgi_trio.shard.loop.soundness import prove_by_step
from tgi_trio.shard.machine.device import name_device
from tgi_trio.shard.machine.device_memory import free_bytes
from tgi_trio.shard.machine.kv_sizing import size_cache
from tgi_trio.shard.plan_parts import cut_plan, prompt_span, slice_plan
from tgi_trio.shard.prefixes.host_copies import HostCopies
from tgi_trio.shard.prefixes.kept_prefixes import Prefixes, RankPrefixes
from tgi_trio.shard.runner import Computed, Pending
from tgi_trio.shard.sampling.decoder_sampler import DecoderSampler
from tgi_trio.shard.torch_backend.fallback.loading import load_model
from tgi_trio.shard.torch_backend.fallback.modes import ExecutionMode
from tgi_trio.shard.torch_backend.fallback.probe import choose_way
from tgi_trio.shard.torch_backend.fallback.proving import find_undivided, prove_parts
from tgi_trio.shard.torch_backend.fallback.seq2seq import EncoderDecoderWay
from tgi_trio.shard.torch_backend.models.decoder import Ranks
from tgi_trio.shard.torch_backend.prefix_parts import find_parts
from tgi_trio.shard.torch_backend.prompt_logprobs import prompt_values, rows_at_once
from tgi_trio.shard.torch_backend.warm_up import warm_up_plan

if TYPE_CHECKING:
    from tgi_trio.shard.sampling.base import RowSampler


_NO_IMAGES = "images of this model are not served: transformers computes its text as a whole"


class FallbackRunner:
    """A transformers model behind the Runner protocol."""

    def __init__(
        self,
        way: ExecutionMode,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        sampler: RowSampler,
        load_ns: int,
        ranks: Ranks | None = None,
    ) -> None:
        """`ranks`: the others, of which each has its part of the model, as `way` has this one's."""
        self._ranks = ranks
        self.way = way
        self.device = device
        self.sampler = sampler
        text = way.model.config.get_text_config(decoder=True)
        self._info = ShardInfo(
            vocab_size=int(text.vocab_size),
            block_size=BLOCK_SIZE,
            layers=int(getattr(text, "num_hidden_layers", 0)),
            kv_bytes_per_token=way.kv_bytes_per_token,
            max_positions=config.max_positions,
            eos_ids=config.eos_ids,
            dtype=str(dtype).removeprefix("torch."),
            device=str(device),
            device_name=name_device(str(device)),
            backend=f"transformers, {way.name}",
            load_ns=load_ns,
            prefix_reuse=way.prefix_reuse,
            undivided="" if ranks else find_undivided(way),
        )

    @staticmethod
    def load(
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        sampler: RowSampler,
        trust_remote_code: bool = False,
        ranks: Ranks | None = None,
    ) -> FallbackRunner:
        """Load through transformers; raises ModelLoadError if that cannot load it as a text model.

        `trust_remote_code`: the folder's own code for its model type may be run. With `ranks`, this
        rank's part is loaded, and models are refused for which that is not possible.
        """
        began = time.monotonic_ns()
        model = load_model(config, dtype, device, trust_remote_code, ranks)
        way: ExecutionMode
        if ranks is not None:
            way = prove_parts(model, ranks)
        elif model.config.is_encoder_decoder:
            way = EncoderDecoderWay(model)
            sampler = DecoderSampler(sampler, way.start_token)
        else:
            way = choose_way(model)
        load_ns = time.monotonic_ns() - began
        return FallbackRunner(
            way,
            config,
            dtype=dtype,
            device=device,
            sampler=sampler,
            load_ns=load_ns,
            ranks=ranks,
        )

    @property
    def info(self) -> ShardInfo:
        return self._info

    @property
    def adapters(self) -> AdapterHost | None:
        return None

    @property
    def prefixes(self) -> Prefixes:
        return RankPrefixes(lambda: find_parts(self.way.kv_cache), self._least)

    @property
    def _least(self) -> Callable[[int], int] | None:
        """What returns the least of all ranks' numbers; None: there is one rank."""
        return None if self._ranks is None else partial(self._ranks.least, device=self.device)

    @property
    def host_copies(self) -> HostCopies | None:
        return None

    @torch.inference_mode()
    def warm_up(self, request: WarmupRequest) -> WarmupResult:
        """Size and allocate the KV cache; raises ConfigurationError if not one sequence fits."""
        began = time.monotonic_ns()
        activation = 0
        largest = warm_up_plan(request, self._info, self.device)
        if largest is not None:
            plan = largest.plan
            self.way.allocate(largest.blocks)
            nothing = [np.empty(0, dtype=np.int64) for _ in plan.rows]
            activation = largest.measure(self.device, lambda: self._discard(plan, nothing))
            self.way.allocate(0)  # before the real cache: both may not fit
        size = size_cache(
            request,
            self._info,
            lambda: free_bytes(self.device, self._ranks.size if self._ranks else 1),
            activation,
            host=self.device.type == "cpu",
        )
        blocks = size.blocks
        if least := self._least:  # every rank's cache has as many blocks
            blocks = least(blocks)
        self.way.allocate(blocks)
        kv_bytes = blocks * BLOCK_SIZE * self._info.kv_bytes_per_token
        return WarmupResult(
            blocks=blocks,
            block_size=BLOCK_SIZE,
            weight_bytes=sum(p.nbytes for p in self.way.model.parameters()),
            activation_bytes=activation,
            kv_bytes=kv_bytes,
            spare_bytes=max(0, size.spare - kv_bytes),
            warmup_ns=time.monotonic_ns() - began,
        )

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        began = time.monotonic_ns()
        results = [RowResult() for _ in plan.rows]
        if plan.features is not None:
            places = np.searchsorted(plan.query_starts, plan.features.places, side="right")
            for index in set((places - 1).tolist()):
                results[index].fault = _NO_IMAGES
        plan = self._prompts_ahead(plan, results)
        predicts = self.way.predicts_prompt
        wanted = [_list_wanted(plan, i, predicts) for i in range(len(plan.rows))]
        outcomes = self.way.forward(plan, wanted)
        sampled: list[int] = []
        last: list[torch.Tensor] = []
        for index, outcome in enumerate(outcomes):
            if isinstance(outcome, str) or results[index].fault is not None:
                results[index].fault = results[index].fault or str(outcome)
                continue
            logits = outcome[:, : self._info.vocab_size].float()
            _add_prompt_values(results[index], plan, index, logits, predicts)
            if plan.samples[index]:
                sampled.append(index)
                last.append(logits[-1])
        chosen = time.monotonic_ns()
        if sampled:
            rows = self.sampler.choose(torch.stack(last), [plan.rows[i] for i in sampled])
            for index, result in zip(sampled, rows.rows, strict=True):
                result.prompt_logprobs = results[index].prompt_logprobs
                result.prompt_tops = results[index].prompt_tops
                results[index] = result
        return StepResult.of(results, chosen - began, time.monotonic_ns() - chosen)

    def runs_ahead(self, plan: StepPlan) -> bool:
        return False

    def launch(self, plan: StepPlan) -> Pending:
        return Computed(self.step(plan))

    def drafter(self, most: int) -> None:
        """Return None: models in transformers verify no drafts here."""

    def prepare(self, sequence: ShardSequence | None) -> bool:
        return self.sampler.prepare(sequence)

    def drop(self, sequence: ShardSequence) -> None:
        self.way.drop(sequence)
        self.sampler.drop(sequence)

    def prove_sound(self) -> None:
        prove_by_step(self._prove_step, self._info.vocab_size)

    def _prove_step(self, plan: StepPlan) -> StepResult:
        """Compute a plan, then drop its rows."""
        result = self.step(plan)
        for row in plan.rows:
            self.drop(row)
        return result

    def _prompts_ahead(self, plan: StepPlan, results: list[RowResult]) -> StepPlan:
        """Bound the memory for prompts' logits; return the plan that is left to compute.

        If rows request log-probabilities of more prompt tokens than there may be logits in memory,
        all but the last tokens of these rows are computed here, piece by piece, and their values
        are added to `results`.
        """
        spans = [prompt_span(plan, i) for i in range(len(plan.rows))]
        most = rows_at_once(self._info.vocab_size)
        if not self.way.predicts_prompt or sum(b - a for a, b in filter(None, spans)) <= most:
            return plan
        ends = np.diff(plan.query_starts).astype(np.int64)
        firsts = np.zeros_like(ends)
        for index in (i for i, span in enumerate(spans) if span is not None):
            row, firsts[index] = slice_plan(plan, index, index + 1), ends[index] - 1
            for begin in range(0, int(firsts[index]), most):
                end = min(begin + most, int(firsts[index]))
                piece = cut_plan(row, np.array([begin]), np.array([end]))
                outcome = self.way.forward(piece, [_list_wanted(piece, 0, True)])[0]
                if isinstance(outcome, str):
                    results[index].fault = outcome
                    break
                logits = outcome[:, : self._info.vocab_size].float()
                _add_prompt_values(results[index], piece, 0, logits, True)
        return cut_plan(plan, firsts, ends)

    def _discard(self, plan: StepPlan, nothing: list[Any]) -> None:
        """Run a warm-up step, then drop its synthetic rows."""
        for outcome in self.way.forward(plan, nothing):
            if isinstance(outcome, str):
                raise ConfigurationError(f"The model cannot run the warm-up step: {outcome}")
        for row in plan.rows:
            self.way.drop(row)


def _list_wanted(
    plan: StepPlan, index: int, predicts_prompt: bool
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return which of a row's query tokens need logits, as ascending offsets within the row."""
    span = prompt_span(plan, index) if predicts_prompt else None
    offsets = np.arange(span[1] - span[0], dtype=np.int64) if span else np.empty(0, np.int64)
    count = int(plan.query_starts[index + 1] - plan.query_starts[index])
    if plan.samples[index] and (len(offsets) == 0 or offsets[-1] != count - 1):
        offsets = np.append(offsets, count - 1)
    return offsets


def _add_prompt_values(
    result: RowResult, plan: StepPlan, index: int, logits: torch.Tensor, predicts_prompt: bool
) -> None:
    """Add the log-probabilities of a row's prompt tokens, from its first logits, to its result."""
    span = prompt_span(plan, index)
    if span is None:
        return
    (first, end), row = span, plan.rows[index]
    values, tops = [math.nan] * (end - first), list[list[tuple[int, float]]]()
    if predicts_prompt:
        targets = torch.from_numpy(row.token_ids[first + 1 : end + 1].astype(np.int64))
        values, tops = prompt_values(logits[: end - first], targets, row.sampling.prompt_top_n)
    if first == 0:  # nothing predicts the first token
        values, tops = [math.nan, *values], [[], *tops] if tops else []
    result.prompt_logprobs = [*result.prompt_logprobs, *values]
    result.prompt_tops = [*result.prompt_tops, *tops]
