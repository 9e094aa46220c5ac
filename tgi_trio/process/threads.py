"""Runs functions in threads so that their errors leave no cycles behind.

An error that trio carries out of a thread is held by frames that its own traceback holds, and with
it the task that waited for it and all that this task has made: a large body and what it became.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio
from outcome import Error, Value, capture

from tgi_trio.errors import Unavailable
from tgi_trio.process.thread_limit import describe_failure

Result = TypeVar("Result")


async def run_in_thread(
    function: Callable[[], Result], limiter: trio.CapacityLimiter | None = None
) -> Result:
    """Return what `function` returns in a thread, or raise what it raises. A checkpoint.

    Nothing waits for the thread once the task is cancelled: its result is dropped. Raises
    Unavailable where no thread can be started.
    """
    box: list[Value[Result] | Error] = []  # emptied here, so that no frame keeps what it held

    def fill_box() -> None:
        box.append(capture(function))

    try:
        await trio.to_thread.run_sync(fill_box, abandon_on_cancel=True, limiter=limiter)
    except RuntimeError as error:
        if (problem := describe_failure(error)) is None:
            raise
        raise Unavailable(problem) from error
    return box.pop().unwrap()
