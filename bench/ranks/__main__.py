"""A plan on its way to another rank: over a connection against the ring, in turns.

    python -m bench.ranks --rows 1 8 64 --json bench/out/ranks.json

Rank 0 encodes and sends a plan; the other process decodes it and says so, and the time until that
has come is a row's. Both ends sleep where they wait. `--within` runs the other end of a connection
elsewhere, such as `ip netns exec NAME`, from where this one is reached at `--host`.
"""

from __future__ import annotations

import argparse
import shlex
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from os import dup
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.harness import stats
from tgi_trio.ipc.broadcast import PlanEnd
from tgi_trio.ipc.channel import LeaderEnd
from tgi_trio.ipc.endpoints import Endpoints
from tgi_trio.ipc.frame_codec import encode
from tgi_trio.ipc.frames import FrameKind
from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.ipc.spawn import spawn_shard
from tgi_trio.ipc.tcp import TcpEnd, TcpSpec, prepare_connection
from tgi_trio.shard.contract import ShardSequence, StepPlan
from tgi_trio.shard.ranks.plan_frames import encode_plan

CONTEXT = 512  # tokens of each sequence
BLOCK = 16
TURN = 50  # plans in a row over one way


def decode_step(rows: int) -> StepPlan:
    """Return the plan of a step in which every row decodes a token."""
    none = np.zeros(0, np.int32)
    sampling = SamplingParameters()
    blocks = CONTEXT // BLOCK + 1
    return StepPlan(
        rows=[ShardSequence(i, none, CONTEXT, 16, 0, [], 0, 0, sampling) for i in range(rows)],
        token_ids=np.full(rows, 7, np.int64),
        positions=np.full(rows, CONTEXT, np.int64),
        kv_slots=np.arange(rows, dtype=np.int64),
        query_starts=np.arange(rows + 1, dtype=np.int32),
        context_lengths=np.full(rows, CONTEXT + 1, np.int32),
        block_tables=np.ones((rows, blocks), np.int32),
        samples=np.ones(rows, np.bool_),
    )


@contextmanager
def ring() -> Iterator[PlanEnd]:
    """Rank 0's end to a follower of this machine."""
    with follower([]) as endpoints:
        own = replace(endpoints.spec, segment=dup(endpoints.spec.segment), death=-1)
        end = LeaderEnd.attach(own.text())
        yield end
        end.close()


@contextmanager
def connection(host: str, within: Sequence[str]) -> Iterator[PlanEnd]:
    """Rank 0's end to a follower that calls from somewhere."""
    with socket.create_server((host, 0)) as listener:
        port = str(listener.getsockname()[1])
        with follower([host, port], within):
            called, _ = listener.accept()
            prepare_connection(called)
            end = TcpEnd(TcpSpec(called.detach(), 1, 1, 2**26), lambda: "the follower")
            yield end
            end.close()


@contextmanager
def follower(address: Sequence[str], within: Sequence[str] = ()) -> Iterator[Endpoints]:
    """The other process, on a channel whose rings it uses where it has no address."""
    with Endpoints.create(1, 1, spin_us=0) as endpoints:
        argv = [*within, sys.executable, "-m", "bench.ranks.follower", endpoints.spec.text()]
        with spawn_shard([*argv, *address], endpoints):
            endpoints.release_child_ends()
            yield endpoints


def tell(end: PlanEnd, plan: StepPlan) -> float:
    """Return the microseconds until a plan has been sent, read and acknowledged."""
    began = time.perf_counter_ns()
    frame = encode_plan(plan)
    end.reserve(len(frame))[:] = frame
    end.commit()
    while end.try_receive() is None:
        end.wait(None)
    end.release()
    return (time.perf_counter_ns() - began) / 1000


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--count", type=int, default=2000, help="plans of each size and way")
    parser.add_argument("--host", default="127.0.0.1", help="where the other end calls")
    parser.add_argument("--within", default="", help="what comes before the other end's command")
    stats.add_output_flags(parser)
    options = parser.parse_args()
    found: list[dict[str, Any]] = []

    def report() -> tuple[str, dict[str, Any]]:
        return stats.table_of(found), {"rows": found, "within": options.within}

    with stats.reporting(options.json, "ranks", report), ExitStack() as stack:
        within = shlex.split(options.within)
        ways = {
            "ring": stack.enter_context(ring()),
            "connection": stack.enter_context(connection(options.host, within)),
        }
        stop = encode(FrameKind.SHUTDOWN, {"command": 0}, {})
        stack.callback(lambda: [end.try_send(stop) for end in ways.values()])
        for rows in options.rows:
            found.append(measure(ways, rows, options.count))


def measure(ways: dict[str, PlanEnd], rows: int, count: int) -> dict[str, Any]:
    """Return medians and differences, in microseconds, for plans of so many rows."""
    plan = decode_step(rows)
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in tqdm(range(max(1, count // TURN)), desc=f"{rows} rows", leave=False):
        for name, end in ways.items():
            taken[name] += [tell(end, plan) for _ in range(min(TURN, count))]
    medians = {name: statistics.median(values) for name, values in taken.items()}
    best = {name: float(np.quantile(values, 0.1)) for name, values in taken.items()}
    return {
        "rows": rows,
        "bytes": len(encode_plan(plan)),
        **{f"{name} p50 us": round(value, 1) for name, value in medians.items()},
        "added p50 us": round(medians["connection"] - medians["ring"], 1),
        "added p10 us": round(best["connection"] - best["ring"], 1),
    }


if __name__ == "__main__":
    main()
