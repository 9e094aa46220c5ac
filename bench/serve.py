"""Serving benchmark: TTFT, ITL, TPOT and tokens per second through the whole server.

    python -m bench.serve --concurrency 1 8 32 --requests 64 --json bench/out/serve.json

Closed loop with fixed concurrency (each client sends its next request when its last has ended),
or open loop with Poisson arrivals (`--rate`). In the same run it measures the floor beside it:
the bare model step without server, through the same runner, at the same batch sizes.
"""

from __future__ import annotations

import argparse
import random
import time
from typing import Any

import trio
from tqdm import tqdm

from bench import stats
from bench.client import HTTPFailure, post_sse
from bench.server import Server, running
from bench.stats import RequestRecord

WORDS = (
    "the server reads a request and the shard computes a step while streams go on and a client "
    "waits for the next token of an answer about blocks queues rings and memory"
).split()


def prompt(rng: random.Random, words: int) -> str:
    """Return a prompt of `words` random words."""
    return " ".join(rng.choice(WORDS) for _ in range(words))


async def one_request(server: Server, text: str, max_tokens: int) -> RequestRecord:
    """Stream one generation and record when each token arrived."""
    record = RequestRecord(start=trio.current_time(), events=[])
    body = {"prompt": text, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    body |= {"ignore_eos": True, "min_tokens": max_tokens}
    try:
        async for at, event in post_sse(server.host, server.port, "/v1/completions", body):
            if "error" in event:
                record.error = str(event["error"])[:200]
                break
            record.events.append(at)
            record.tokens += 1
    except (HTTPFailure, OSError, trio.BrokenResourceError) as error:
        record.error = f"{type(error).__name__}: {error}"
    return record


async def closed_loop(
    server: Server, clients: int, requests: int, words: int, max_tokens: int, bar: tqdm[Any]
) -> list[RequestRecord]:
    """Run `requests` requests, `clients` at a time."""
    rng = random.Random(0)
    todo = iter([prompt(rng, words) for _ in range(requests)])
    records: list[RequestRecord] = []

    async def client() -> None:
        for text in todo:
            records.append(await one_request(server, text, max_tokens))
            bar.update()

    async with trio.open_nursery() as nursery:
        for _ in range(clients):
            nursery.start_soon(client)
    return records


async def open_loop(
    server: Server, rate: float, requests: int, words: int, max_tokens: int, bar: tqdm[Any]
) -> list[RequestRecord]:
    """Start requests at Poisson times of `rate` per second, whatever is still running."""
    rng = random.Random(0)
    records: list[RequestRecord] = []

    async def run(text: str) -> None:
        records.append(await one_request(server, text, max_tokens))
        bar.update()

    async with trio.open_nursery() as nursery:
        for _ in range(requests):
            nursery.start_soon(run, prompt(rng, words))
            await trio.sleep(rng.expovariate(rate))
    return records


def bare_step_ms(model_id: str | None, batch: int, context: int, steps: int = 40) -> float:
    """Return the median decode step of the runner alone, without server, in milliseconds."""
    from bench.bare import decode_step_ms

    return decode_step_ms(model_id, batch, context, steps)


def measure(args: argparse.Namespace, server: Server) -> list[dict[str, Any]]:
    """Run every load of the command line against the server."""
    results = []
    loads = [("closed", float(c)) for c in args.concurrency] + [("open", r) for r in args.rate]
    for kind, load in loads:
        requests = max(args.requests, int(load) if kind == "closed" else 0)
        with tqdm(total=requests, desc=f"{kind} {load:g}", leave=False) as bar:
            start = time.perf_counter()
            if kind == "closed":
                run = trio.run(
                    closed_loop, server, int(load), requests, args.words, args.max_tokens, bar
                )
            else:
                run = trio.run(open_loop, server, load, requests, args.words, args.max_tokens, bar)
            seconds = time.perf_counter() - start
        results.append({"load": kind, "level": load, **stats.summarise(run, seconds)})
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
        results, ready = measure(args, Server(host, int(port), 0.0)), None
    else:
        with running(flags) as server:
            trio.run(closed_loop, server, 2, 4, args.words, 8, tqdm(disable=True))  # warm up
            results, ready = measure(args, server), server.ready_s
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
    print("ITL: every gap between content events; TPOT: (latency - TTFT) / (tokens - 1).")
    stats.write_json(args.json, "serve", {"ready_s": ready, "results": results})


if __name__ == "__main__":
    main()
