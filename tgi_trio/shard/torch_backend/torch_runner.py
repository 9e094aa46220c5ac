"""The torch runner: a plan in, chosen tokens out. `torch_loading.py` loads one from a folder."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tgi_trio.errors import ConfigurationError
from tgi_trio.ipc.startup import BLOCK_SIZE, ShardInfo, WarmupRequest, WarmupResult
from tgi_trio.model.config import ModelConfig
from tgi_trio.shard.adapter_host import AdapterHost
from tgi_trio.shard.contract import (
    Choices,
    ShardSequence,
    StepPlan,
    StepResult,
)
from tgi_trio.shard.loop.soundness import prove_by_step
from tgi_trio.shard.machine.accelerator import synchronize
from tgi_trio.shard.machine.device import name_device
from tgi_trio.shard.machine.device_memory import free_bytes
from tgi_trio.shard.machine.kv_sizing import longest_sequence, size_cache
from tgi_trio.shard.plan_parts import first_lengths
from tgi_trio.shard.prefixes.host_copies import HostCopies
from tgi_trio.shard.prefixes.kept_prefixes import Prefixes, RankPrefixes
from tgi_trio.shard.runner import (
    Computed,
    Drafter,
    Pending,
)
from tgi_trio.shard.sampling import choosing
from tgi_trio.shard.sampling.base import RowSampler
from tgi_trio.shard.torch_backend.attention.interface import PlanLayout
from tgi_trio.shard.torch_backend.attention.reference import ReferenceAttention
from tgi_trio.shard.torch_backend.compiling.ahead import compile_ahead
from tgi_trio.shard.torch_backend.drafting.trained import TrainedDrafter, pick_rows
from tgi_trio.shard.torch_backend.host_copies import HostRoom
from tgi_trio.shard.torch_backend.kv_cache import KVCache
from tgi_trio.shard.torch_backend.models.decoder import Decoder, Ranks
from tgi_trio.shard.torch_backend.models.interface import Model
from tgi_trio.shard.torch_backend.models.staged import StagedDecoder
from tgi_trio.shard.torch_backend.prefix_parts import find_parts
from tgi_trio.shard.torch_backend.prompt_logprobs import PromptLogprobs
from tgi_trio.shard.torch_backend.recordings.decode_graphs import DecodeGraphs
from tgi_trio.shard.torch_backend.staging import Staging
from tgi_trio.shard.torch_backend.states.pool import StatePool
from tgi_trio.shard.torch_backend.states.steps import StepStates, send_plain
from tgi_trio.shard.torch_backend.step_features import ImageStates, StepFeatures
from tgi_trio.shard.torch_backend.torch_device import draft_budget, without_gradients
from tgi_trio.shard.torch_backend.warm_up import WarmSteps, rehearsal_plan

if TYPE_CHECKING:  # it imports Triton
    from tgi_trio.shard.torch_backend.adapters.torch_adapters import StepAdapters
    from tgi_trio.shard.torch_backend.steps.device_steps import DeviceSteps
    from tgi_trio.shard.torch_backend.steps.followed_steps import FollowedSteps


class TorchRunner:
    """A model with a paged KV cache; see the Runner protocol."""

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
        steps: DeviceSteps | FollowedSteps | None = None,
        ranks: Ranks | None = None,
        speculate: int = 0,
        load_ns: int = 0,
        kv_dtype: torch.dtype | None = None,
        draft_module: TrainedDrafter | None = None,
        adapters: StepAdapters | None = None,
        images: ImageStates | None = None,
        invariant: bool = False,
        host: HostRoom | None = None,
    ) -> None:
        """`speculate`: the most drafts of a row in a step; `kv_dtype`: of K and V, None for
        `dtype`; `draft_module`: drafts for the model; `images`: passed to `StepFeatures.of`;
        `invariant`: see `batch_invariance.py`; `host`: for copies; None: none are made.
        """
        self._images = images
        self._draft_module = draft_module or TrainedDrafter()
        self.kv_beside = self._draft_module.kv_bytes_per_token
        self.bytes_per_adapter = 0
        self._kv_dtype = kv_dtype or dtype
        self._ranks = ranks
        self._adapters = adapters
        self._speculate = speculate
        self._graphs, self._steps = graphs, steps
        self.model = model
        self.config = config
        self.dtype, self.device = dtype, device
        self.sampler = sampler
        self.attention = attention or ReferenceAttention()
        self.prompt_logprobs = PromptLogprobs(
            model.logits if model.predicts_prompt else None,
            config.vocab_size,
            device,
            invariant=invariant,
        )
        self.prompt_logprobs.adapters = adapters
        self._cache: KVCache | None = None  # set by warm_up
        self._host = host or HostRoom(0, device)
        self._kv_shape = model.kv_shape
        # The same model, if its layers keep states.
        self._keeper = model if isinstance(model, Decoder) and model.state_shapes else None
        self._most_seen = 0  # tokens that an index chooses, at most
        # Of stages not all may have an index, and each waits for the others' steps. What is
        # invariant launches the same whatever rows see.
        chooses = isinstance(model, Decoder) and not isinstance(model, StagedDecoder)
        if isinstance(model, Decoder) and chooses and not invariant:
            self._most_seen = model.attention_needs.most
        self._pool: StatePool | None = None  # set by warm_up
        self._send = send_plain if device.type == "cpu" else Staging(device).send
        self._info = self._describe(load_ns)

    @property
    def info(self) -> ShardInfo:
        return self._info

    @property
    def adapters(self) -> AdapterHost | None:
        return self._adapters

    @property
    def prefixes(self) -> Prefixes:
        copies = self._host.copies
        return RankPrefixes(
            lambda: find_parts(
                self._cache, self._draft_module.complete_caches(), self._pool, copies
            ),
            self._least,
        )

    @property
    def _least(self) -> Callable[[int], int] | None:
        """What returns the least of all ranks' numbers; None: there is one rank."""
        return None if self._ranks is None else partial(self._ranks.least, device=self.device)

    @property
    def host_copies(self) -> HostCopies | None:
        return self._host.copies

    @torch.inference_mode()
    def warm_up(self, request: WarmupRequest) -> WarmupResult:
        """Measure a large step in a cache of its own, then allocate the real one.

        Raises ConfigurationError if memory does not suffice for even one sequence.
        """
        began = time.monotonic_ns()
        first = self._cache is None
        if self._graphs:
            self._graphs.forget()
        self._cache = None  # frees an earlier warm-up's: two may not fit
        self._host.close()
        if self._steps:
            positions = request.max_total_tokens or self._info.max_positions
            self._steps.make_room(request.max_batch_size, positions)
        if self._images:
            self._images.make_room()
        if first:
            compile_ahead(self.device, partial(self._rehearse, request))
        activation = self._measure(request)
        size = size_cache(
            request,
            self._info,
            self._free_bytes,
            activation,
            host=self.device.type == "cpu",
            beside=self.kv_beside,
            adapter=self.bytes_per_adapter,
        )
        blocks, slots = size.blocks, size.state_slots
        if least := self._least:  # every rank's cache has as many blocks, and slots of states
            blocks, slots = least(blocks), least(slots)
        self._cache, self._pool = self._new_cache(blocks), self._new_pool(slots)
        kv_bytes = self._cache.nbytes + self._draft_module.make_room(blocks, self._cache)
        self._host.open(self._cache, self._draft_module.caches, self._pool, self._least)
        if self._graphs:
            width = math.ceil(longest_sequence(request, self._info) / BLOCK_SIZE)
            most, tokens = self._most_decodes(request), request.max_prefill_tokens
            self._graphs.record(self._cache, width, most, self._pool, tokens)
            if self._adapters:  # once more: how few rows are multiplied is known by now
                self._adapters.warm_up()
        if self._steps:
            self._steps.warm_up(self._cache, request.max_batch_size, self._pool)
        beside = self._draft_module.nbytes() + (self._adapters.nbytes if self._adapters else 0)
        return WarmupResult(
            blocks=blocks,
            block_size=BLOCK_SIZE,
            weight_bytes=self.model.nbytes() + beside,
            activation_bytes=activation,
            kv_bytes=kv_bytes,
            spare_bytes=max(0, size.spare - kv_bytes),
            warmup_ns=time.monotonic_ns() - began,
            state_slots=slots,
            state_bytes=0 if self._pool is None else self._pool.nbytes,
            **self._host.report(),
        )

    def _measure(self, request: WarmupRequest) -> int:
        """Return the bytes that activations of a large step take, in a temporary cache."""
        warm = WarmSteps(self._info, self.device, self._make_warm_room, self._warm_step)
        activation = warm.measure(request)
        if self._most_seen and self.device.type != "cpu":  # it launches other kernels
            warm.run_short(request, self._most_seen)
        if self._adapters:
            self._adapters.warm_up()
        self._cache = self._pool = None  # before the real ones: both may not fit
        return activation

    def _make_warm_room(self, blocks: int) -> None:
        self._cache, self._pool = self._new_cache(blocks), self._new_pool(1)

    def _free_bytes(self) -> int:
        """Return the bytes that are free for sequences; of the host's memory, this rank's part."""
        free = free_bytes(self.device, self._ranks.size if self._ranks else 1)
        block = BLOCK_SIZE * (self._info.kv_bytes_per_token + self.kv_beside)
        free -= self._host.staging_bytes(block, self._info.state_bytes)
        return max(0, free - (self._images.bytes_to_come if self._images else 0))

    def _rehearse(self, request: WarmupRequest) -> None:
        """Run small steps of every kind in little memory, for the kernels that they launch."""
        largest = rehearsal_plan(request, self._info, self.device)
        self._cache = self._new_cache(1 if largest is None else largest.blocks)
        self._pool = self._new_pool(1)
        try:
            with nullcontext() if self._ranks is None else self._ranks.rehearsing():
                if self._steps:  # first: what chooses tokens takes longest to compile
                    self._steps.warm_up(self._cache, request.max_batch_size, self._pool)
                if largest is not None:
                    self._warm_step(largest.plan)
                if self._graphs:
                    width = math.ceil(longest_sequence(request, self._info) / BLOCK_SIZE)
                    most, tokens = self._most_decodes(request), request.max_prefill_tokens
                    self._graphs.rehearse(self._cache, width, most, self._pool, tokens)
                if self._adapters:
                    self._adapters.warm_up()
        finally:
            self._cache = self._pool = None

    def _describe(self, load_ns: int) -> ShardInfo:
        """Return what the router learns about the model; `load_ns`: nanoseconds of loading it."""
        model, config = self.model, self.config
        return ShardInfo(
            vocab_size=config.vocab_size,
            block_size=BLOCK_SIZE,
            layers=self._kv_shape.layers,
            kv_bytes_per_token=self._kv_shape.bytes_per_token(self._kv_dtype),
            max_positions=config.max_positions,
            eos_ids=config.eos_ids,
            dtype=str(self.dtype).removeprefix("torch."),
            device=str(self.device),
            device_name=name_device(str(self.device)),
            backend=self.attention.name,
            load_ns=load_ns,
            prefix_reuse=model.prefix_reuse,
            draft_budget=draft_budget(self.device) if model.predicts_prompt else 0,
            state_bytes=self._bytes_per_slot(),
        )

    def _bytes_per_slot(self) -> int:
        """Return the bytes of a slot of states, 0 if layers keep none; with pipeline stages the
        most of any, since rows have slots on all if one keeps states.
        """
        shapes = self._keeper.state_shapes.values() if self._keeper else ()
        own = sum(shape.nbytes(self.dtype.itemsize) for each in shapes for shape in each)
        if self._ranks is None or not isinstance(self.model, StagedDecoder):
            return own
        return -self._ranks.least(-own, self.device)

    def _most_decodes(self, request: WarmupRequest) -> int | None:
        """Return the most tokens of a step without a prefill, drafts included; None: any."""
        rows = request.max_batch_size
        return max(rows, min(rows * (1 + self._speculate), self._info.draft_budget)) or None

    def step(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    def _compute(self, plan: StepPlan) -> StepResult:
        """Compute a plan and have the host choose its tokens."""
        began = time.monotonic_ns()
        if self._adapters is not None:
            self._adapters.begin(plan)
        hidden = self._compute_hidden(plan)
        self._draft_module.keep_kv(plan)
        sampled = np.flatnonzero(plan.samples)
        logits = None
        if len(sampled):
            places = choosing.choice_positions(plan, sampled)
            logits = self.model.logits(pick_rows(hidden, places))
        spans = self.prompt_logprobs.launch(plan, hidden)
        synchronize(self.device)
        prompts = {row: span.read() for row, span in spans.items()}
        chosen = time.monotonic_ns()
        choices = Choices.none(0)
        if logits is not None:
            choices = choosing.choose_tokens(self.sampler, logits, plan, sampled)
        recorded = self._steps is not None
        self._draft_module.keep(plan, sampled, choices, hidden, recorded=recorded)
        choices = choices.spread(sampled, len(plan.rows))
        return StepResult(choices, chosen - began, time.monotonic_ns() - chosen, prompts)

    def launch(self, plan: StepPlan) -> Pending:
        with without_gradients():
            self._host.precede(plan)
            if self._steps is None or self._cache is None or not self._steps.serve(plan):
                return Computed(self._compute(plan))
            if self._adapters is not None:
                self._adapters.begin(plan)
            lengths = first_lengths(plan) if self.model.needs_lengths else None
            return self._steps.launch(plan, lengths, self._cache, self.prompt_logprobs, self._pool)

    def runs_ahead(self, plan: StepPlan) -> bool:
        if self._steps is None or not self._steps.serve(plan):
            return False
        if plan.drafts is None and not plan.moves and not plan.leads:
            return True
        return not self.model.needs_lengths and self._steps.chains(plan)

    def drafter(self, most: int) -> Drafter | None:
        if not self._info.draft_budget:
            return None
        steps, eos_ids = self._steps, self._info.eos_ids
        looks_up = steps is not None and steps.looks_up
        return self._draft_module.drafter(
            most, eos_ids, recorded=steps is not None, looks_up=looks_up
        )

    def prepare(self, sequence: ShardSequence | None) -> bool:
        return self.sampler.prepare(sequence)

    def drop(self, sequence: ShardSequence) -> None:
        self.sampler.drop(sequence)
        if self._steps is not None:
            self._steps.drop(sequence)
        self._draft_module.drop(sequence)

    def prove_sound(self) -> None:
        prove_by_step(self.step, self.info.vocab_size)

    def _compute_hidden(self, plan: StepPlan) -> torch.Tensor:
        """Return hidden states [T, hidden] and leave K and V in the cache.

        Adapters are those of their last `begin`, or of `idle`.
        """
        if self._cache is None:
            raise ConfigurationError("The model has not been warmed up: it has no KV cache yet.")
        lengths_held = first_lengths(plan) if self.model.needs_lengths else plan.positions
        if self._graphs and (hidden := self._graphs.forward(plan, lengths_held)) is not None:
            return hidden
        positions = torch.from_numpy(plan.turning_positions).to(self.device)
        needs = self.model.needs_lengths
        lengths = torch.from_numpy(lengths_held).to(self.device) if needs else positions
        if self._adapters is not None:
            self._adapters.stage()
        batch = self.attention.prepare(plan, self._cache)
        token_ids = torch.from_numpy(plan.token_ids).to(self.device)
        features = StepFeatures.of(plan, self.device, self._images)
        if self._keeper is None or self._pool is None:
            return self.model.forward(
                token_ids, positions, lengths, self.attention, batch, features=features
            )
        attention: Any = self.attention  # an AttentionBackend, since the model is a decoder
        states = StepStates.of(plan, self._pool, self._send)
        return self._keeper.forward(
            token_ids, positions, lengths, attention, batch, states, features=features
        )

    def _warm_step(self, plan: StepPlan) -> None:
        with nullcontext() if self._adapters is None else self._adapters.idle(plan):
            hidden = self._compute_hidden(plan)
        self.model.logits(hidden[-1:])

    def _new_pool(self, slots: int) -> StatePool | None:
        if (keeper := self._keeper) is None:
            return None
        return StatePool(
            keeper.state_shapes, slots, self.dtype, self.device, in_turns=keeper.scans_in_turns
        )

    def _new_cache(self, blocks: int) -> KVCache:
        return KVCache(self._kv_shape, blocks, self._kv_dtype, self.device)
