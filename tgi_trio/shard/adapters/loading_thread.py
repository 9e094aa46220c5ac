"""The thread in which a rank loads adapters while it goes on with its steps."""

from __future__ import annotations

import os
import sys
from collections.abc import Set
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from tgi_trio.ipc.adapters import AdapterOrder
from tgi_trio.shard.adapter_host import AdapterHost, LoadedAdapter
from tgi_trio.shard.machine.give_way import give_way

# Python's switch interval, in seconds, while an adapter is loaded: after this time a step gets the
# interpreter (GIL) back. The default is 5 ms, longer than a step of a small model.
_SWITCH_S: Final = 0.0005
# Added to the steps' niceness: with 10 a load takes three times as long, with 0 steps wait for it.
_NICENESS: Final = 5


class LoadingThread:
    """One thread; while it works, Python's switch interval is shorter."""

    def __init__(self, cores: Set[int] | None = None) -> None:
        """`cores`: on which to load beside the steps; None: the caller's."""
        allowed = os.sched_getaffinity(0) if cores is None else cores
        self._pool = ThreadPoolExecutor(  # the thread starts with the first load
            1, "adapters", initializer=give_way, initargs=(allowed, _NICENESS)
        )
        self._usual = sys.getswitchinterval()

    def load(self, host: AdapterHost, order: AdapterOrder) -> Future[LoadedAdapter]:
        """Have `host` load an adapter, after those that were ordered before."""
        sys.setswitchinterval(_SWITCH_S)
        return self._pool.submit(host.load, order)

    def rest(self) -> None:
        """Restore the switch interval: nothing is being loaded."""
        sys.setswitchinterval(self._usual)

    def close(self) -> None:
        """End without waiting for loads; restores the switch interval."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self.rest()
