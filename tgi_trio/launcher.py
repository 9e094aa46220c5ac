"""The root nursery: shard group, engine, HTTP server and signals, from settings to exit.

A start is fast because things load side by side. A pre-started shard process imports what it needs
while this module is imported and the model is looked up (`ipc/waiting.py`). It then loads the model
while the router's engine and HTTP modules are imported.
"""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import trio

from tgi_trio.errors import TgiTrioError, find_first_leaf
from tgi_trio.hub.resolve import read_pipeline_tag
from tgi_trio.ipc.images import ImageArena
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.ipc.waiting import WaitingShards
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.serving import describe_serving
from tgi_trio.process.signals import received_signals
from tgi_trio.process.sockets import bind_sockets, check_certificate
from tgi_trio.router.adapters.registry import AdapterRegistry
from tgi_trio.router.media.media_model import name_served
from tgi_trio.router.media.served_images import decide_images
from tgi_trio.router.shards.awaited_ranks import AwaitedRanks
from tgi_trio.router.shards.group_states import ShardState
from tgi_trio.router.shards.loading_progress import show_loading
from tgi_trio.router.shards.local_group import LocalGroup
from tgi_trio.router.shards.prefix_store import PrefixStore
from tgi_trio.router.shards.rank_connection import RankSource
from tgi_trio.router.shards.shard_calls import ShardCalls
from tgi_trio.router.shards.shard_instance import ShardArgv, real_shard
from tgi_trio.router.shards.supervisor import STOP_TIMEOUT, Started, Supervisor, Watch
from tgi_trio.router.telemetry.metrics import Metrics
from tgi_trio.router.text.tokenizer_files import tokenizer_json
from tgi_trio.settings.cluster_secret import read_cluster_secret
from tgi_trio.settings.idle import find_idle_limits
from tgi_trio.settings.records import Options, Settings
from tgi_trio.settings.resolve import with_kv
from tgi_trio.settings.served import with_model
from tgi_trio.start.rank_settings import find_rank_settings
from tgi_trio.start.tables import print_addresses, print_start
from tgi_trio.start.timeline import Timeline

if TYPE_CHECKING:
    from tgi_trio.router.assembly import Assembly
    from tgi_trio.router.engine.engine import Engine
    from tgi_trio.router.media.media_service import MediaService

log = logging.getLogger(__name__)

HUB_SECONDS = 5.0  # timeout of asking the hub about the model, while that loads
_SKIPPED = "tgi_request_skipped_tokens"
FAREWELL = 1.0  # seconds for writing the last error events after a drain has timed out


@dataclass(frozen=True, slots=True)
class Listeners:
    """Bound sockets."""

    api: Sequence[socket.socket]
    metrics: Sequence[socket.socket] = ()
    ranks: Sequence[socket.socket] = ()  # where ranks of other machines connect


@contextmanager
def bind(options: Options) -> Iterator[Listeners]:
    """Bind all addresses within the block, and check the certificate.

    So a port in use is an error before anything is loaded. The sockets listen only once the server
    is ready: until then connections are refused rather than kept waiting. Raises
    ConfigurationError.
    """
    check_certificate(options.ssl_certfile, options.ssl_keyfile)
    with (
        bind_sockets(options.addresses) as api,
        bind_sockets(options.metrics_addresses, "--prometheus-port") as metrics,
        bind_sockets(options.rank_addresses, "--rank-address") as ranks,
    ):
        yield Listeners(api, metrics, ranks)


def _log_drafter(settings: Settings) -> None:
    """Log drafter and model, since --model-id may name either."""
    if settings.drafter is None:
        return
    source = "" if settings.draft_model is None else f" of {settings.draft_model}"
    log.info(
        "drafts: %s%s for the model in %s, up to %d tokens a step",
        settings.drafter,
        source,
        settings.model_path,
        settings.speculate,
    )


def _log_acceptance(metrics: Metrics) -> None:
    """Log how many drafts were right."""
    drafted, extra = (int(metrics.value("tgi_batch_draft_tokens")), metrics.histogram(_SKIPPED))
    if drafted and (rows := sum(extra.counts)):
        log.info(
            "drafts: %d of %d were right, %.2f tokens of a sequence a step",
            extra.sum,
            drafted,
            1 + extra.sum / rows,
        )


def _find_ranks(settings: Settings, listeners: Listeners) -> RankSource | None:
    """Return the source of ranks on other machines; None if all ranks run here."""
    if not settings.ranks_elsewhere or settings.cluster_secret_file is None:
        return None
    secret = read_cluster_secret(settings.cluster_secret_file)
    size = settings.num_shard
    ranks = range(size - settings.ranks_elsewhere, size)
    if settings.shard:
        return ShardCalls(settings.shard, secret, ranks)
    return AwaitedRanks(listeners.ranks, secret, ranks)


class Launcher:
    """One run of the server."""

    def __init__(
        self,
        settings: Settings,
        config: ModelConfig,
        listeners: Listeners,
        timeline: Timeline,
        argv: ShardArgv | None = None,
        waiting: WaitingShards | None = None,
        stop_timeout: float = STOP_TIMEOUT,
        prefixes: PrefixStore | None = None,
    ) -> None:
        """`config`: of the model in `settings.model_path`, read with `settings.rope`.

        `argv`: returns a shard's command line; None: that of a shard which serves a model.
        `waiting`: pre-started processes for the first shards; `stop_timeout`: seconds that a shard
        has to exit when told to; `prefixes`: where those computed are kept, if anywhere.
        """
        self._settings = settings
        self._config = config
        self._listeners = listeners
        self._timeline = timeline
        self._stopping = trio.Event()  # the first signal: drain
        self._metrics = Metrics(
            max_input_tokens=settings.max_input_tokens, max_total_tokens=settings.max_total_tokens
        )
        self._image_model, self._unserved = decide_images(settings)
        self._arena = None
        if self._image_model is not None:
            self._arena = ImageArena.create(settings.image_memory)  # outlives the shards
        for warning in find_idle_limits(settings, name_served(self._image_model)):
            log.warning("%s", warning)
        tokenizer = tokenizer_json(settings.tokenizer_path, None, settings.trust_remote_code)
        self._adapters = AdapterRegistry(
            settings.adapter_folders,
            settings.max_loaded_adapters,
            grows=settings.adapter_updates,
            own={} if self._image_model is None else self._image_model.adapters,
        )
        self._ranks = _find_ranks(settings, listeners)
        given = find_rank_settings(settings, config, tokenizer, self._arena, self._image_model)
        self._supervisor = Supervisor(
            self._metrics,
            LocalGroup.starter(argv or real_shard, given, settings.spin_us, self._ranks, waiting),
            WarmupRequest(
                max_prefill_tokens=settings.max_batch_prefill_tokens,
                max_total_tokens=settings.max_total_tokens,
                max_batch_size=settings.max_batch_size,
                max_batch_total_tokens=settings.max_batch_total_tokens,
                max_images=settings.max_images_per_prompt if self._image_model else 0,
            ),
            watch=Watch(settings.stall_timeout, settings.shard_restart_limit, stop_timeout),
            on_move=self._note_start,
            adapters=self._adapters,
            gather=None if self._ranks is None else self._ranks.wait_for_all,
            prefixes=prefixes,
        )

    async def run(self, early: Sequence[int] = ()) -> None:
        """Serve until a signal: the first one drains, the second one stops at once.

        `early`: signals that arrived before they could be received here. Raises ShardCannotStart if
        no shard can be started.
        """
        # Around the nursery, so that signals are received, and kill nothing, until it has ended.
        with trio.open_signal_receiver(*received_signals()) as signals:
            if early:
                return
            try:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._obey_signals, signals, nursery.cancel_scope)
                    await self._serve(nursery)
                    nursery.cancel_scope.cancel()
            except BaseExceptionGroup as group:
                # Show the operator our error without the exception groups of the nurseries.
                if (ours := group.subgroup(TgiTrioError)) is not None:
                    raise find_first_leaf(ours) from group
                raise

    async def _obey_signals(
        self, signals: AsyncIterator[int], everything: trio.CancelScope
    ) -> None:
        async for number in signals:
            name = signal.Signals(number).name
            if self._stopping.is_set() or self._supervisor.started is None:
                log.warning("%s: stopping at once", name)
                everything.cancel()
                return
            log.warning("%s: draining; a second signal stops at once", name)
            self._stopping.set()

    def _note_start(self, state: ShardState) -> None:
        if self._supervisor.started is None:  # later incarnations are not part of the start
            self._timeline.mark(f"shard {state.value}")

    async def _start_supervisor(self, nursery: trio.Nursery) -> None:
        supervisor = self._supervisor
        async with trio.open_nursery() as watching:
            show = partial(
                show_loading,
                lambda: supervisor.pids,
                self._settings.model_path,
                bar_allowed=not self._settings.json_output,
            )
            if self._settings.ranks_elsewhere < self._settings.num_shard:  # some load here
                watching.start_soon(show)
            await nursery.start(supervisor.run)
            watching.cancel_scope.cancel()

    async def _ask_hub(self) -> None:
        """Ask the hub for the model's pipeline tag, by which POST / returns the prompt or not."""
        name, revision = self._settings.model_id, self._settings.revision
        ask = partial(read_pipeline_tag, name, revision, timeout=HUB_SECONDS)
        with trio.move_on_after(HUB_SECONDS) as asking:
            tag = await trio.to_thread.run_sync(ask, abandon_on_cancel=True)
            self._settings = replace(self._settings, model_pipeline_tag=tag)
        if asking.cancelled_caught:
            log.warning("the hub did not say within %s s what %s is for", HUB_SECONDS, name)

    async def _serve(self, nursery: trio.Nursery) -> None:
        supervisor, timeline = self._supervisor, self._timeline
        if self._ranks is not None:
            await nursery.start(self._ranks.run)
        assembly, images = await self._load(nursery)
        if supervisor.started is None:  # stopped before it was ready
            return
        settings = self._finish_settings(supervisor.started)
        print_start(settings, supervisor.started)
        recorder = None
        if settings.record_schedule is not None:
            from tgi_trio.router.telemetry.schedule_recorder import ScheduleRecorder

            recorder = ScheduleRecorder(settings.record_schedule)
            await nursery.start(recorder.run)
        from tgi_trio.router.assembly import scheduling_limits

        limits, info = scheduling_limits(settings, self._config), supervisor.started.info
        engine = assembly.open(
            settings,
            limits,
            supervisor,
            info,
            recorder,
            self._adapters,
            images,
            unserved=self._unserved,
        )
        supervisor.attach(engine)
        nursery.start_soon(engine.watch_deadlines)
        shutdown = trio.Event()
        addresses = await nursery.start(
            assembly.serve, self._listeners.api, self._listeners.metrics, shutdown
        )
        timeline.mark("listening")
        log.info("start-up: %s", timeline)
        _log_drafter(settings)
        print_addresses(settings, addresses)

        await self._stopping.wait()
        await self._drain(engine)
        if settings.drafter is not None:
            _log_acceptance(self._metrics)
        shutdown.set()
        supervisor.stop()
        await assembly.closed.wait()
        await supervisor.ended.wait()

    async def _load(self, nursery: trio.Nursery) -> tuple[Assembly, MediaService | None]:
        """Start the shard, and load the rest of the router meanwhile."""
        async with trio.open_nursery() as start:
            start.start_soon(self._start_supervisor, nursery)
            await self._supervisor.spawned.wait()  # from here on both sides load at once
            start.start_soon(self._ask_hub)
            from tgi_trio.router.assembly import load_assembly

            has_vision = self._image_model is not None
            assembly = await load_assembly(
                self._settings, self._config, self._metrics, has_vision=has_vision
            )
            images = None
            if self._image_model is not None and self._arena is not None:
                images = assembly.open_images(self._image_model, self._settings, self._arena)
                await nursery.start(images.run)
            self._timeline.mark("router loaded")
        return assembly, images

    def _finish_settings(self, started: Started) -> Settings:
        """Complete the settings by the shard's reports, and log how the model is served."""
        memory, info = started.memory, started.info
        slots = max(0, memory.state_slots - 1)
        host = memory.host_blocks, memory.host_slots
        settings = with_kv(self._settings, memory.blocks - 1, memory.block_size, slots, host)
        serving = describe_serving(
            self._config,
            backend=info.backend,
            device=info.device,
            dtype=info.dtype,
            parts=settings.num_shard // settings.pipeline_stages,
            prefix_reuse=info.prefix_reuse,
            speculates=info.speculates,
            undivided=info.undivided,
        )
        log.info("the model is served so: %s", "; ".join(serving.rows()))
        settings, remarks = with_model(settings, serving)
        for remark in remarks:
            log.warning("%s", remark)
        return settings

    async def _drain(self, engine: Engine) -> None:
        """Graceful drain: wait for running requests as long as allowed, then end the rest."""
        engine.retire()
        if delay := self._settings.shutdown_delay:
            log.info("health is red; new requests are taken for another %g s", delay)
            await trio.sleep(delay)
        engine.drain()
        with trio.move_on_after(self._settings.graceful_termination_timeout):
            await engine.wait_drained()
        self._adapters.close("the server is shutting down")  # ends requests that wait for one
        if engine.active:
            log.warning("%d streams are cut off by --graceful-termination-timeout", engine.active)
            engine.fail_all("the server is shutting down")
            with trio.move_on_after(FAREWELL):
                await engine.wait_drained()
