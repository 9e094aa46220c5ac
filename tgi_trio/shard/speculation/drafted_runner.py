"""A runner with a draft model beside it. No torch in this file."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, runtime_checkable

from tgi_trio.ipc.startup import ShardInfo, WarmupRequest, WarmupResult
from tgi_trio.shard.adapter_host import AdapterHost
from tgi_trio.shard.contract import (
    ShardSequence,
    StepPlan,
    StepResult,
)
from tgi_trio.shard.prefixes.host_copies import HostCopies
from tgi_trio.shard.prefixes.kept_prefixes import Prefixes
from tgi_trio.shard.runner import (
    Drafter,
    Pending,
    Runner,
)
from tgi_trio.shard.speculation.draft_model import CATCH_UP, ModelDrafter


@runtime_checkable
class LeavesRoom(Runner, Protocol):
    """A runner that leaves memory for a draft model's KV cache."""

    kv_beside: int  # bytes per token of the draft model's KV cache


class DraftedRunner:
    """A `Runner`: the target model's, with the draft model's drafter and memory."""

    def __init__(self, runner: LeavesRoom, draft: Runner) -> None:
        self._runner = runner
        self._draft = draft
        self._runner.kv_beside = draft.info.kv_bytes_per_token

    @property
    def info(self) -> ShardInfo:
        return self._runner.info

    @property
    def adapters(self) -> AdapterHost | None:
        """The target model's; the draft model has none."""
        return self._runner.adapters

    @property
    def prefixes(self) -> Prefixes:
        """The target model's; the draft model computes every sequence from its beginning."""
        return self._runner.prefixes

    @property
    def host_copies(self) -> HostCopies | None:
        """The target model's, likewise."""
        return self._runner.host_copies

    def warm_up(self, request: WarmupRequest) -> WarmupResult:
        """Warm up both; the draft model's cache has as many blocks as the target model's."""
        found = self._runner.warm_up(request)
        own = WarmupRequest(
            max_prefill_tokens=max(CATCH_UP, request.max_batch_size),
            max_total_tokens=request.max_total_tokens,
            max_batch_size=request.max_batch_size,
            max_batch_total_tokens=(found.blocks - 1) * found.block_size,
            blocks=request.blocks,
        )
        beside = self._draft.warm_up(own)
        return replace(
            found,
            weight_bytes=found.weight_bytes + beside.weight_bytes,
            activation_bytes=found.activation_bytes + beside.activation_bytes,
            kv_bytes=found.kv_bytes + beside.kv_bytes,
            spare_bytes=max(0, found.spare_bytes - beside.kv_bytes),
            warmup_ns=found.warmup_ns + beside.warmup_ns,
        )

    def step(self, plan: StepPlan) -> StepResult:
        return self._runner.step(plan)

    def launch(self, plan: StepPlan) -> Pending:
        return self._runner.launch(plan)

    def runs_ahead(self, plan: StepPlan) -> bool:
        return self._runner.runs_ahead(plan)

    def drafter(self, most: int) -> Drafter | None:
        info = self._runner.info
        if not info.draft_budget:
            return None
        return ModelDrafter(self._draft, most, info.eos_ids, info.vocab_size)

    def prepare(self, sequence: ShardSequence | None) -> bool:
        return self._runner.prepare(sequence)

    def drop(self, sequence: ShardSequence) -> None:
        self._runner.drop(sequence)

    def prove_sound(self) -> None:
        self._runner.prove_sound()
