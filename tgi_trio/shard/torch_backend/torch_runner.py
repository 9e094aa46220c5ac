"""The torch runner: a plan in, chosen tokens out.

`TorchRunner.load` picks the generic decoder where the family table knows the model and the
transformers fallback otherwise; both are runners to the worker loop.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from tgi_trio.errors import ConfigurationError, ModelLoadError
from tgi_trio.shard.attention.choice import capturable_attention, choose_attention
from tgi_trio.shard.attention.interface import PlanLayout
from tgi_trio.shard.attention.reference import ReferenceAttention
from tgi_trio.shard.cores import sensible_threads
from tgi_trio.shard.cuda_graphs import CudaCapture
from tgi_trio.shard.decode_graphs import DecodeGraphs
from tgi_trio.shard.decoder_sampler import DecoderSampler
from tgi_trio.shard.device_memory import free_bytes
from tgi_trio.shard.kv_cache import BLOCK_SIZE, KVCache, KVShape
from tgi_trio.shard.kv_sizing import kv_tokens, longest_sequence
from tgi_trio.shard.logits_processors import Grammars
from tgi_trio.shard.model_config import ModelConfig, compute_dtype, read_config
from tgi_trio.shard.models.decoder import Ranks
from tgi_trio.shard.models.families import decoder_spec
from tgi_trio.shard.models.loading import load_decoder
from tgi_trio.shard.models.t5 import T5Layout
from tgi_trio.shard.models.t5_loading import T5_FAMILIES, load_t5, t5_spec
from tgi_trio.shard.prompt_logprobs import PromptLogprobs
from tgi_trio.shard.sampler import Sampler
from tgi_trio.shard.sampling import RowSampler
from tgi_trio.shard.speculation import verify
from tgi_trio.shard.step import (
    ModelInfo,
    RowResult,
    Runner,
    Sequence,
    StepPlan,
    StepResult,
    WarmupRequest,
    WarmupResult,
)
from tgi_trio.shard.warm_up import warm_up_plan
from tgi_trio.shard.weights import WeightSource


class Model(Protocol):
    """A model whose state is the KV cache alone: the generic decoder, T5."""

    @property
    def kv_shape(self) -> KVShape: ...
    @property
    def needs_lengths(self) -> bool: ...  # forward reads `lengths`
    @property
    def prefix_reuse(self) -> bool: ...  # see ModelInfo
    @property
    def predicts_prompt(self) -> bool: ...  # False: an encoder reads the prompt
    @property
    def capturable(self) -> bool: ...  # decodes run the same kernels whatever the tokens are
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        lengths: torch.Tensor,
        attention: Any,
        batch: Any,
    ) -> torch.Tensor: ...
    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...
    def nbytes(self) -> int: ...


class TorchRunner:
    """A model over paged KV memory; see the Runner protocol."""

    def __init__(
        self,
        model: Model,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device,
        sampler: RowSampler,
        attention: PlanLayout | None = None,
        graphs: DecodeGraphs | None = None,
        ranks: Ranks | None = None,
        load_ns: int = 0,
    ) -> None:
        self._ranks = ranks
        self._graphs = graphs
        self.model = model
        self.config = config
        self.dtype = dtype
        self.device = device
        self.sampler = sampler
        self.attention = attention or ReferenceAttention()
        self.prompt_logprobs = PromptLogprobs(
            model.logits if model.predicts_prompt else None, config.vocab_size
        )
        self._cache: KVCache | None = None  # set by warm_up
        self._kv_shape = model.kv_shape
        self._info = ModelInfo(
            vocab_size=config.vocab_size,
            block_size=BLOCK_SIZE,
            layers=self._kv_shape.layers,
            kv_bytes_per_token=self._kv_shape.bytes_per_token(dtype),
            max_positions=config.max_positions,
            eos_ids=config.eos_ids,
            dtype=str(dtype).removeprefix("torch."),
            device=str(device),
            backend=self.attention.name,
            load_ns=load_ns,
            prefix_reuse=model.prefix_reuse,
            cheap_tokens=_cheap_tokens(device) if model.predicts_prompt else 0,
        )

    @staticmethod
    def load(
        folder: Path,
        *,
        dtype: str | None = None,
        device: str = "cpu",
        ranks: Ranks | None = None,
        threads: int | None = None,
        sampler: RowSampler | None = None,
        grammars: Grammars | None = None,
        cuda_graphs: tuple[int, ...] = (),
    ) -> Runner:
        """Load a folder as written by `save_pretrained`.

        `cuda_graphs`: batch sizes whose decodes are recorded, where device and model allow it.
        `sampler` None: one for the model, which serves `grammars`; without them they are refused.
        `dtype` None or "auto" is the checkpoint's own (float16 becomes float32 on a CPU). With
        `ranks`, this rank's part is loaded. Raises ModelLoadError for files that cannot be used,
        ConfigurationError for settings that cannot.
        """
        began = time.monotonic_ns()
        rank, world_size = (ranks.rank, ranks.size) if ranks else (0, 1)
        if not threads:
            threads = max(1, sensible_threads(folder, torch.get_num_threads()) // world_size)
        torch.set_num_threads(threads)
        config, where = read_config(folder), torch.device(device)
        kind: torch.dtype = getattr(torch, compute_dtype(dtype, config, on_cpu=where.type == "cpu"))
        if sampler is None:
            sampler = Sampler(config.vocab_size, config.eos_ids, where, grammars=grammars)
        if config.model_type in T5_FAMILIES:
            return _load_t5(config, dtype=kind, device=where, sampler=sampler, ranks=ranks)
        spec = decoder_spec(config)
        if spec is None:
            if world_size > 1:
                raise ModelLoadError(
                    f"Model type {config.model_type!r} runs through transformers, which is not "
                    "split over shards here; use --num-shard 1."
                )
            from tgi_trio.shard.models.fallback import FallbackRunner

            return FallbackRunner.load(config, dtype=kind, device=where, sampler=sampler)
        source = WeightSource(
            folder,
            dtype=kind,
            device=where,
            rank=rank,
            world_size=world_size,
            base=spec.names.base,
        )
        with source, torch.inference_mode():
            model = load_decoder(spec, source, ranks)
        return TorchRunner(
            model,
            config,
            dtype=kind,
            device=where,
            sampler=sampler,
            attention=choose_attention(where, kind, model.kv_shape.head_dim),
            graphs=_graphs(model, where, cuda_graphs),
            ranks=ranks,
            load_ns=time.monotonic_ns() - began,
        )

    @property
    def info(self) -> ModelInfo:
        return self._info

    @torch.inference_mode()
    def warm_up(self, request: WarmupRequest) -> WarmupResult:
        """Run a large step in a cache of its own, then allocate the real one.

        Raises ConfigurationError when memory does not hold even one sequence.
        """
        began = time.monotonic_ns()
        largest = warm_up_plan(request, self._info, self.device)
        activation = 0
        if largest is not None:
            plan = largest.plan
            self._cache = self._new_cache(largest.blocks)
            activation = largest.measure(self.device, lambda: self._warm_step(plan))
        self._cache = None  # before the real one: both may not fit
        size = self._ranks.size if self._ranks else 1
        free, host = free_bytes(self.device, size), self.device.type == "cpu"
        tokens, spare = kv_tokens(request, self._info, free, activation, host=host)
        if self._ranks:  # every rank's cache has the same blocks
            tokens = self._ranks.least(tokens, self.device)
        blocks = 1 + math.ceil(tokens / BLOCK_SIZE)  # block 0 is never handed out
        self._cache = self._new_cache(blocks)
        if self._graphs:
            longest = longest_sequence(request, self._info)
            self._graphs.record(self._cache, math.ceil(longest / BLOCK_SIZE))
        return WarmupResult(
            blocks=blocks,
            block_size=BLOCK_SIZE,
            weight_bytes=self.model.nbytes(),
            activation_bytes=activation,
            kv_bytes=self._cache.nbytes,
            spare_bytes=max(0, spare - self._cache.nbytes),
            warmup_ns=time.monotonic_ns() - began,
        )

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        began = time.monotonic_ns()
        hidden = self._forward(plan)
        results = [RowResult() for _ in plan.rows]
        sampled = np.flatnonzero(plan.samples)
        logits = None
        if len(sampled):
            places = verify.choice_places(plan, sampled)
            logits = self.model.logits(_picked(hidden, places))
        self.prompt_logprobs.fill(plan, hidden, results)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        chosen = time.monotonic_ns()
        if logits is not None:
            rows = verify.choose(self.sampler, logits, plan, sampled)
            for index, result in zip(sampled.tolist(), rows, strict=True):
                result.prompt_logprobs = results[index].prompt_logprobs
                result.prompt_tops = results[index].prompt_tops
                results[index] = result
        return StepResult(results, chosen - began, time.monotonic_ns() - chosen)

    def prepare(self, sequence: Sequence) -> bool:
        return self.sampler.prepare(sequence)

    def drop(self, sequence: Sequence) -> None:
        self.sampler.drop(sequence)

    def _forward(self, plan: StepPlan) -> torch.Tensor:
        """Return hidden states [T, hidden] and leave K and V in the cache."""
        if self._cache is None:
            raise ConfigurationError("The model has not been warmed up: it has no KV cache yet.")
        lengths_held = _lengths(plan) if self.model.needs_lengths else plan.positions
        if self._graphs and (hidden := self._graphs.forward(plan, lengths_held)) is not None:
            return hidden
        positions = torch.from_numpy(plan.positions).to(self.device)
        lengths = positions
        if self.model.needs_lengths:
            lengths = torch.from_numpy(lengths_held).to(self.device)
        batch = self.attention.prepare(plan, self._cache)
        token_ids = torch.from_numpy(plan.token_ids).to(self.device)
        return self.model.forward(token_ids, positions, lengths, self.attention, batch)

    def _warm_step(self, plan: StepPlan) -> None:
        hidden = self._forward(plan)
        self.model.logits(hidden[-1:])

    def _new_cache(self, blocks: int) -> KVCache:
        return KVCache(self._kv_shape, blocks, self.dtype, self.device)


def _cheap_tokens(device: torch.device) -> int:
    """Return what `ModelInfo` says of them.

    On a CPU a token adds a twentieth to a step or more; on a device reading the weights sets the
    pace for hundreds of tokens.
    """
    return 8 if device.type == "cpu" else 256


def _picked(hidden: torch.Tensor, places: NDArray[np.int64]) -> torch.Tensor:
    """Return the rows of `hidden` at `places`, rising; without a copy when they are all."""
    if len(places) == len(hidden):
        return hidden
    return hidden.index_select(0, torch.from_numpy(places).to(hidden.device))


def _load_t5(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    sampler: RowSampler,
    ranks: Ranks | None,
) -> TorchRunner:
    """Load an encoder-decoder; raises ModelLoadError as `TorchRunner.load` does."""
    began = time.monotonic_ns()
    spec = t5_spec(config)
    rank, world_size = (ranks.rank, ranks.size) if ranks else (0, 1)
    source = WeightSource(
        config.folder, dtype=dtype, device=device, rank=rank, world_size=world_size
    )
    with source, torch.inference_mode():
        model = load_t5(spec, source, ranks)
        model.pack()
    return TorchRunner(
        model,
        config,
        dtype=dtype,
        device=device,
        sampler=DecoderSampler(sampler, spec.start_token),
        attention=T5Layout(),
        ranks=ranks,
        load_ns=time.monotonic_ns() - began,
    )


def _graphs(model: Model, device: torch.device, sizes: tuple[int, ...]) -> DecodeGraphs | None:
    """Return what records the model's decodes; None where nothing can or is to be recorded."""
    attention = capturable_attention(device)
    if attention is None or not model.capturable or not sizes:
        return None
    return DecodeGraphs(model.forward, attention, CudaCapture(device), sizes, device)


def _lengths(plan: StepPlan) -> NDArray[np.int64]:
    """Return [T] the length each token's sequence had when it was first computed."""
    prompts = np.array([row.prompt_length for row in plan.rows], dtype=np.int64)
    per_token: NDArray[np.int64] = np.repeat(prompts, np.diff(plan.query_starts))
    return np.maximum(per_token, plan.positions + 1)
