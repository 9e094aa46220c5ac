"""Serving benchmark: TTFT, ITL, TPOT and tokens per second through the whole server.

    python -m bench.serve --concurrency 1 8 32 --requests 64 --json bench/out/serve.json

Closed loop with fixed concurrency (each client sends its next request when its last has ended),
or open loop with Poisson arrivals (`--rate`). In the same run it measures the floor beside it:
the bare model step without server, through the same runner, at the same batch sizes.
"""

from __future__ import annotations

import argparse
from typing import Any

import trio
from tqdm import tqdm

from bench import stats
from bench.server import Server, running
from tgi_trio.client.address import Address
from tgi_trio.client.http import Client
from tgi_trio.client.load import Load, Work, measure
from tgi_trio.client.measures import FORMULAS


def bare_step_ms(model_id: str | None, batch: int, context: int, steps: int = 40) -> float:
    """Return the median decode step of the runner alone, without server, in milliseconds."""
    from bench.bare import decode_step_ms

    return decode_step_ms(model_id, batch, context, steps)


def measure_all(args: argparse.Namespace, server: Server) -> list[dict[str, Any]]:
    """Run every load of the command line against the server."""
    client = Client(Address(server.host, server.port))
    loads = [Load("closed", c) for c in args.concurrency] + [Load("open", r) for r in args.rate]
    results = []
    for load in loads:
        requests = max(args.requests, int(load.level) if load.kind == "closed" else 0)
        work = Work(requests, args.words, args.max_tokens)
        with tqdm(total=requests, desc=str(load), leave=False) as bar:
            results.append(trio.run(measure, client, load, work, bar.update))
    return results


def main() -> None:
    """Parse flags, measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model-id", help="served model; the embedded one by default")
    parser.add_argument("--url", help="HOST:PORT of a server that runs already")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--rate", type=float, nargs="*", default=[], help="requests per second")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--words", type=int, default=40, help="prompt length")
    parser.add_argument("--max-tokens", type=int, default=64)
    stats.add_output_flags(parser)
    args = parser.parse_args()
    flags = ["--model-id", args.model_id] if args.model_id else []
    if args.url:
        host, _, port = args.url.rpartition(":")
        results, ready = measure_all(args, Server(host, int(port), 0.0)), None
    else:
        with running(flags) as server:
            client = Client(Address(server.host, server.port))
            warm_up = Work(requests=4, words=args.words, max_tokens=8)
            trio.run(measure, client, Load("closed", 2), warm_up, lambda: None)
            results, ready = measure_all(args, server), server.ready_s
    context = args.words * 2 + args.max_tokens // 2
    for result in results:
        if result["load"] == "closed":
            result["bare_step_ms"] = bare_step_ms(args.model_id, int(result["level"]), context)
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
            r["tpot_ms"]["p50"] / r["bare_step_ms"] if "bare_step_ms" in r else "-",
        )
        for r in results
    ]
    header = ("load", "done", "tok/s", "TTFT p50 ms", "p99", "ITL p50 ms", "p99", "TPOT p50 ms")
    print(stats.table((*header, "bare step ms", "TPOT/bare"), rows))
    print(FORMULAS)
    stats.write_json(args.json, "serve", {"ready_s": ready, "results": results})


if __name__ == "__main__":
    main()
