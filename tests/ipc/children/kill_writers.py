"""Kill a writer argv[1] times at random moments; check every frame that became visible.

A writer announces in its step word which frame it is about to write, then writes it in pieces; the
frames carry number and CRC. Prints "kills frames mid_write".
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import zlib
from dataclasses import replace

from tgi_trio.ipc.channel import LeaderEnd, ShardEnd
from tgi_trio.ipc.endpoints import ChannelSpec, Endpoints
from tgi_trio.ipc.frames import Phase
from tgi_trio.ipc.parent import die_with_parent

PIECE = 512


def write_for_ever(spec: ChannelSpec, seed: int) -> None:
    die_with_parent(spec.router_pid)
    end = ShardEnd.attach(spec.text())
    chance = random.Random(seed)
    number = 0
    while True:
        number += 1
        body = number.to_bytes(8, "little") + chance.randbytes(chance.randrange(6000))
        payload = zlib.crc32(body).to_bytes(8, "little") + body
        end.beat(number, Phase.REPLYING)
        view = end.reserve(len(payload))
        for at in range(0, len(payload), PIECE):
            view[at : at + PIECE] = payload[at : at + PIECE]
        end.commit()
        end.beat(number, Phase.IDLE)


def read_frame(end: LeaderEnd, expected: int) -> bool:
    """Read one frame if there is one; exits with a complaint when it is not frame `expected`."""
    frame = end.try_receive()
    if frame is None:
        return False
    if zlib.crc32(frame[8:]) != int.from_bytes(frame[:8], "little"):
        sys.exit("a damaged frame became visible")
    if int.from_bytes(frame[8:16], "little") != expected:
        sys.exit("a frame was lost or came twice")
    end.release()
    return True


def kill_one(seed: int) -> tuple[int, bool]:
    """Return how many frames a writer got through before it was killed, and if it was mid-write."""
    chance = random.Random(seed)
    with Endpoints.create(0, seed, request_bytes=4096, reply_bytes=16384, spin_us=0) as endpoints:
        spec = replace(endpoints.spec, segment=os.dup(endpoints.spec.segment))
        pid = os.fork()
        if pid == 0:
            write_for_ever(spec, seed)
        reader = LeaderEnd.attach(spec.text())
        frames = 0
        while frames == 0:
            frames += read_frame(reader, 1)
        until = time.monotonic() + chance.uniform(0, 0.005)
        while time.monotonic() < until:
            frames += read_frame(reader, frames + 1)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        vitals = reader.vitals
        while read_frame(reader, frames + 1):
            frames += 1
        reader.check()
        if frames not in (vitals.step, vitals.step - 1):
            sys.exit(f"{frames} frames are visible, the writer was at {vitals.step}")
        reader.close()
        return frames, frames < vitals.step


die_with_parent(os.getppid())
outcomes = [kill_one(seed) for seed in range(int(sys.argv[1]))]
print(len(outcomes), sum(frames for frames, _ in outcomes), sum(mid for _, mid in outcomes))
