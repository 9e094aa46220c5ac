"""The end of a shard that is told to end while it has not taken all commands."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from tests.router.harness import byte_tokenizer, make_request
from tests.router.shards.supervisor_support import FakeArgv, supervised
from tgi_trio.ipc.endpoints import Endpoints
from tgi_trio.router.shards.group_states import ShardState
from tgi_trio.testing.fake_model import FakeSettings


@pytest.mark.trio
async def test_a_shard_is_told_to_end_behind_a_prompt_that_is_half_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing may be sent within a frame in parts, and the rest of it waits for a slow step."""
    small = partial(Endpoints.create, request_bytes=4096)
    monkeypatch.setattr(Endpoints, "create", small)
    argv = FakeArgv(FakeSettings(vocab_size=259, step_ms=300))
    tokenizer = byte_tokenizer(tmp_path)
    async with supervised(tmp_path, argv) as (engine, supervisor):
        with engine.submit(make_request(tokenizer, "x", 100)) as running:
            async for _ in running:  # a step has been computed, and the next one is
                break
            with engine.submit(make_request(tokenizer, "y" * 3000, 1)):
                link = engine._link
                assert link is not None and link._backlog
                supervisor.stop()
                await supervisor.ended.wait()
    assert supervisor.state is ShardState.GONE
    assert (supervisor._trouble, argv.spawned) == ("", 1)
