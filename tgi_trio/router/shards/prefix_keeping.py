"""Has a shard group begin with the prefixes that its predecessor has computed, and keep its own.

Says also what it keeps in the host's memory while it serves.

Nothing that goes wrong here costs more than the prefixes: a start goes on without, an end as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import trio

from tgi_trio.ipc.command_channel import CommandChannel
from tgi_trio.ipc.prefixes import explain_failure
from tgi_trio.ipc.startup import ShardInfo, WarmupResult
from tgi_trio.router.shards import handshake
from tgi_trio.router.shards.prefix_store import PrefixStore, Restoring
from tgi_trio.router.telemetry.metrics import Metrics

if TYPE_CHECKING:  # it comes in while the first shards load
    from tgi_trio.router.engine.engine import Engine
    from tgi_trio.router.scheduling.kept_prefixes import Collected

log = logging.getLogger(__name__)

KEEP_TIMEOUT: Final = 60.0  # seconds that a shard gets to write prefixes before it is told to end
_LAST_ACKNOWLEDGEMENT: Final = 1.0  # seconds that the last request's blocks are waited for
_LOOK_AGAIN: Final = 0.005  # seconds
_MEGABYTE: Final = 1e6


def tell_copies(memory: WarmupResult, metrics: Metrics) -> None:
    """Say how much of the host's memory a shard has taken for copies of prefixes, if any."""
    metrics.gauge("tgi_prefix_cache_host_bytes", memory.host_bytes)
    if not memory.host_blocks:
        return
    log.info(
        "prefixes: %.0f MB of the host's memory on each rank keep up to %d tokens of those evicted",
        memory.host_bytes / _MEGABYTE,
        memory.host_blocks * memory.block_size,
    )


async def restore_prefixes(
    store: PrefixStore, end: CommandChannel, info: ShardInfo, memory: WarmupResult
) -> Restoring | None:
    """Have a shard that is ready read what is kept; returns it, or None if nothing is used."""
    began = trio.current_time()
    found = store.load(info, memory)
    if found is None:
        return None
    report = await handshake.restore_prefixes(end, found.order)
    if report.error:
        log.warning("prefixes: what is kept is not used: %s", report.error)
        return None
    kept, hosted = found.prefixes, found.order.host_blocks * found.prefixes.block_size
    log.info(
        "prefixes: %d tokens of earlier prompts are there again%s (%.0f MB in %.1f s)",
        kept.blocks * kept.block_size,
        f", {hosted} of them in the host's memory" if hosted else "",
        report.nbytes / _MEGABYTE,
        trio.current_time() - began,
    )
    return found


async def collect_prefixes(
    store: PrefixStore, engine: Engine, info: ShardInfo, memory: WarmupResult
) -> Collected:
    """Return what is to be kept, once the shard has acknowledged the end of the last request."""
    with trio.move_on_after(_LAST_ACKNOWLEDGEMENT):
        while engine.scheduler.held_blocks:
            await trio.sleep(_LOOK_AGAIN)
    *_, found = engine.scheduler.collect_prefixes(store.budget(info, memory))
    if found is None:
        raise RuntimeError("prefixes have changed while nobody else ran")
    return found


async def keep_prefixes(
    store: PrefixStore,
    end: CommandChannel,
    send: Callable[[bytes], None],
    info: ShardInfo,
    found: Collected,
) -> None:
    """Have a shard that serves nobody any more write what is to be kept, and say what came of it.

    `send`: sends a frame behind all that wait. Its death, or a server that is told to end at once,
    cancels this.
    """
    tokens = found.prefixes.blocks * found.prefixes.block_size
    if not tokens:
        return
    began, failure = trio.current_time(), "the shard, or this server, was broken off meanwhile"
    try:
        with trio.move_on_after(KEEP_TIMEOUT) as waiting:
            order = store.order(found)
            report = await handshake.keep_prefixes(end, send, order)
            failure = report.error
            if failure:
                store.sweep()
            else:
                store.save(info, order, found.prefixes)
        if waiting.cancelled_caught:
            failure = (
                f"they took longer than {KEEP_TIMEOUT:g} s to write; lower --prefix-cache-bytes"
            )
    except OSError as error:
        failure = explain_failure(error)
    finally:
        if failure:
            log.warning("prefixes are not kept in %s: %s", store.folder, failure)
    if not failure:
        log.info(
            "prefixes: %d tokens are kept in %s (%.0f MB in %.1f s)",
            tokens,
            store.folder,
            report.nbytes / _MEGABYTE,
            trio.current_time() - began,
        )
