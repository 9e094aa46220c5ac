"""What runs in threads: results, errors, and what is left of those that nobody waits for."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import NoReturn

import pytest
import trio

from tgi_trio.process.threads import run_in_thread

pytestmark = pytest.mark.trio


class Thing:
    pass


async def test_a_result_comes_out_of_another_thread() -> None:
    limiter = trio.CapacityLimiter(1)
    found = await run_in_thread(lambda: (threading.get_ident(), limiter.borrowed_tokens), limiter)
    assert found[0] != threading.get_ident() and found[1] == 1


async def test_an_error_leaves_nothing_behind() -> None:
    thing = Thing()
    left = weakref.ref(thing)

    async def fail(held: Thing) -> None:
        def raise_it() -> NoReturn:
            raise ValueError(id(held))

        with pytest.raises(ValueError, match=str(id(held))):
            await run_in_thread(raise_it)

    gc.disable()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail, thing)
        del thing
        assert left() is None
    finally:
        gc.enable()


async def test_a_thread_that_nobody_waits_for_goes_on() -> None:
    may_end, ended = threading.Event(), threading.Event()

    def wait() -> None:
        may_end.wait(10)
        ended.set()

    with trio.move_on_after(0.01) as scope:
        await run_in_thread(wait)
    assert scope.cancelled_caught and not ended.is_set()
    may_end.set()
    assert ended.wait(10)
