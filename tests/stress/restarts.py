"""Start and stop, again and again, on the same port without a pause.

    python -m tests.stress.restarts --times 50                 # a shard without a model
    python -m tests.stress.restarts --times 10 --demo          # the embedded model

Each time a request is answered, connections are left open in both directions, and the server is
told to stop (every fifth time: killed) with the next one started as soon as it has ended. A port
that is not free again at once, or anything left behind, ends the run with an error.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from tqdm import tqdm

from bench.harness import stats
from bench.harness.server import mortal, wait_healthy
from bench.harness.stats import Summary
from bench.harness.vitals import children, still_running
from tgi_trio.testing.ports import reserve_port
from tgi_trio.testing.segments import names_in_shm, names_left

KILLED = 5  # every fifth server is not told to stop but killed


def generate(port: int) -> int:
    """Send one short request and return its status."""
    body = json.dumps({"inputs": "Hello", "parameters": {"max_new_tokens": 2}}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        reply.read()
        return int(reply.status)


def once(argv: list[str], port: int, kill: bool) -> tuple[float, float]:
    """Start, use and end one server; return (seconds to ready, seconds to its end)."""
    start = time.monotonic()
    with ExitStack() as stack:
        process = subprocess.Popen(
            argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=mortal()
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        wait_healthy(port, process)
        ready = time.monotonic() - start
        if generate(port) != 200:
            raise RuntimeError("a request was not answered")
        for _ in range(4):  # idle connections: the server has to close them itself
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        family = children(process.pid)
        start = time.monotonic()
        process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        code = process.wait(120)
        if not kill and code != 0:
            raise RuntimeError(f"exit code {code} after SIGTERM")
        end = time.monotonic() - start
        if left := still_running(family):
            raise RuntimeError(f"processes {left} are left")
        return ready, end


def run(times: int, demo: bool, seconds: list[tuple[float, float]]) -> None:
    """Add each start's seconds to ready and to the end; raises RuntimeError for what went wrong."""
    names = names_in_shm()
    module = ["tgi_trio"] if demo else ["tgi_trio.testing.fake_server", "{}"]
    with reserve_port() as port:
        argv = [sys.executable, "-m", *module, "--hostname", "127.0.0.1", "--port", str(port)]
        for n in tqdm(range(times), desc="starts", disable=None):
            seconds.append(once(argv, port, kill=n % KILLED == KILLED - 1))
    if left := names_left(names):
        raise RuntimeError(f"shared memory is left: {left}")


def main() -> None:
    """Parse flags, run, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--demo", action="store_true", help="serve the embedded model")
    stats.add_output_flags(parser)
    args = parser.parse_args()
    seconds: list[tuple[float, float]] = []

    def found() -> tuple[str, dict[str, Any]]:
        ready, end = (Summary.of([each[i] for each in seconds]) for i in (0, 1))
        rows = [(name, s.n, s.p50, s.p99) for name, s in (("ready", ready), ("end", end))]
        results = {"ready_s": asdict(ready), "end_s": asdict(end)}
        table = stats.table(("seconds to", "n", "median", "p99"), rows)
        return table, {"demo": args.demo, "results": results}

    with stats.reporting(args.json, "stress.restarts", found):
        run(args.times, args.demo, seconds)


if __name__ == "__main__":
    main()
