"""Processes of the extra measurements: `python -m bench.ipc.children NAME ARGUMENTS... SPEC`."""

from __future__ import annotations

import array
import gc
import os
import sys
import time
from collections.abc import Callable

import numpy as np

from tgi_trio.ipc.broadcast import Broadcast, PlanEnd
from tgi_trio.ipc.channel import LeaderEnd
from tgi_trio.ipc.death import start_shard_end
from tgi_trio.ipc.frame_codec import encode
from tgi_trio.ipc.frames import FrameKind, Phase


def hold(mebibytes: str, spec_text: str) -> None:
    """Be resident with so much memory, and do nothing."""
    end = start_shard_end(spec_text)
    ballast = b"x" * (int(mebibytes) << 20)
    end.beat(1, Phase.IDLE)
    time.sleep(3600 + len(ballast[:1]))


def idle(core: str, spec_text: str) -> None:
    """Wait as a shard without work does."""
    end = start_shard_end(spec_text)
    while True:
        end.beat(0, Phase.IDLE)
        end.wait(0.5)


def steps(core: str, count: str, spec_text: str) -> None:
    """Compute 1 ms a step, reply after each, and report the gaps at the end."""
    from bench.ipc.extras import STREAMS, step_frame

    if int(core) >= 0:
        os.sched_setaffinity(0, {int(core)})
    end = start_shard_end(spec_text)
    words, columns = step_frame(STREAMS)
    gc.disable()
    clock = time.perf_counter_ns
    gaps = array.array("q")
    ended = 0
    for step in range(int(count)):
        while end.try_receive() is not None:
            end.release()
        end.beat(step, Phase.DECODE)
        started = clock()
        if ended:
            gaps.append(started - ended)
        while clock() - started < 1_000_000:
            continue
        ended = clock()
        end.send(encode(FrameKind.STEP, words, columns))
    end.send(b"gaps0000" + gaps.tobytes())
    time.sleep(3600)


def _await_reply(end: PlanEnd) -> None:
    """Take a follower's next frame, which is waited for."""
    while end.try_receive() is None:
        end.wait(30.0)
    end.release()


def lead(payload: str, rounds: str, *specs: str) -> None:
    """Command all followers and gather their replies; print three figures in microseconds."""
    group = Broadcast([LeaderEnd.attach(spec) for spec in specs])
    message = b"e" + bytes(int(payload) - 1)
    clock = time.perf_counter_ns
    sent: list[int] = []
    done: list[int] = []
    for number in range(int(rounds) + 10):
        start = clock()
        group.send(message)
        middle = clock()
        for end in group.ends:
            _await_reply(end)
        if number >= 10:  # the followers start up during the first ones
            sent.append(middle - start)
            done.append(clock() - start)
    figures = (np.percentile(sent, 50), np.percentile(done, 50), np.percentile(done, 99))
    print(*(round(float(figure) / 1000, 1) for figure in figures))


if __name__ == "__main__":
    PROGRAMS: dict[str, Callable[..., None]] = {
        "hold": hold,
        "idle": idle,
        "steps": steps,
        "lead": lead,
    }
    PROGRAMS[sys.argv[1]](*sys.argv[2:])
