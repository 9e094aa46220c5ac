"""What a test that hangs costs: itself, and no test behind it. A plugin of pytest.

In a debugger nothing hangs: `--timeout 0`.
"""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Awaitable, Callable, Generator

import pytest
import trio

AsyncTest = Callable[..., Awaitable[None]]

# Of the time that a test has, what one in trio may take: it ends by itself, and says where it was.
_OWN_SHARE = 0.9


def bounded(test: AsyncTest, seconds: float) -> AsyncTest:
    """Return `test` with an end: TooSlowError after `seconds`, caused by what it waited for.

    One that is given a clock is left alone: virtual time would jump to the end while a thread
    works.
    """

    @functools.wraps(test)
    async def within(**fixtures: object) -> None:
        if any(isinstance(each, trio.abc.Clock) for each in fixtures.values()):
            return await test(**fixtures)
        with trio.move_on_after(seconds) as scope:
            try:
                await test(**fixtures)
            except BaseException as interrupted:
                if scope.cancel_called:
                    raise trio.TooSlowError(f"no end after {seconds:g} s") from interrupted
                raise

    return within


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test in trio an end of its own, shortly before pytest-timeout interrupts it."""
    for item in items:
        if not (isinstance(item, pytest.Function) and item.get_closest_marker("trio")):
            continue
        limit = time_limit(item)
        if limit and not hasattr(item.obj, "hypothesis"):  # these are of many runs
            item.obj = bounded(item.obj, limit * _OWN_SHARE)


def time_limit(item: pytest.Item) -> float:
    """Return after how many seconds pytest-timeout interrupts a test; 0: never."""
    if not item.config.pluginmanager.hasplugin("timeout"):
        return 0.0
    if (marker := item.get_closest_marker("timeout")) is not None:
        return float(marker.args[0])
    asked = item.config.getoption("timeout")
    return float(item.config.getini("timeout") or 0) if asked is None else float(asked)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    call: pytest.CallInfo[None],
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """End the loop of trio that pytest-timeout has interrupted: the next test starts another.

    It is a suspended generator, held by a frame of the traceback, and trio takes it for running.
    """
    report = yield
    if call.excinfo is not None and trio.lowlevel.in_trio_run():
        for frame, _ in traceback.walk_tb(call.excinfo.tb):
            if frame.f_code is trio.run.__code__:
                for loop in filter(inspect.isgenerator, frame.f_locals.values()):
                    loop.close()
    return report
