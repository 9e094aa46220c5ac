"""The runner of the CPU backend: runs plans and samples tokens."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ConfigurationError
from tgi_trio.ipc.startup import BLOCK_SIZE, ShardInfo, WarmupRequest, WarmupResult
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.speculators.assistant import AssistantSpec
from tgi_trio.model.speculators.spec import EagleSpec
from tgi_trio.shard.adapter_host import AdapterHost
from tgi_trio.shard.contract import Choices, PromptValues, ShardSequence, StepPlan, StepResult
from tgi_trio.shard.cpu_backend.drafting.assistant import KernelAssistant
from tgi_trio.shard.cpu_backend.drafting.eagle import KernelEagle
from tgi_trio.shard.cpu_backend.drafting.eagle_one import make_eagle
from tgi_trio.shard.cpu_backend.drafting.heads import KernelArithmetic, LoadedHeads
from tgi_trio.shard.cpu_backend.drafting.mtp import KernelMtp
from tgi_trio.shard.cpu_backend.forward import Forward, Tokens
from tgi_trio.shard.loop.soundness import prove_by_step
from tgi_trio.shard.machine.kv_sizing import longest_sequence, size_cache
from tgi_trio.shard.machine.memory import free_bytes
from tgi_trio.shard.plan_parts import prompt_spans
from tgi_trio.shard.prefixes.host_copies import HostCopies
from tgi_trio.shard.prefixes.kept_prefixes import HostPart, Prefixes, PrefixParts, RankPrefixes
from tgi_trio.shard.runner import (
    Computed,
    Drafter,
    Pending,
)
from tgi_trio.shard.sampling import choosing
from tgi_trio.shard.sampling.base import RowSampler
from tgi_trio.shard.speculation.assistant import AssistantDrafter
from tgi_trio.shard.speculation.eagle import EagleReader
from tgi_trio.shard.speculation.heads import HeadsDrafter
from tgi_trio.shard.speculation.hidden import LastStep
from tgi_trio.shard.speculation.mtp import MtpLayers, find_reader, join_layers, make_drafter
from tgi_trio.shard.speculation.ngram import NgramDrafter

if TYPE_CHECKING:  # it imports torch
    from tgi_trio.shard.ranks.neighbours import Neighbours
    from tgi_trio.shard.ranks.portions import Portions

_LOGITS_AT_ONCE = 64  # rows of prompt logits that are computed at once


class CpuRunner:
    """A `Runner` of a model with the CPU kernels. `close` ends its threads."""

    def __init__(
        self,
        config: ModelConfig,
        forward: Forward,
        *,
        dtype: str,
        sampler: RowSampler,
        load_ns: int = 0,
        heads: LoadedHeads | None = None,
        mtp: Sequence[KernelMtp] = (),
        adapters: AdapterHost | None = None,
        ranks: Neighbours | Portions | None = None,
        local_ranks: int = 1,
    ) -> None:
        """`heads`: speculation heads, whose linear layers are in the program. `mtp`: layers of
        the model's own that draft. `ranks`: the other ranks of `forward`, if any. `local_ranks`:
        how many ranks share this machine's memory.
        """
        self._ranks = ranks
        self._local_ranks = local_ranks
        self._adapters = adapters
        self.sampler = sampler
        self._heads = heads
        self._eagle: KernelEagle | KernelMtp | MtpLayers | None = join_layers(mtp)
        self._reader: EagleReader | None = None  # set when a drafter has been requested
        if heads is not None and isinstance(heads.spec, EagleSpec):
            self._heads, self._eagle = None, make_eagle(forward, heads.spec, heads)
        self._bytes_beside = sum(layer.nbytes() for layer in mtp)
        self._last = LastStep()
        self._has_drafter = False  # there is a drafter, which needs the costs of steps
        self.kv_beside = 0 if self._eagle is None else self._eagle.kv_bytes_per_token
        self.bytes_per_adapter = 0
        self._blocks = 1  # of the KV cache; set by warm_up
        self._forward = forward
        self.close = weakref.finalize(self, _close, forward, mtp)
        team = forward.team
        program = forward.program
        words = [program.describe(), forward.variant.instructions]
        words.append("1 thread" if len(team.cores) == 1 else f"{len(team.cores)} threads")
        if ranks is not None:
            words.append(ranks.describe())
        # A row has slots if any stage keeps states, so a stage without states reports some, too.
        keeps = any(layer.mixer is not None for layer in program.model.layers)
        self._info = ShardInfo(
            vocab_size=config.vocab_size,
            block_size=BLOCK_SIZE,
            layers=program.kv_layers,
            kv_bytes_per_token=program.caches.bytes_per_token,
            max_positions=config.max_positions,
            eos_ids=config.eos_ids,
            dtype=dtype,
            device="cpu",
            backend=f"kernels ({', '.join(filter(None, words))})",
            load_ns=load_ns,
            prefix_reuse=not program.by_length,
            draft_budget=forward.variant.cheap_rows,
            state_bytes=max(program.state_bytes, int(keeps)),
        )

    @property
    def info(self) -> ShardInfo:
        return self._info

    @property
    def adapters(self) -> AdapterHost | None:
        return self._adapters

    @property
    def prefixes(self) -> Prefixes:
        return RankPrefixes(self._find_parts, None if self._ranks is None else self._ranks.least)

    @property
    def host_copies(self) -> HostCopies | None:
        """None: all blocks are in the host's memory already."""
        return None

    def _find_parts(self) -> PrefixParts:
        if self._reader is not None:
            self._reader.read([])  # else its caches lack what has ended since
        program = self._forward.program
        arrays = [*program.caches.arrays, *(() if self._eagle is None else self._eagle.caches)]
        blocks = [HostPart(each, self._blocks) for each in arrays]
        return PrefixParts(blocks, [HostPart(each, len(each)) for each in program.states])

    def warm_up(self, request: WarmupRequest) -> WarmupResult:
        """Allocate for the largest step, the KV cache and states.

        Raises ConfigurationError if memory does not suffice for such a step, or a single sequence.
        """
        began = time.monotonic_ns()
        forward, program = self._forward, self._forward.program
        longest = longest_sequence(request, self._info)
        wanted = max(request.max_batch_size, _LOGITS_AT_ONCE)
        try:
            activation = forward.reserve(request.max_prefill_tokens, wanted, longest)
        except (OSError, OverflowError, MemoryError) as error:
            raise ConfigurationError(
                f"A step of {request.max_prefill_tokens} tokens and {wanted} sequences takes more "
                "memory than there is; lower --max-batch-prefill-tokens or --max-batch-size."
            ) from error
        size = size_cache(
            request,
            self._info,
            lambda: free_bytes() // self._local_ranks,
            activation,
            host=True,
            beside=self.kv_beside,
            adapter=self.bytes_per_adapter,
        )
        blocks, slots = size.blocks, size.state_slots
        if self._ranks is not None:  # every rank's cache has the same blocks, and slots
            blocks, slots = self._ranks.least(blocks), self._ranks.least(slots)
        self._blocks = blocks
        kv_bytes = program.allocate_kv(blocks)
        if self._eagle is not None:
            kv_bytes += self._eagle.make_room(blocks)
        if self._reader is not None:
            self._reader.clear()
        return WarmupResult(
            blocks=blocks,
            block_size=BLOCK_SIZE,
            weight_bytes=program.weight_bytes + self._bytes_beside,
            activation_bytes=activation,
            kv_bytes=kv_bytes,
            spare_bytes=max(0, size.spare - kv_bytes),
            warmup_ns=time.monotonic_ns() - began,
            state_slots=slots,
            state_bytes=program.allocate_states(slots),
        )

    def step(self, plan: StepPlan) -> StepResult:
        began = time.monotonic_ns()
        processor = time.thread_time_ns() if self._has_drafter else 0
        sampled = np.flatnonzero(plan.samples)
        places = choosing.choice_positions(plan, sampled).astype(np.int32)
        tokens = Tokens.of(
            plan,
            keeps_states=self._info.state_bytes > 0,
            by_length=self._forward.program.by_length,
        )
        logits = self._forward.run(tokens, places)
        chosen = time.monotonic_ns()
        choices = Choices.none(0)
        if len(sampled):
            choices = choosing.choose_tokens(self.sampler, logits, plan, sampled)
            if self._heads is not None:
                self._last.keep(plan, sampled, choices, self._forward.hidden)
        ended = time.monotonic_ns()
        # Only the last stage has logits, so only it has the log-probabilities of prompts.
        spans = prompt_spans(plan).items() if self._forward.program.run.is_last else ()
        prompts = {row: self._prompt_values(plan, row, *span) for row, span in spans}
        prompts_ns = time.monotonic_ns() - ended
        if self._reader is not None:  # at the end: what it reads may overwrite hidden states
            tapped = isinstance(self._eagle, KernelEagle)
            pick = self._forward.tapped if tapped else self._forward.states
            self._reader.keep(plan, sampled, choices, pick)
        choices = choices.spread(sampled, len(plan.rows))
        return StepResult(
            choices,
            chosen - began + prompts_ns,
            time.monotonic_ns() - chosen - prompts_ns,
            prompts,
            processor_ns=time.thread_time_ns() - processor if self._has_drafter else 0,
        )

    def runs_ahead(self, plan: StepPlan) -> bool:
        return False

    def launch(self, plan: StepPlan) -> Pending:
        return Computed(self.step(plan))

    def drafter(self, most: int) -> Drafter | None:
        self._has_drafter = True
        if isinstance(self._eagle, KernelEagle):
            self._forward.taps = self._eagle.spec.taps(len(self._forward.spec.layers))
        if self._eagle is not None:
            self._reader = self._reader or find_reader(self._eagle)
            return make_drafter(self._reader, most, self._info.eos_ids)
        if self._heads is None:
            return NgramDrafter(most, self._info.eos_ids)
        if isinstance(self._heads.spec, AssistantSpec):
            assistant = KernelAssistant(self._forward, self._heads.spec, self._heads)
            return AssistantDrafter(assistant, self._last, most, self._info.eos_ids)
        arithmetic = KernelArithmetic(self._forward, self._forward.program, self._heads)
        spec, token_map = self._heads.spec, self._heads.token_map
        return HeadsDrafter(spec, arithmetic, self._last, most, self._info.eos_ids, token_map)

    def prepare(self, sequence: ShardSequence | None) -> bool:
        return self.sampler.prepare(sequence)

    def drop(self, sequence: ShardSequence) -> None:
        self.sampler.drop(sequence)
        if self._reader is not None:
            self._reader.drop(sequence)

    def prove_sound(self) -> None:
        prove_by_step(self.step, self.info.vocab_size)

    def _prompt_values(self, plan: StepPlan, index: int, first: int, end: int) -> PromptValues:
        """Return the values of the row's prompt tokens in this step; see `PromptLogprobs`."""
        start = int(plan.query_starts[index])
        row = plan.rows[index]
        targets, top_n = row.token_ids[first + 1 : end + 1], row.sampling.prompt_top_n
        values = [math.nan] if first == 0 else []
        tops: list[list[tuple[int, float]]] = [[]] if top_n and first == 0 else []
        for begin in range(0, len(targets), _LOGITS_AT_ONCE):
            part = targets[begin : begin + _LOGITS_AT_ONCE]
            wanted = np.arange(start + begin, start + begin + len(part), dtype=np.int32)
            logprobs = _log_softmax(self._forward.logits(wanted))
            values += logprobs[np.arange(len(part)), part].tolist()
            if top_n:
                tops += [_best(own, top_n) for own in logprobs]
        return PromptValues(values, tops)


def _close(forward: Forward, mtp: Sequence[KernelMtp]) -> None:
    for layer in reversed(mtp):  # what was started last ends first
        layer.close()
    forward.close()


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Turn logits [n, vocabulary] into log-probabilities, in place."""
    logits -= logits.max(axis=1, keepdims=True)
    masses = np.exp(logits).sum(axis=1, dtype=np.float64, keepdims=True)
    logits -= np.log(masses).astype(np.float32)
    return logits


def _best(logprobs: NDArray[np.float32], count: int) -> list[tuple[int, float]]:
    """Return the `count` best tokens of [vocabulary], best first, lower ids first among equals."""
    least = np.partition(logprobs, -count)[-count] if count < len(logprobs) else -np.inf
    ids = np.flatnonzero(logprobs >= least)
    ids = ids[np.argsort(-logprobs[ids], kind="stable")][:count]
    return list(zip(ids.tolist(), logprobs[ids].tolist(), strict=True))
