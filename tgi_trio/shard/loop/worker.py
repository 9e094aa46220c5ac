"""The loop of a shard: drain commands, step, reply.

The router's commands are standing orders. Between steps the loop reads its request ring (one load
from memory when it is empty), applies what is there, runs one step over the running set, and
writes one STEP frame that also acknowledges the commands. It sleeps only when nothing can move.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Protocol

from tgi_trio.errors import PeerGone, ProtocolMismatch
from tgi_trio.ipc.frames import Frame, Kind, Phase
from tgi_trio.ipc.messages import Fault, StepReport, decode_extend, decode_prefill
from tgi_trio.shard import replies
from tgi_trio.shard.batch import Batch
from tgi_trio.shard.greeting import expect_hello
from tgi_trio.shard.group import GroupBroken
from tgi_trio.shard.speculation.ngram import NgramDrafter
from tgi_trio.shard.step import (
    RowResult,
    Runner,
    Sequence,
    StepPlan,
    StepResult,
    WarmupRequest,
    WarmupResult,
    slice_plan,
)

BEAT_S = 1.0  # an idle shard shows life this often
_HELD_S = 0.001  # how often held sequences are looked at when nothing else can move


class Writer(Protocol):
    """What the loop needs to know of its outgoing ring."""

    @property
    def max_payload(self) -> int: ...


class Channel(Protocol):
    """The shard's end of a channel, as `ipc.channel.ShardEnd` is one."""

    @property
    def writer(self) -> Writer: ...
    @property
    def try_receive(self) -> Callable[[], memoryview | None]: ...
    @property
    def release(self) -> Callable[[], None]: ...
    def wait(self, timeout: float | None) -> bool: ...
    def send(self, payload: bytes | memoryview) -> None: ...
    def beat(self, step: int, phase: int) -> None: ...


def run(
    channel: Channel,
    factory: Callable[[], Runner],
    *,
    rank: int = 0,
    world_size: int = 1,
    incarnation: int = 0,
    speculate: int = 0,
) -> None:
    """Serve one router until SHUTDOWN arrives or the router dies.

    HELLO is sent before `factory` is called: it may import torch and load weights for minutes, and
    the router knows meanwhile that this process lives. `speculate`: tokens guessed ahead per step
    and sequence at most, where the runner takes guesses. Raises ProtocolMismatch when the router
    reads the wire differently, and whatever `factory` or the runner's warm-up raise.
    """
    try:
        channel.beat(0, Phase.LOADING)
        channel.send(replies.encode_hello(rank, world_size, os.getpid(), incarnation))
        expect_hello(channel, "router")
        worker = Worker(channel, factory(), speculate)
        worker.serve()
    except PeerGone:
        return  # nobody is left to report to


class Worker:
    """The state of the loop: the running set, the standing limits, what is acknowledged."""

    def __init__(self, channel: Channel, runner: Runner, speculate: int = 0) -> None:
        """Start with an empty batch; WARMUP must come before the first PREFILL."""
        self._channel = channel
        self._runner = runner
        self._speculate = speculate if runner.info.cheap_tokens else 0
        # WARMUP makes the one with a KV cache; this one refuses every row.
        self._batch = Batch(vocab_size=0, block_size=1, blocks=0, eos_ids=())
        self._token_budget = 1  # set by WARMUP, then by LIMITS
        self._faults: list[Fault] = []  # of commands, not yet reported
        self._applied = 0  # number of the last command applied
        self._acknowledged = 0  # number of the last command the router knows to be applied
        self._stalled = 0  # stalled rows the router knows of
        self._step = 0
        self._computed_at = 0  # perf_counter_ns at the end of the last step; 0: not back to back
        self._phase = Phase.IDLE
        self._dropped = False  # a command has freed blocks that the router waits for
        self._running = True
        self._handlers: dict[Kind, Callable[[Frame], None]] = {
            Kind.INFO: self._on_info,
            Kind.WARMUP: self._on_warmup,
            Kind.LIMITS: self._on_limits,
            Kind.PREFILL: self._on_prefill,
            Kind.EXTEND: self._on_extend,
            Kind.FILTER: self._on_filter,
            Kind.CLEAR_CACHE: self._on_clear_cache,
            Kind.SHUTDOWN: self._on_shutdown,
        }

    def serve(self) -> None:
        """Run until SHUTDOWN; raises PeerGone when the router has died."""
        while True:
            self._drain()
            if not self._running:
                break
            if self._dropped:  # at once: the blocks may be granted while the next step runs
                self._dropped = False
                self._report_idle()
            self._release_ready()
            plan = self._batch.plan(self._token_budget)
            if plan is not None:
                self._run_step(plan)
            else:
                self._report_idle()
                self._computed_at = 0
                self._beat(Phase.IDLE)
                self._channel.wait(_HELD_S if self._batch.held else BEAT_S)
        self._beat(Phase.STOPPING)
        self._report_idle()

    # --- commands -----------------------------------------------------------------------------

    def _drain(self) -> None:
        """Apply every command that has arrived."""
        receive, release = self._channel.try_receive, self._channel.release
        while self._running and (view := receive()) is not None:
            frame = Frame(view)
            handler = self._handlers.get(frame.kind)
            if handler is None:
                raise ProtocolMismatch("router", f"{frame.kind.name} is not a command")
            handler(frame)
            self._applied = frame.word("command")
            del frame, view  # nothing reads the ring's bytes once they are given back
            release()

    def _on_info(self, frame: Frame) -> None:
        self._channel.send(replies.encode_info(frame.word("command"), self._runner.info))

    def _on_warmup(self, frame: Frame) -> None:
        self._beat(Phase.WARMING)
        names = WarmupRequest.__dataclass_fields__
        request = WarmupRequest(**{name: frame.word(name) for name in names})
        self._drop(self._batch.clear())
        found: WarmupResult = self._runner.warm_up(request)
        info = self._runner.info
        self._batch = Batch(
            vocab_size=info.vocab_size,
            block_size=found.block_size,
            blocks=found.blocks,
            eos_ids=info.eos_ids,
            drafter=NgramDrafter(self._speculate, info.eos_ids) if self._speculate else None,
            cheap_tokens=info.cheap_tokens,
        )
        self._token_budget = max(1, request.max_prefill_tokens)
        self._channel.send(replies.encode_warmup(frame.word("command"), found))

    def _on_limits(self, frame: Frame) -> None:
        self._token_budget = max(1, frame.word("token_budget"))

    def _on_prefill(self, frame: Frame) -> None:
        for row in decode_prefill(frame):
            try:
                sequence = self._batch.add(row)
                if sequence.sampling.grammar:
                    self._batch.hold(sequence.id)
            except ValueError as error:
                self._faults.append(Fault(row.sequence, f"cannot be run: {error}"))

    def _on_extend(self, frame: Frame) -> None:
        for row in decode_extend(frame):
            try:
                self._batch.extend(row)
            except ValueError as error:
                self._faults.append(Fault(row.sequence, f"cannot be extended: {error}"))
                self._drop(self._batch.remove([row.sequence]))

    def _on_filter(self, frame: Frame) -> None:
        self._drop(self._batch.remove(frame.column("sequence").tolist()))
        self._dropped = True

    def _on_clear_cache(self, frame: Frame) -> None:
        self._drop(self._batch.clear())

    def _on_shutdown(self, frame: Frame) -> None:
        self._running = False

    def _drop(self, sequences: Iterable[Sequence]) -> None:
        for sequence in sequences:
            self._runner.drop(sequence)

    # --- steps --------------------------------------------------------------------------------

    def _release_ready(self) -> None:
        """Let those sequences take part whose grammars are compiled."""
        for sequence in self._batch.held:
            if self._runner.prepare(sequence):
                self._batch.hold(sequence.id, False)

    def _run_step(self, plan: StepPlan) -> None:
        batch = self._batch
        self._step += 1
        counts = batch.counts
        self._beat(Phase.PREFILL if counts.prefill_tokens else Phase.DECODE)
        started = time.perf_counter_ns()
        gap = started - self._computed_at if self._computed_at else 0
        result = self._compute(plan)
        self._computed_at = time.perf_counter_ns()
        self._beat(Phase.REPLYING)
        report = StepReport(
            step=self._step,
            acknowledged=self._applied,
            gap_ns=gap,
            forward_ns=result.forward_ns,
            sample_ns=result.sample_ns,
            prefill_tokens=counts.prefill_tokens,
            decode_rows=counts.decode_rows,
            stalled_rows=counts.stalled_rows,
            draft_tokens=counts.draft_tokens,
        )
        dropped, faults = batch.advance(plan, result, report)
        self._drop(dropped)
        report.held = len(batch)
        report.recovered = int(result.raised and not faults)
        self._faults.extend(faults)
        self._reply(report)

    def _report_idle(self) -> None:
        """Tell the router what it does not know yet when no step will do it."""
        stalled = self._batch.counts.stalled_rows
        if (self._applied, stalled) != (self._acknowledged, self._stalled) or self._faults:
            held = len(self._batch)
            self._reply(StepReport(self._step, self._applied, held=held, stalled_rows=stalled))

    def _reply(self, report: StepReport) -> None:
        channel = self._channel
        most = channel.writer.max_payload
        if self._faults:  # before the STEP whose acknowledgement covers them
            for frame in replies.encode_fault_frames(self._applied, self._faults, most):
                channel.send(frame)
            self._faults.clear()
        for frame in replies.encode_report(report, most):
            channel.send(frame)
        self._acknowledged, self._stalled = report.acknowledged, report.stalled_rows

    def _compute(self, plan: StepPlan) -> StepResult:
        """Run the step; when it raises, find the rows that fail alone and fault only those."""
        try:
            result = self._runner.step(plan)
            if len(result.rows) != len(plan.rows):
                raise RuntimeError(f"{len(result.rows)} results for {len(plan.rows)} rows")
            return result
        except GroupBroken:
            raise
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            if len(plan.rows) == 1:
                return StepResult([RowResult(fault=_describe(error))], 0, 0, raised=True)
        self._beat(self._phase)  # the retries count as progress
        middle = len(plan.rows) // 2
        halves = [slice_plan(plan, 0, middle), slice_plan(plan, middle, len(plan.rows))]
        results = [self._compute(half) for half in halves]
        return StepResult(
            rows=[row for half in results for row in half.rows],
            forward_ns=sum(half.forward_ns for half in results),
            sample_ns=sum(half.sample_ns for half in results),
            raised=True,
        )

    def _beat(self, phase: Phase) -> None:
        self._phase = phase
        self._channel.beat(self._step, phase)


def _describe(error: Exception) -> str:
    text = str(error).strip() or "no message"
    return f"the model failed on this sequence: {type(error).__name__}: {text}"
