"""Frames that are longer than half a ring go through a channel in parts."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tgi_trio.ipc.channel import ShardEnd
from tgi_trio.ipc.router_end import RouterEnd


@pytest.mark.parametrize("sleeps", [False, True])
def test_frames_longer_than_a_ring_go_both_ways(
    sleeps: bool, pair: tuple[RouterEnd, ShardEnd]
) -> None:
    router, shard = pair
    long = os.urandom(5 * router.writer.capacity + 3)
    waited = threading.Event()

    def echo() -> None:
        for _ in range(2):
            while (view := shard.try_receive()) is None:
                waited.set()
                shard.wait(None)
            copy = bytes(view)
            shard.release()
            shard.send(copy)

    with ThreadPoolExecutor(1) as pool:
        echoing = pool.submit(echo)
        for payload in (long, b"short"):
            if sleeps:
                waited.wait()
            while not router.try_send(payload):
                time.sleep(0.0005)
            while (view := router.try_receive()) is None:
                time.sleep(0.0005)
            assert view == payload
            router.release()
        echoing.result()
    router.check()
