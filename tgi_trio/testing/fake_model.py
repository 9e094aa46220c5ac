"""A fake model without weights, for tests of everything but the forward pass.

Its next token is a pure function of the last tokens (`next_token`), so a test knows every answer in
advance. Its KV cache holds the tokens themselves. A sequence whose blocks do not contain what was
written for it gets a fault, so that overlapping block tables, blocks that were freed too early and
wrong prefix reuse become visible. With `state_slots` it also keeps a state per sequence, a number
that depends on every token, and a sequence whose slot holds another state gets a fault. No torch in
this file.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tgi_trio.errors import ConfigurationError, ModelLoadError
from tgi_trio.ipc.startup import ShardInfo, WarmupRequest, WarmupResult
from tgi_trio.shard.adapter_host import AdapterHost
from tgi_trio.shard.contract import RowResult, ShardSequence, StepPlan, StepResult
from tgi_trio.shard.plan_parts import fill_inputs
from tgi_trio.shard.prefixes.host_copies import HostCopies
from tgi_trio.shard.prefixes.kept_prefixes import HostPart, Prefixes, PrefixParts, RankPrefixes
from tgi_trio.shard.runner import Computed, Drafter, Pending
from tgi_trio.shard.speculation.ngram import NgramDrafter
from tgi_trio.testing.late_copies import LateCopies

CRASH_EXIT_CODE = 70
_NAN = "the model's logits contain NaN"
_LOGPROB = -0.5  # of every chosen token; the alternatives follow in steps of 1
_PROMPT_LOGPROB = -1.0


@dataclass(frozen=True)
class FakeSettings:
    """How the fake model behaves; every field is a key of the JSON on the command line."""

    vocab_size: int = 1000
    first_id: int = 3  # the lowest id of answers; lower ones are special tokens
    eos_id: int = 2
    block_size: int = 16
    blocks: int = 1024  # KV blocks, block 0 included
    device: str = "cpu"  # where it claims to compute
    device_name: str = ""
    max_positions: int = 0  # 0 = unbounded
    load_ms: float = 0.0
    step_ms: float = 0.0  # of every step
    token_us: float = 0.0  # in addition, of every query token
    eos_after: int = 0  # a sequence's EOS comes after this many generated tokens; 0 = never
    replies: tuple[tuple[int, ...], ...] = ()  # whole answers, before EOS; see `next_token`
    # Pairs (tokens, whole answer): the first whose tokens occur in the prompt is used.
    script: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    verify_kv: bool = True
    load_error: str = ""  # loading fails with this message
    crash_at_step: int = 0  # the process ends in this step, counted from 1
    hang_at_step: int = 0  # this step never ends
    crash_token: int = -1  # the process ends in a step with a sequence that has this token
    fail_token: int = -1  # a step with a sequence that has this token raises
    fail_above: int = 0  # so does one of more rows than this; 0 = never
    break_at_step: int = 0  # the device breaks: this step and all later ones raise; 0 = never
    break_token: int = -1  # the device breaks in a step with a sequence that has this token
    broken_while: str = ""  # a path: the device is broken for every process while it exists
    nan_at_step: int = 0  # from this step on, everything that the device computes is NaN; 0 = never
    nan_while: str = ""  # a path: the same for every process while it exists
    nan_token: int = -1  # only the row of a sequence that has this token is NaN
    runs_ahead: bool = False  # steps are computed when their results are read, as on a device
    state_slots: int = 0  # slots for states, slot 0 included; 0 = it keeps none
    host_blocks: int = 0  # of which its host memory holds copies
    host_slots: int = 0  # likewise, of slots for states
    speculate: int = 0  # the most tokens that the shard drafts per step and sequence

    @classmethod
    def parse(cls, text: str) -> FakeSettings:
        """Read the JSON object on the command line; raises ConfigurationError."""
        try:
            values = json.loads(text)
            if "replies" in values:
                values["replies"] = tuple(tuple(reply) for reply in values["replies"])
            if "script" in values:
                rows = values["script"]
                values["script"] = tuple((tuple(asked), tuple(reply)) for asked, reply in rows)
            return cls(**values)
        except (ValueError, TypeError) as error:
            allowed = ", ".join(cls.__dataclass_fields__)
            raise ConfigurationError(
                f"fake shard settings {text!r}: {error}. Expected a JSON object with the keys "
                f"{allowed}."
            ) from error


def next_token(settings: FakeSettings, token_ids: ListLike[int], prompt_length: int) -> int:
    """Return the token after `token_ids` (prompt and what was generated so far)."""
    generated = len(token_ids) - prompt_length
    reply = _reply(settings, token_ids[:prompt_length])
    if reply is not None:
        return reply[generated] if generated < len(reply) else settings.eos_id
    if settings.eos_after and generated >= settings.eos_after:
        return settings.eos_id
    span = settings.vocab_size - settings.first_id
    return settings.first_id + (_mix(token_ids[-4:]) + len(token_ids)) % span


def _reply(settings: FakeSettings, prompt_ids: ListLike[int]) -> tuple[int, ...] | None:
    """Return the whole answer to a prompt, None if the settings have none."""
    if settings.script:
        prompt = _as_text(prompt_ids)
        for asked, reply in settings.script:
            if _as_text(asked) in prompt:
                return reply
    if settings.replies:
        return settings.replies[_mix(prompt_ids) % len(settings.replies)]
    return None


def _as_text(token_ids: ListLike[int]) -> str:
    """Return a character per id, because searching text is fast."""
    return "".join(map(chr, token_ids))


def continuation(settings: FakeSettings, prompt_ids: ListLike[int], count: int) -> list[int]:
    """Return the model's answer to a prompt: `count` tokens, or fewer if EOS ends it."""
    ids = [int(token) for token in prompt_ids]
    while len(ids) < len(prompt_ids) + count:
        ids.append(next_token(settings, ids, len(prompt_ids)))
        if ids[-1] == settings.eos_id:
            break
    return ids[len(prompt_ids) :]


class FakeCrash(BaseException):
    """Ends a fake shard that runs in a thread; one in a process really exits."""


@dataclass(slots=True)
class _Deferred:
    """A launched step, which needs the tokens of the previous one."""

    runner: FakeRunner
    plan: StepPlan

    def proceed(self) -> None:
        return None

    def result(self) -> StepResult:
        fill_inputs(self.plan)
        return self.runner.step(self.plan)


class FakeRunner:
    """A `Runner` that computes `next_token`."""

    def __init__(self, settings: FakeSettings, *, in_thread: bool = False) -> None:
        """Take `load_ms` for loading; raises ModelLoadError if the settings say so."""
        time.sleep(settings.load_ms / 1000)
        if settings.load_error:
            raise ModelLoadError(settings.load_error)
        self.settings = settings
        self.released = threading.Event()  # ends a hang
        self.dropped: list[int] = []  # ids of the last sequences dropped, for tests
        self._in_thread = in_thread
        self._steps = 0
        self._broken = False  # permanently, like a CUDA context after a fault
        self._kv: NDArray[np.int64] = np.empty(0, np.int64)
        self._states: NDArray[np.int64] = np.zeros(settings.state_slots, np.int64)
        self._copies: LateCopies | None = None
        self._info = ShardInfo(
            vocab_size=settings.vocab_size,
            block_size=settings.block_size,
            layers=1,
            kv_bytes_per_token=8,
            max_positions=settings.max_positions,
            eos_ids=(settings.eos_id,),
            dtype="int64",
            device=settings.device,
            device_name=settings.device_name,
            backend="fake",
            load_ns=int(settings.load_ms * 1e6),
            draft_budget=1 << 16,
            state_bytes=8 if settings.state_slots else 0,
        )

    @property
    def info(self) -> ShardInfo:
        """Static facts of the fake model."""
        return self._info

    @property
    def adapters(self) -> AdapterHost | None:
        return None

    @property
    def prefixes(self) -> Prefixes:
        return RankPrefixes(self._find_parts)

    @property
    def host_copies(self) -> HostCopies | None:
        return self._copies

    def _find_parts(self) -> PrefixParts:
        blocks = len(self._kv) // self.settings.block_size
        states = [HostPart(self._states, len(self._states))] if len(self._states) else []
        parts = [HostPart(self._kv, blocks)]
        if self._copies is None:
            return PrefixParts(parts, states)
        copies, slots = (HostPart(rows, len(rows)) for rows in self._copies.rows)
        return PrefixParts(parts, states, [copies], [slots] if states else [])

    def warm_up(self, request: WarmupRequest) -> WarmupResult:
        """Allocate the requested number of blocks, `settings.blocks` if none is requested."""
        size = self.settings.block_size
        blocks = request.blocks or self.settings.blocks
        if request.max_batch_total_tokens and not request.blocks:
            blocks = 1 + -(-request.max_batch_total_tokens // size)
        self._kv = np.zeros(blocks * size, np.int64)
        self._states[:] = 0
        places = self.settings.host_blocks, self.settings.host_slots
        if places[0]:
            self._copies = LateCopies(
                self._kv.reshape(blocks, size), self._states.reshape(-1, 1), places
            )
        return WarmupResult(
            blocks=blocks,
            block_size=size,
            weight_bytes=0,
            activation_bytes=0,
            kv_bytes=self._kv.nbytes,
            spare_bytes=0,
            warmup_ns=0,
            state_slots=len(self._states),
            state_bytes=self._states.nbytes,
            host_blocks=places[0],
            host_slots=places[1],
            host_bytes=8 * (places[0] * size + places[1]),
        )

    def step(self, plan: StepPlan) -> StepResult:
        """Store the tokens in place of K and V, check every context, choose next tokens."""
        started = time.perf_counter_ns()
        self._steps += 1
        self._misbehave(plan)
        delay = self.settings.step_ms / 1e3 + self.settings.token_us * len(plan.token_ids) / 1e6
        if delay:
            time.sleep(delay)
        self._kv[plan.kv_slots] = _kv_entries(plan.token_ids, plan.positions)
        rows = [self._row(plan, i) for i in range(len(plan.rows))]
        return StepResult.of(rows, forward_ns=time.perf_counter_ns() - started, sample_ns=0)

    def runs_ahead(self, plan: StepPlan) -> bool:
        """Return whether the settings say so; but the host has to read steps with drafts."""
        return self.settings.runs_ahead and plan.drafts is None

    def launch(self, plan: StepPlan) -> Pending:
        """Compute at once; or, to imitate a device, when the result is requested."""
        return _Deferred(self, plan) if self.runs_ahead(plan) else Computed(self.step(plan))

    def drafter(self, most: int) -> Drafter | None:
        """Return an n-gram drafter, if steps may have drafts."""
        return NgramDrafter(most, self._info.eos_ids) if self._info.draft_budget else None

    def prepare(self, sequence: ShardSequence | None) -> bool:
        """Return True: grammars have no effect here."""
        return True

    def drop(self, sequence: ShardSequence) -> None:
        """Record that the worker has dropped this sequence."""
        self.dropped.append(sequence.id)
        del self.dropped[:-1000]

    def prove_sound(self) -> None:
        """Raise RuntimeError if the device is broken."""
        path = self.settings.broken_while
        if self._broken or (path and os.path.exists(path)):
            raise RuntimeError("the device is broken")
        if self._silent():
            raise RuntimeError(_NAN)

    def _silent(self) -> bool:
        """Return whether the device computes nothing but NaN, without an error."""
        first, path = self.settings.nan_at_step, self.settings.nan_while
        return bool(first and self._steps >= first) or bool(path and os.path.exists(path))

    def _misbehave(self, plan: StepPlan) -> None:
        settings = self.settings
        if self._steps == settings.break_at_step or _has_token(plan, settings.break_token):
            self._broken = True
        if not self._silent():
            self.prove_sound()
        if self._steps == settings.crash_at_step or _has_token(plan, settings.crash_token):
            if self._in_thread:
                raise FakeCrash
            os._exit(CRASH_EXIT_CODE)
        if self._steps == settings.hang_at_step:
            self.released.wait()
            raise FakeCrash
        if _has_token(plan, settings.fail_token):
            raise RuntimeError(f"token {settings.fail_token} cannot be computed")
        if 0 < settings.fail_above < len(plan.rows):
            raise RuntimeError(f"{len(plan.rows)} rows do not fit")

    def _row(self, plan: StepPlan, i: int) -> RowResult:
        sequence = plan.rows[i]
        context = int(plan.context_lengths[i])
        if self.settings.verify_kv:
            fault = self._verify(sequence, plan.block_tables[i], context)
            fault = fault or self._advance_state(plan, i)
            if fault is not None:
                return RowResult(fault=fault)
        result = RowResult()
        if sequence.sampling.prompt_logprobs:
            first = context - int(plan.query_starts[i + 1] - plan.query_starts[i])
            known = max(0, min(context, sequence.prompt_length - 1) - first)
            start = [float("nan")] if first == 0 else []
            result.prompt_logprobs = start + [_PROMPT_LOGPROB] * known
            if count := sequence.sampling.prompt_top_n:
                best = [(n, _PROMPT_LOGPROB - n) for n in range(count)]
                result.prompt_tops = [[] for _ in start] + [best] * known
        if plan.samples[i] and (self._silent() or _has_token(plan, self.settings.nan_token, i)):
            return RowResult(fault=_NAN)
        if plan.samples[i]:
            drafts = 0 if plan.drafts is None else int(plan.drafts[i])
            tokens = self._choose(sequence, drafts)
            count, size = sequence.sampling.top_n, self.settings.vocab_size
            result.token_ids, result.logprobs = tokens, [_LOGPROB] * len(tokens)
            result.tops = [
                [((token + n) % size, _LOGPROB - n) for n in range(count)] for token in tokens
            ]
        return result

    def _choose(self, sequence: ShardSequence, drafts: int) -> list[int]:
        """Return the next token, and a further one after each right draft."""
        ids, length = sequence.token_ids, sequence.length
        tokens: list[int] = []
        for known in range(length, length + drafts + 1):
            token = next_token(self.settings, ids[:known].tolist(), sequence.prompt_length)
            tokens.append(token)
            if known == length + drafts or token != ids[known]:
                break
        return tokens

    def _advance_state(self, plan: StepPlan, i: int) -> str | None:
        """Update a row's state with its tokens; return what is wrong with its old state, if so."""
        if not len(self._states):
            return None
        if plan.state_reads is None or plan.state_writes is None:
            return "the row has no slots for its states"
        context, start = int(plan.context_lengths[i]), int(plan.query_starts[i])
        first = int(plan.positions[start])
        ids = plan.rows[i].token_ids[:context].tolist()
        read, written = int(plan.state_reads[i]), int(plan.state_writes[i])
        if first and self._states[read] != _mix(ids[:first]):
            return f"slot {read} does not hold the state behind {first} tokens of this sequence"
        if read == written:
            return f"slot {read} is read and written: the step could not be repeated"
        self._states[written] = _mix(ids)
        return None

    def _verify(
        self, sequence: ShardSequence, table: NDArray[np.int32], context: int
    ) -> str | None:
        size = self.settings.block_size
        positions = np.arange(context)
        slots = table[positions // size].astype(np.int64) * size + positions % size
        wanted = _kv_entries(sequence.token_ids[:context], positions)
        wrong = np.flatnonzero(self._kv[slots] != wanted)
        if len(wrong) == 0:
            return None
        return f"KV of position {wrong[0]} is not this sequence's (block {table[wrong[0] // size]})"


def _has_token(plan: StepPlan, token: int, index: int | None = None) -> bool:
    """Return whether a sequence of the plan has `token`, computed or not; false for -1.

    `index`: look at this row alone.
    """
    rows = plan.rows if index is None else [plan.rows[index]]
    return token >= 0 and any(token in row.token_ids[: row.length] for row in rows)


def _kv_entries(token_ids: NDArray[np.integer], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the content of cache slots: position and token, never 0."""
    return (positions + 1) << 32 | token_ids


def _mix(token_ids: ListLike[int]) -> int:
    """Return a hash that depends on every id and its place."""
    mixed = 17
    for token in token_ids:
        mixed = (mixed * 1_000_003 + int(token) + 1) % 2_147_483_647
        mixed ^= mixed >> 13  # without it, similar prompts of even and odd ids cancel out
    return mixed
