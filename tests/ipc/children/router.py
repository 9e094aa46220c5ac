"""A router with argv[1] echoing shards; talks to them all the time. argv[2] only marks its family.

Prints the shards' pids once all of them have answered.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import trio

from tgi_trio.ipc.endpoints import Endpoints
from tgi_trio.ipc.fence import choose_ordering
from tgi_trio.ipc.parent import die_with_parent
from tgi_trio.ipc.router_end import ReplyBell, RouterEnd
from tgi_trio.ipc.spawn import spawn_shard

CHILD = str(Path(__file__).parent / "echo.py")


async def main() -> None:
    with ReplyBell() as bell:
        ends = []
        for rank in range(int(sys.argv[1])):
            endpoints = Endpoints.create(
                rank, 1, reply_bell=bell.fd, spin_us=0, ordering=choose_ordering()
            )
            argv = [sys.executable, CHILD, endpoints.spec.text(), sys.argv[2]]
            spawn_shard(argv, endpoints, stdout=subprocess.DEVNULL)
            endpoints.release_child_ends()
            ends.append(RouterEnd(endpoints, bell))
        for end in ends:
            end.try_send(bytes(1000))
        silent = set(ends)
        while silent:
            await turn(bell, ends, silent)
        print(*(end.vitals.pid for end in ends), flush=True)
        while True:
            await turn(bell, ends, silent)


async def turn(bell: ReplyBell, ends: list[RouterEnd], silent: set[RouterEnd]) -> None:
    """Answer every reply with a new command; whoever replied is no longer silent."""
    await bell.wait()
    for end in ends:
        while end.try_receive() is not None:
            end.release()
            end.try_send(bytes(1000))
            silent.discard(end)


die_with_parent(os.getppid())
trio.run(main)
