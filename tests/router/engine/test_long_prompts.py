"""Prompts that are longer than the ring of commands, through a real channel."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.router.harness import collect, engine_on_fake_shard, expected, make_request
from tgi_trio.router.engine.stream import StreamEnd
from tgi_trio.testing.fake_model import FakeSettings


@pytest.mark.trio
async def test_prompts_that_are_longer_than_the_ring_of_commands(tmp_path: Path) -> None:
    """Sent in parts, while others are waiting, running and leaving."""
    fake = FakeSettings(vocab_size=259)
    async with engine_on_fake_shard(tmp_path, fake, request_bytes=4096) as bench:

        async def ask(prompt: str, count: int) -> None:
            with bench.engine.submit(make_request(bench.tokenizer, prompt, count)) as stream:
                tokens = await collect(stream)
            assert [t.id for t in tokens] == expected(bench, fake, prompt, count)

        async def leave(prompt: str) -> None:
            with bench.engine.submit(make_request(bench.tokenizer, prompt, 9)) as stream:
                await trio.lowlevel.checkpoint()
            assert stream.end is StreamEnd.CANCELLED

        for _ in range(3):
            async with trio.open_nursery() as nursery:
                for n, prompt in enumerate(("x" * 3000, "short", "y" * 3500, "z" * 2000)):
                    nursery.start_soon(ask, prompt, 5 + n)
                    nursery.start_soon(leave, prompt)
        await bench.settle()
        accepted, ended = bench.balance()
        assert accepted == ended == 24
