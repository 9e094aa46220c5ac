"""Adapters that are unloaded while a request that has found them does something else."""

from __future__ import annotations

import pytest
import trio

from tests.router.adapters.test_registry import served, waits
from tgi_trio.errors import Unavailable


@pytest.mark.trio
@pytest.mark.parametrize("was_there", [True, False])
async def test_one_is_served_to_who_has_found_it_and_then_forgotten(
    was_there: bool, autojump_clock: object
) -> None:
    registry, shard = served(2, 1)
    forgotten: list[int] = []
    registry.on_forgotten(forgotten.append)
    adapter = registry.find("a0" if was_there else "a1")
    registry.unload(adapter.name)  # the request is being tokenised
    assert forgotten == [adapter.number]
    await waits(shard, adapter)
    assert shard.has == {adapter.number}
    registry.release(adapter)
    registry.check()
    assert not shard.has and not registry.loaded
    assert forgotten == [adapter.number] * 2  # there are prefixes of it again


@pytest.mark.trio
async def test_whoever_waits_for_one_is_told_of_the_end(autojump_clock: object) -> None:
    registry, _ = served(2, 1)
    adapter = registry.find("a1")
    registry.unload("a1")
    async with trio.open_nursery() as nursery:

        async def close() -> None:
            await trio.sleep(1)
            registry.close("the server is shutting down")

        nursery.start_soon(close)
        began = trio.current_time()
        with pytest.raises(Unavailable, match="shutting down"):
            await registry.acquire(adapter)
        assert trio.current_time() == began + 1
    registry.check()
