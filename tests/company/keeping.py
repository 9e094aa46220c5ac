"""Prefixes of a house that outlive it in files, as those of a server with `--prefix-cache-path`."""

from __future__ import annotations

from pathlib import Path

from tests.company.shard import Shard
from tgi_trio.ipc.frame_codec import Frame
from tgi_trio.ipc.frames import FrameKind
from tgi_trio.ipc.prefixes import (
    decode_prefix_reply,
    encode_keep,
    encode_restore,
)
from tgi_trio.ipc.startup import ShardInfo
from tgi_trio.model.facts import ModelFacts
from tgi_trio.router.scheduling.kept_prefixes import Collected
from tgi_trio.router.scheduling.scheduler import Scheduler
from tgi_trio.router.shards.prefix_store import PrefixStore
from tgi_trio.settings.records import Options
from tgi_trio.settings.resolve import resolve


class Shelf:
    """The folder of one house."""

    def __init__(self, folder: Path, info: ShardInfo) -> None:
        """`info`: of the shards."""
        model = folder / "model"
        model.mkdir()
        options = Options(prefix_cache_path=folder / "kept")
        facts = ModelFacts(path=model, model_type="llama", max_positions=2048)
        with PrefixStore.open(resolve(options, facts)) as store:
            assert store is not None
            self._store = store
        self._info = info
        self._found: Collected | None = None

    def collect(self, shard: Shard, scheduler: Scheduler) -> None:
        """See what there is to keep, as long as the router knows."""
        *_, self._found = scheduler.collect_prefixes(self._store.budget(self._info, shard.memory))

    def keep(self, shard: Shard, part: int) -> None:
        """Have a shard that serves nobody write that; `part`: blocks at a time; 0: all."""
        found = self._found
        if found is None or not found.blocks:
            return
        order = self._store.order(found)
        for each in order.cut(part, part) if part else (order,):
            _tell(shard, encode_keep(0, each))
        if part:
            self._store.sync(order)
        self._store.save(self._info, order, found.prefixes)

    def restore(self, shard: Shard, scheduler: Scheduler) -> None:
        """Have a shard that has served nobody begin with what there is."""
        found = self._store.load(self._info, shard.memory)
        if found is None:
            return
        _tell(shard, encode_restore(0, found.order))
        scheduler.restore_prefixes(found.prefixes, found.on_device)


def _tell(shard: Shard, frame: bytes) -> None:
    """Have a shard carry out an order; raises AssertionError unless it has done so."""
    shard.rings.down.append(frame)
    shard.rings.up.clear()
    shard.turn()
    replies = [Frame(memoryview(each)) for each in shard.rings.up]
    report = next(
        decode_prefix_reply(each) for each in replies if each.kind is FrameKind.PREFIX_REPLY
    )
    assert report.error == "", report
    shard.rings.up.clear()
