"""Serving benchmark: TTFT, ITL, TPOT and tokens per second through the whole server.

    python -m bench.serve --concurrency 1 8 32 --requests 64 --json bench/out/serve.json

Closed loop with fixed concurrency (each client sends its next request when its last has ended),
or open loop with Poisson arrivals (`--rate`). Between two loads a process of its own measures the
floor: the bare model step without server, through the same runner, at the same batch size.
`ITL / bare` is the server's overhead over it: most gaps between tokens are steps that only decode.
The two are seconds apart, which a machine that others use does not forgive, so the parts of the
overhead are counted within the load as well: `gap %`, the time of decoding steps outside of model
and sampler, and `router %`, the router's processor time, both as parts of the shard's.
With several rounds every figure is their median, a ratio that of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import trio
from tqdm import tqdm

from bench.harness import stats
from bench.harness.server import Server, running
from bench.harness.vitals import cpu_seconds, find_shards, metrics
from bench.model.cases import Case, Worker
from tgi_trio.client.address import Address
from tgi_trio.client.http import Client
from tgi_trio.client.load import Load, Work, measure
from tgi_trio.client.measures import FORMULAS
from tgi_trio.hub.resolve import resolve_model

_BARE_STEPS = 24

Result = dict[str, Any]


def bare_steps(model_id: str | None, backend: str) -> Worker:
    """Start a process that holds the model alone."""
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "bench.model.worker",
        backend,
        resolve_model(model_id, None),
    ]
    return Worker("bare step", command)


def account(server: Server) -> dict[str, float]:
    """Return what decoding steps and the processes have taken so far, in seconds."""
    found = metrics(server.port)
    of = {
        name: found.get(f'tgi_batch_{name}_duration_sum{{method="decode"}}', 0.0)
        for name in ("inference", "forward", "decode")
    }
    compute = of["forward"] + of["decode"]
    return {
        "compute": compute,
        "gap": of["inference"] - compute,
        "router": cpu_seconds(server.pid),
        "shard": sum(map(cpu_seconds, find_shards(server.pid))),
    }


def measure_load(server: Server, load: Load, work: Work, bare: Worker | None) -> Result:
    """Run one load, then bare steps of its batch size; returns the load's figures."""
    client = Client(Address(server.host, server.port))
    before = account(server) if server.pid else None
    with tqdm(total=work.requests, desc=str(load), leave=False) as bar:
        result = trio.run(measure, client, load, work, bar.update)
    if before is not None:
        used = {name: value - before[name] for name, value in account(server).items()}
        result["gap_percent"] = 100 * used["gap"] / used["compute"]
        result["router_percent"] = 100 * used["router"] / used["shard"]
    if bare is not None and load.kind == "closed":
        context = work.words * 2 + work.max_tokens // 2
        case = Case(str(load), [context] * int(load.level), steps=_BARE_STEPS)
        result["bare_step_ms"] = bare.measure(case)
        result["itl_over_bare"] = result["itl_ms"]["p50"] / result["bare_step_ms"]
    return result


def middle(results: list[Result]) -> Result:
    """Return the medians of several rounds of one load."""
    found = dict(results[0])
    for name, value in found.items():
        values = [result[name] for result in results]
        if isinstance(value, dict):
            found[name] = middle(values)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[name] = statistics.median(values)
    return found


def main() -> None:
    """Parse flags, measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model-id", help="served model; the embedded one by default")
    parser.add_argument("--cpu-backend", default="auto")
    parser.add_argument("--url", help="HOST:PORT of a server that runs already")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--rate", type=float, nargs="*", default=[], help="requests per second")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--words", type=int, default=40, help="prompt length")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    stats.add_output_flags(parser)
    args = parser.parse_args()
    loads = [Load("closed", c) for c in args.concurrency] + [Load("open", r) for r in args.rate]
    rounds: list[list[Result]] = [[] for _ in loads]
    facts: Result = {"ready_s": None}
    with stats.reporting(args.json, "serve", partial(summary, rounds, facts)), ExitStack() as stack:
        bare = None
        if args.url:
            host, _, port = args.url.rpartition(":")
            server = Server(host, int(port), 0.0)
        else:
            flags = ["--model-id", args.model_id] if args.model_id else []
            flags += ["--cpu-backend", args.cpu_backend]
            server = stack.enter_context(running(flags))
            facts["ready_s"] = server.ready_s
            bare = stack.enter_context(closing(bare_steps(args.model_id, args.cpu_backend)))
            measure_load(server, Load("closed", 2), Work(4, args.words, 8), None)  # to warm up
        for _ in range(args.rounds):
            for load, found in zip(loads, rounds, strict=True):
                requests = max(args.requests, int(load.level) if load.kind == "closed" else 0)
                work = Work(requests, args.words, args.max_tokens)
                found.append(measure_load(server, load, work, bare))


def summary(rounds: list[list[Result]], facts: Result) -> tuple[str, Result]:
    """Return the table of the loads that were measured, and what is written."""
    results = [middle(found) for found in rounds if found]
    rows = [
        (
            f"{r['load']} {r['level']:g}",
            r["completed"],
            r["output_tokens_per_s"],
            r["ttft_ms"]["p50"],
            r["ttft_ms"]["p99"],
            r["itl_ms"]["p50"],
            r["itl_ms"]["p99"],
            r["tpot_ms"]["p50"],
            r.get("bare_step_ms", "-"),
            r.get("itl_over_bare", "-"),
            r.get("gap_percent", "-"),
            r.get("router_percent", "-"),
        )
        for r in results
    ]
    header = ("load", "done", "tok/s", "TTFT p50 ms", "p99", "ITL p50 ms", "p99", "TPOT p50 ms")
    table = stats.table((*header, "bare step ms", "ITL/bare", "gap %", "router %"), rows)
    return f"{table}\n{FORMULAS}", {**facts, "results": results, "rounds": rounds}


if __name__ == "__main__":
    main()
