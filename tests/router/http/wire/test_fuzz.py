"""A slice of `tests.stress.fuzz`: hostile requests get no 5xx and leave nothing behind."""

from __future__ import annotations

import gc

import pytest
import trio
import trio.testing

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import served
from tests.stress.fuzz_client import open_files, run, statuses
from tgi_trio.router.http.call import HttpSettings
from tgi_trio.router.http.engine_api import ServedLimits


def living() -> tuple[int, int]:
    """Return how many tasks and descriptors there are."""
    return trio.lowlevel.current_statistics().tasks_living, open_files()


@pytest.mark.trio
@pytest.mark.parametrize("shortcut", [True, False])
async def test_hostile_requests_get_no_5xx_and_leave_nothing(shortcut):
    fake = FakeEngine(limits=ServedLimits(max_concurrent_requests=64))
    async with served(fake, HttpSettings(shortcut=shortcut)) as server:
        await trio.testing.wait_all_tasks_blocked()
        gc.collect()  # what tests before this one have left, which would go in the middle of it
        before = living()
        findings = await run(server.raw, count=400, seed=1, parallel=8)
        assert findings.violations == []
        assert len(findings.kinds) > 10 and findings.answers["200"] > 20
        with trio.fail_after(120):
            while living() != before or fake.live or fake.permits:
                await trio.sleep(0.01)
        client = await server.connect()
        assert (await client.post("/generate", {"inputs": "x"})).status == 200


def test_answers_are_told_apart():
    plain = b"HTTP/1.1 200 \r\ncontent-length: 2\r\n\r\nab"
    chunks = b"HTTP/1.1 422 \r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n"
    ahead = b"HTTP/1.1 100 \r\n\r\n"
    assert statuses(ahead + plain + chunks + plain) == ([200, 422, 200], True)
    for data in (plain, chunks):
        for end in range(1, len(data)):
            assert statuses(data[:end])[1] is False
