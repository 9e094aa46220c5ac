"""The loop of a shard: apply commands, run a step, reply.

The router's commands are standing orders, which stay in force until changed. Between steps the loop
reads its request ring (one load from memory if it is empty), applies the commands, runs one step of
the running batch, and writes one STEP frame, which also acknowledges the commands. It sleeps only
if no sequence can advance.

If the runner can launch a step before the tokens of the previous one are read
(`Runner.runs_ahead`), the next step is planned and launched first, and the previous one is settled
while it runs. If ranks are pipeline stages, as many steps of different sequences are in flight as
there are stages.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Set
from dataclasses import replace

from tgi_trio.errors import PeerGone, ProtocolMismatch
from tgi_trio.ipc.adapters import decode_adapter, encode_adapter_reply
from tgi_trio.ipc.frame_codec import Frame
from tgi_trio.ipc.frames import FrameKind, Phase
from tgi_trio.ipc.images import SequenceImage
from tgi_trio.ipc.messages import ExtendRow, decode_extend, decode_prefill
from tgi_trio.ipc.startup import (
    Hello,
    decode_warmup,
    encode_hello,
    encode_info,
    encode_warmup_reply,
)
from tgi_trio.settings.records import ShardOptions
from tgi_trio.shard.contract import ShardSequence, StepPlan
from tgi_trio.shard.handshake import expect_hello
from tgi_trio.shard.loop.adapter_loader import AdapterLoader
from tgi_trio.shard.loop.batch import Batch
from tgi_trio.shard.loop.flight import Flight
from tgi_trio.shard.loop.image_queue import ImageQueue, ImageSource
from tgi_trio.shard.loop.prefix_orders import PrefixOrders
from tgi_trio.shard.loop.reporting import Reporter
from tgi_trio.shard.loop.retries import compute, try_launch, try_proceed
from tgi_trio.shard.loop.soundness import Judge, prove_sound
from tgi_trio.shard.loop_channel import BEAT_S, Channel
from tgi_trio.shard.plan_parts import fill_inputs
from tgi_trio.shard.runner import Runner

# Looking up a member of an enumeration takes as long as ten calls that do nothing.
_PREFILL, _DECODE, _REPLYING = Phase.PREFILL, Phase.DECODE, Phase.REPLYING
_HELD_S = 0.001  # how often held sequences are checked when nothing else can move


def run(
    channel: Channel,
    factory: Callable[[], Runner],
    options: ShardOptions,
    *,
    rank: int = 0,
    world_size: int = 1,
    incarnation: int = 0,
    images: ImageSource | None = None,
) -> None:
    """Serve one router until SHUTDOWN arrives or the router dies; `images`: what computes them.

    HELLO is sent before `factory` is called: it may import torch and load weights for minutes, and
    the router knows meanwhile that this process lives. Raises ProtocolMismatch when the router
    reads the wire differently, RunnerBroken when the runner computes nothing any more, and whatever
    `factory` or the runner's warm-up raise.
    """
    try:
        channel.beat(0, Phase.LOADING)
        channel.send(encode_hello(Hello.of_this_process(rank, world_size, incarnation)))
        expect_hello(channel, "router")
        cores = os.sched_getaffinity(0)  # before the kernels pin this thread
        runner = factory()
        queue = None if images is None else images(cores)
        successor = incarnation > 1
        Worker(channel, runner, options, successor=successor, cores=cores, images=queue).serve()
    except PeerGone:
        return  # nobody is left to report to


class Worker:
    """The state of the loop: the running set, the standing limits, what is acknowledged."""

    def __init__(
        self,
        channel: Channel,
        runner: Runner,
        options: ShardOptions,
        *,
        successor: bool = False,
        cores: Set[int] | None = None,
        images: ImageQueue | None = None,
    ) -> None:
        """Start with an empty batch; WARMUP must come before the first PREFILL.

        `successor`: another shard has served before, with the same model. `cores`: what may be
        computed on beside the steps; None: the caller's. `images`: None: none are served.
        """
        self._channel = channel
        self._runner = runner
        self._judge = Judge(runner)
        self._successor = successor
        self._speculate = (options.speculate or 0) if runner.info.speculates else 0
        # WARMUP makes the one with a KV cache; this one refuses every row.
        self._batch = Batch(vocab_size=0, block_size=1, blocks=0, eos_ids=())
        self._token_budget = 1  # set by WARMUP, then by LIMITS
        self._applied = 0  # number of the last command applied
        self._step = 0
        self._computed_at = 0  # perf_counter_ns at the end of the last step; 0: not back to back
        self._phase = Phase.IDLE
        self._dropped = False  # a command has freed blocks that the router waits for
        self._running = True
        self._adapters = AdapterLoader(runner.adapters, cores)
        self._images = images or ImageQueue(None, None, 0)
        self._prefixes = PrefixOrders(channel, runner)
        self._reports = Reporter(channel, self._images, self._prefixes)
        self._ahead: Flight | None = None  # launched, not settled; the batch expects it
        self._micro_batches = options.pipeline_stages
        self._pipeline: deque[Flight] = deque()  # micro-batches in flight, oldest first
        self._handlers: dict[FrameKind, Callable[[Frame], None]] = {
            FrameKind.INFO: self._on_info,
            FrameKind.WARMUP: self._on_warmup,
            FrameKind.LIMITS: self._on_limits,
            FrameKind.PREFILL: self._on_prefill,
            FrameKind.EXTEND: self._on_extend,
            FrameKind.FILTER: self._on_filter,
            FrameKind.LOAD_ADAPTER: self._on_load_adapter,
            FrameKind.DROP_ADAPTER: self._on_drop_adapter,
            FrameKind.KEEP: self._on_keep,
            FrameKind.RESTORE: self._prefixes.restore,
            FrameKind.TRANSFER: self._prefixes.transfer,
            FrameKind.SHUTDOWN: self._on_shutdown,
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
            if self._images.is_busy:
                self._compute_images()
            if self._prefixes.transfers.is_busy:
                self._advance_transfers()
            if self._batch.holds:
                self._release_ready()
            if self._adapters.is_loading:
                self._install_adapters()
            plan = self._batch.plan(self._token_budget)
            if plan is not None and (self._ahead is None or self._runner.runs_ahead(plan)):
                self._run_step(plan)
            elif self._ahead is not None:
                self._settle_in_flight()
            elif self._pipeline:
                self._settle(self._pipeline.popleft())
            else:
                self._report_idle()
                self._computed_at = 0
                self._beat(Phase.IDLE)
                if not self._images.is_waiting:
                    soon = self._batch.held or self._adapters.is_loading
                    soon = soon or self._prefixes.transfers.is_busy
                    self._channel.wait(_HELD_S if soon else BEAT_S)
        self._settle_in_flight()
        self._adapters.close()
        self._beat(Phase.STOPPING)
        self._report_idle()

    # --- commands -----------------------------------------------------------------------------

    def _drain(self) -> None:
        """Apply every command that has arrived."""
        # Control comes from the router's process (`ShardLink.send`).
        receive, release = self._channel.try_receive, self._channel.release
        while self._running and (view := receive()) is not None:
            frame = Frame(view)
            if (handler := self._handlers.get(frame.kind)) is None:
                raise ProtocolMismatch("router", f"{frame.kind.name} is not a command")
            handler(frame)
            self._applied = max(self._applied, frame.word("command"))  # some have no number
            del frame, view  # nothing reads the ring's bytes once they are given back
            release()

    def _on_info(self, frame: Frame) -> None:
        self._channel.send(encode_info(frame.word("command"), self._runner.info))

    def _on_warmup(self, frame: Frame) -> None:
        self._settle_in_flight()
        self._beat(Phase.WARMING)
        self._install_adapters(wait=True)  # the memory that they take is no KV cache's
        self._drop(self._batch.clear())
        self._prefixes.end()
        request = replace(decode_warmup(frame), tower_bytes=self._images.measure())
        found = self._runner.warm_up(request)
        prove_sound(self._runner, first=not self._successor)
        info = self._runner.info
        self._batch = Batch(
            vocab_size=info.vocab_size,
            block_size=found.block_size,
            blocks=found.blocks,
            eos_ids=info.eos_ids,
            state_slots=found.state_slots,
            drafter=self._runner.drafter(self._speculate) if self._speculate else None,
            draft_budget=info.draft_budget,
            micro_batches=self._micro_batches,
        )
        self._prefixes.begin()
        self._token_budget = max(1, request.max_prefill_tokens)
        self._channel.send(encode_warmup_reply(frame.word("command"), found))
        self._runner.prepare(None)  # beside the router's last preparations

    def _on_limits(self, frame: Frame) -> None:
        self._token_budget = max(1, frame.word("token_budget"))

    def _on_prefill(self, frame: Frame) -> None:
        for row in decode_prefill(frame):
            try:
                if (why := self._adapters.refusal(row.sampling.adapter)) is not None:
                    raise ValueError(why)
                sequence = self._batch.add(row)
                delayed = self._prefixes.transfers.delays(row)
                if delayed or sequence.sampling.grammar or row.images:
                    self._batch.hold(sequence.id)
            except ValueError as error:
                self._reports.add_fault(row.sequence, f"cannot be run: {error}")
                continue
            if row.images:
                self._take_images(sequence, row.images)

    def _on_extend(self, frame: Frame) -> None:
        for row in decode_extend(frame):
            if not self._prefixes.transfers.delays_extension(row):
                self._extend(row)

    def _extend(self, row: ExtendRow) -> None:
        try:
            self._batch.extend(row)
        except ValueError as error:
            self._reports.add_fault(row.sequence, f"cannot be extended: {error}")
            self._drop(self._batch.remove([row.sequence]))

    def _on_filter(self, frame: Frame) -> None:
        self._drop(self._batch.remove(frame.column("sequence").tolist()))
        self._dropped = True

    def _on_load_adapter(self, frame: Frame) -> None:
        self._adapters.order(decode_adapter(frame))

    def _on_drop_adapter(self, frame: Frame) -> None:
        self._settle_in_flight()  # what is computed may still be reading it
        self._adapters.drop(frame.word("adapter"))

    def _on_keep(self, frame: Frame) -> None:
        self._settle_in_flight()
        self._prefixes.keep(frame)

    def _on_shutdown(self, frame: Frame) -> None:
        self._running = False

    def _drop(self, sequences: Iterable[ShardSequence]) -> None:
        for sequence in sequences:
            self._runner.drop(sequence)
            self._images.drop(sequence.id)
            self._prefixes.transfers.drop(sequence.id)

    def _install_adapters(self, *, wait: bool = False) -> None:
        """Have the steps to come compute with what has been loaded, and say so."""
        for report in self._adapters.finish(wait=wait):
            self._channel.send(encode_adapter_reply(report))

    # --- steps --------------------------------------------------------------------------------

    def _take_images(self, sequence: ShardSequence, images: tuple[SequenceImage, ...]) -> None:
        try:
            geometry = self._images.add(sequence, images)
        except ValueError as error:
            self._reports.add_fault(sequence.id, f"cannot be run: {error}")
            self._drop(self._batch.remove([sequence.id]))
            return
        if geometry is not None:
            self._batch.shape(sequence.id, geometry)

    def _compute_images(self) -> None:
        """Have the features of one image computed, if any are wanted.

        Raises RunnerBroken where the device computes nothing any more, instead of faulting all
        requests with images that come.
        """
        if self._images.advance():
            self._settle_in_flight()
            prove_sound(self._runner)
        if self._images.is_partial:  # a long video is progress without a step
            self._report_idle(always=True)
        faults = self._images.take_faults()
        self._reports.add_faults(faults)
        self._drop(self._batch.remove([fault.sequence for fault in faults]))

    def _advance_transfers(self) -> None:
        """Have copies between device and host go on, and add blocks whose copies are over."""
        self._prefixes.transfers.advance()
        for row in self._prefixes.transfers.take_due():
            self._extend(row)

    def _release_ready(self) -> None:
        """Let sequences take part whose grammars, images and blocks are there."""
        for sequence in self._batch.held:
            waits = sequence.id in self._images or sequence.id in self._prefixes.transfers
            if self._runner.prepare(sequence) and not waits:
                self._batch.hold(sequence.id, False)

    def _run_step(self, plan: StepPlan) -> None:
        """Run a step to its end, or launch it and settle the one before."""
        self._step += 1
        plan.applied, plan.transfers = self._applied, self._prefixes.transfers.done
        self._beat(_PREFILL if plan.counts.prefill_tokens else _DECODE)
        flight = Flight(self._step, plan, time.perf_counter_ns())
        if self._micro_batches > 1:
            self._launch_micro_batch(flight)
            return
        followed, is_ahead = self._batch.is_followed(plan), self._ahead is not None
        # With a step in flight, `serve` has asked already whether this one may be launched.
        if not is_ahead and not (followed and self._runner.runs_ahead(plan)):
            self._settle(flight)
            return
        pending = try_launch(self._runner, plan)
        if not self._settle_in_flight(followed=True):
            self._step -= 1  # this one was void
            return
        if plan.moves:
            self._batch.settle_positions(plan)
        if pending is not None and try_proceed(pending):
            flight.pending = pending
            if followed:
                self._batch.expect(plan)
                self._ahead = flight
                return
        else:  # nothing may follow it before it has been computed
            fill_inputs(plan)
        self._settle(flight)

    def _launch_micro_batch(self, flight: Flight) -> None:
        """Launch a step beside those in flight; settle the oldest once every stage has one."""
        flight.pending = self._runner.launch(flight.plan)
        self._batch.mark_in_flight(flight.plan)
        self._pipeline.append(flight)
        if len(self._pipeline) == self._micro_batches:
            self._settle(self._pipeline.popleft())

    def _settle_in_flight(self, *, followed: bool = False) -> bool:
        """Settle what is in flight, if anything; return whether a step launched after it is valid.

        If it has raised, its rows are computed again, and a step launched on top of it is void.
        `followed`: there is such a step.
        """
        while self._pipeline:
            self._settle(self._pipeline.popleft())
        flight, self._ahead = self._ahead, None
        return flight is None or self._settle(flight, followed=followed)

    def _settle(self, flight: Flight, *, followed: bool = False) -> bool:
        """Wait for a step, move the batch by it and reply; return whether nothing has raised."""
        plan, gap = flight.plan, flight.gap_after(self._computed_at)
        result = compute(
            self._runner, plan, flight.pending, self._report_progress, followed=followed
        )
        self._judge.examine(result)
        self._computed_at = time.perf_counter_ns()
        self._beat(_REPLYING)
        moved = self._batch.settle(plan, result)
        if moved.dropped:
            self._drop(moved.dropped)
        if moved.faults:
            self._reports.add_faults(moved.faults)
        words = {"held": len(self._batch), "recovered": int(result.raised and not moved.faults)}
        self._reports.send(plan.applied, moved.columns, words | flight.describe(result, gap))
        return not result.raised

    def _report_idle(self, *, always: bool = False) -> None:
        """Tell the router what it does not know yet when no step will do it.

        `always`: also if that is nothing, so that it knows of progress.
        """
        stalled = self._batch.counts.stalled_rows
        if always or self._reports.has_news(self._applied, stalled):
            words = {"step": self._step, "held": len(self._batch), "stalled_rows": stalled}
            self._reports.send(self._applied, {}, words)

    def _beat(self, phase: Phase) -> None:
        self._phase = phase
        self._channel.beat(self._step, phase)

    def _report_progress(self) -> None:
        self._beat(self._phase)
