"""`bench`: puts loads on a server and prints what the clients measured."""

from __future__ import annotations

import json
import sys
from typing import Any, Final, TextIO

import trio
from tqdm import tqdm

from tgi_trio.cli.chat import open_client, read_info
from tgi_trio.cli.options import BenchOptions
from tgi_trio.client.load import Load, Work, measure
from tgi_trio.client.measures import FORMULAS, table
from tgi_trio.errors import ConfigurationError
from tgi_trio.whole_files import open_at_once

HEADER: Final = (
    "load", "done", "tok/s", "TTFT p50 ms", "p99", "ITL p50 ms", "p99", "TPOT p50 ms"
)  # fmt: skip


def run_bench(options: BenchOptions) -> int:
    """Measure; the exit code is 1 if a load had no answer. Raises as `bench` does."""
    return 0 if trio.run(bench, options, sys.stdout) else 1


async def bench(options: BenchOptions, output: TextIO) -> bool:
    """Run the loads one after the other; print a table and write `--json`.

    Returns whether each load has had an answer: a row without one measures nothing.

    Raises ShardCannotStart if the server of our own does not start, OSError if the server at
    `--url` cannot be reached, ConfigurationError if there is nothing to measure or to write to, or
    it is no such server.
    """
    check_output(options)
    loads = [Load("closed", n) for n in options.clients] + [Load("open", r) for r in options.rate]
    async with open_client(options) as client:
        info = await read_info(client)
        results = []
        for load in loads:
            requests = max(options.requests, int(load.level) if load.kind == "closed" else 1)
            work = Work(requests, options.words, options.max_tokens)
            with tqdm(total=requests, desc=str(load), leave=False, file=sys.stderr) as bar:
                results.append(await measure(client, load, work, bar.update))
    print(table(HEADER, [row(result) for result in results]), FORMULAS, sep="\n", file=output)
    for text in sorted({text for result in results for text in result["errors"]}):
        print(f"failed: {text}", file=output)
    if options.json is not None:
        document = {"schema": 1, "bench": "serve", "server": info, "results": results}
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    return all(result["completed"] for result in results)


def check_output(options: BenchOptions) -> None:
    """Raise ConfigurationError for a file that cannot be written."""
    if options.json is not None:
        try:
            # Before minutes are spent on what it is to hold.
            open(options.json, "a", opener=open_at_once).close()
        except OSError as error:
            what = error.strerror
            raise ConfigurationError(f"--json {options.json} cannot be written: {what}") from error


def row(result: dict[str, Any]) -> tuple[object, ...]:
    """Return the cells of one load under `HEADER`."""
    return (
        f"{result['load']} {result['level']:g}",
        f"{result['completed']}/{result['requests']}",
        result["output_tokens_per_s"],
        result["ttft_ms"]["p50"],
        result["ttft_ms"]["p99"],
        result["itl_ms"]["p50"],
        result["itl_ms"]["p99"],
        result["tpot_ms"]["p50"],
    )
