"""Ends at which prefixes are kept: whatever prevents it is said, and costs the prefixes alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import trio
import trio.testing

from tests.router.shards.test_prefix_store import INFO, KEPT, opened, settings
from tgi_trio.ipc.prefixes import KeepOrder, PrefixReport
from tgi_trio.router.scheduling.kept_prefixes import Collected, KeptPrefixes
from tgi_trio.router.shards import handshake
from tgi_trio.router.shards.prefix_keeping import KEEP_TIMEOUT, keep_prefixes
from tgi_trio.settings.records import Settings

__all__ = ["settings"]  # a fixture

FOUND = Collected(KEPT, [9, 8, 7, 6, 5], [])
Shard = Callable[[Any, Any, KeepOrder], Awaitable[PrefixReport]]


async def writes(end: Any, send: Any, order: KeepOrder) -> PrefixReport:
    (order.folder / f"{order.key.hex()}-0.prefixes").write_bytes(b"numbers")
    return PrefixReport(7)


async def cannot(end: Any, send: Any, order: KeepOrder) -> PrefixReport:
    (order.folder / f"{order.key.hex()}-1.prefixes").write_bytes(b"num")  # another rank's
    return PrefixReport(0, "[Errno 28] No space left on device")


async def hangs(end: Any, send: Any, order: KeepOrder) -> PrefixReport:
    await trio.sleep_forever()
    raise AssertionError


async def keep(settings: Settings, shard: Shard, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keep prefixes; return the names in the folder."""
    store = opened(settings)
    monkeypatch.setattr(handshake, "keep_prefixes", shard)
    await keep_prefixes(store, None, None, INFO, FOUND)  # type: ignore[arg-type]
    return sorted(path.name.partition("-")[2] or path.name for path in store.folder.iterdir())


@pytest.mark.trio
async def test_what_is_written_is_kept(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert await keep(settings, writes, monkeypatch) == ["0.prefixes", "index.prefixes", "lock"]
    assert "20 tokens are kept in" in caplog.text


@pytest.mark.trio
async def test_a_rank_that_cannot_leaves_nothing(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert await keep(settings, cannot, monkeypatch) == ["lock"]
    assert f"not kept in {settings.prefix_cache_path}: [Errno 28] No space left" in caplog.text


@pytest.mark.trio
async def test_an_index_that_cannot_be_written_is_said(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def stands_in_the_way(end: Any, send: Any, order: KeepOrder) -> PrefixReport:
        (order.folder / "index.prefixes.partial").mkdir()
        return await writes(end, send, order)

    await keep(settings, stands_in_the_way, monkeypatch)
    assert "not kept in" in caplog.text and "Is a directory" in caplog.text


@pytest.mark.trio
async def test_a_shard_that_takes_too_long_is_not_waited_for(
    settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    autojump_clock: trio.testing.MockClock,
) -> None:
    began = trio.current_time()
    assert await keep(settings, hangs, monkeypatch) == ["lock"]
    assert trio.current_time() - began == KEEP_TIMEOUT
    assert "took longer than 60 s to write; lower --prefix-cache-bytes" in caplog.text


@pytest.mark.trio
async def test_a_shard_that_dies_meanwhile_is_said(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its death cancels whatever waits for it."""
    with trio.move_on_after(0.01) as life:
        await keep(settings, hangs, monkeypatch)
    assert life.cancelled_caught
    assert "not kept in" in caplog.text and "broken off" in caplog.text


@pytest.mark.trio
async def test_nothing_to_keep_asks_nobody(settings: Settings) -> None:
    nothing = Collected(KeptPrefixes(4, ()), [], [])
    await keep_prefixes(opened(settings), None, None, INFO, nothing)  # type: ignore[arg-type]
