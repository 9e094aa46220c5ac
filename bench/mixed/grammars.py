"""What guided generation costs those who did not ask for it.

    python -m bench.mixed.grammars --json bench/results/cpu2-grammars.json

Plain streams are measured alone and beside company: as many plain streams more, guided streams
that share a schema, guided streams with a new schema each, and a flood of monstrous schemas, which
are refused. The conditions take turns within each round; the medians of the rounds are shown.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import trio
from tqdm import tqdm

from bench.harness import stats
from bench.harness.server import running
from tgi_trio.client.address import Address
from tgi_trio.client.http import Client, HTTPFailure
from tgi_trio.client.load import Load, Work, run_load

Schemas = Iterator[dict[str, Any]]
_LEAST_MS = 1e-3  # where tokens came together to a client that had waited for a core
Company = Callable[[Client, "Counts"], Any]


class Counts(dict[str, int]):
    """What became of the company's requests."""

    def add(self, name: str) -> None:
        self[name] = self.get(name, 0) + 1


def shared() -> Schemas:
    """Yield one schema again and again."""
    person = {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    }
    yield from itertools.repeat(_many(person, list(person)))


def fresh() -> Schemas:
    """Yield schemas of 60 properties, no two alike."""
    for i in itertools.count():
        names = [f"p{i}_{n}" for n in range(60)]
        yield _many({name: {"type": "string", "maxLength": 9} for name in names}, names[:1])


def monsters() -> Schemas:
    """Yield schemas that take seconds to compile, no two alike."""
    for i in itertools.count():
        yield {"type": "integer", "multipleOf": 1_000_003 + 2 * i, "minimum": 0}


def _many(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    """Return a schema of more such objects than `max_tokens` has room for."""
    one = {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }
    return {"type": "array", "items": one, "minItems": 32}


def streaming(forms: Iterator[dict[str, Any]]) -> Company:
    """Return a client that streams sampled completions for ever, each with the next response form.

    All are as long, and drawn at random, so that they differ in nothing but their grammars.
    """

    async def run(client: Client, counts: Counts) -> None:
        for number, form in enumerate(forms):
            body = {"prompt": "An answer:", "max_tokens": 64, "stream": True, "seed": number}
            body |= form or {"ignore_eos": True}
            try:
                async with aclosing(client.events("/v1/completions", body)) as events:
                    async for _ in events:
                        pass
                counts.add("finished")
            except HTTPFailure as error:
                counts.add(f"refused with {error.status}")

    return run


def plain() -> Company:
    """Return a client whose completions have no grammar."""
    return streaming(itertools.repeat({}))


def guided(schemas: Schemas) -> Company:
    """Return a client whose completions follow a schema each."""
    named = ({"name": "it", "schema": schema} for schema in schemas)
    return streaming(
        {"response_format": {"type": "json_schema", "json_schema": form}} for form in named
    )


def conditions(company: int) -> dict[str, list[Company]]:
    """Return who is beside the measured streams, by name; a function per client."""
    new, monstrous = fresh(), monsters()
    return {
        "alone": [],
        f"{company} plain streams": [plain() for _ in range(company)],
        f"{company} guided streams, one schema": [guided(shared()) for _ in range(company)],
        f"{company} guided streams, new schemas": [guided(new) for _ in range(company)],
        f"{company} clients of monsters": [guided(monstrous) for _ in range(company)],
    }


async def measure(client: Client, streams: int, work: Work, company: list[Company]) -> Any:
    """Return the summary of the measured streams and what became of the company's requests."""
    counts = Counts()
    started = trio.current_time()
    async with trio.open_nursery() as nursery:
        for member in company:
            nursery.start_soon(member, client, counts)
        records = await run_load(client, Load("closed", streams), work, lambda: None)
        nursery.cancel_scope.cancel()
    return stats.summarise(records, trio.current_time() - started), dict(counts)


def main() -> None:
    """Parse flags, measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model-id", help="served model; the embedded one by default")
    parser.add_argument("--streams", type=int, default=4, help="plain streams that are measured")
    parser.add_argument("--company", type=int, default=4, help="clients beside them")
    parser.add_argument(
        "--requests", type=int, default=16, help="measured, per condition and round"
    )
    parser.add_argument("--rounds", type=int, default=5)
    stats.add_output_flags(parser)
    args = parser.parse_args()
    work = Work(args.requests, words=20, max_tokens=100)
    beside = conditions(args.company)
    found: dict[str, list[Any]] = {name: [] for name in beside}
    with (
        stats.reporting(args.json, "mixed.grammars", partial(summary, args, found)),
        running(["--model-id", args.model_id] if args.model_id else []) as server,
    ):
        client = Client(Address(server.host, server.port))
        for company in beside.values():  # processes, caches and the model warm up
            trio.run(measure, client, 2, Work(2, 20, 20), company[:1])
        turns = [name for _ in range(args.rounds) for name in beside]
        for name in tqdm(turns, leave=False):
            found[name].append(trio.run(measure, client, args.streams, work, beside[name]))


def summary(args: argparse.Namespace, found: dict[str, list[Any]]) -> tuple[str, dict[str, Any]]:
    """Return the table of the conditions that were measured, and what is written."""
    results = [_result(name, runs) for name, runs in found.items() if runs]
    base = results[0] if results else {}
    rows = [
        (
            r["beside"],
            r["itl_ms_p50"],
            r["itl_ms_p99"],
            r["itl_ms_p50"] / max(base["itl_ms_p50"], _LEAST_MS),
            r["itl_ms_p99"] / max(base["itl_ms_p99"], _LEAST_MS),
            ", ".join(f"{n} {what}" for what, n in r["company"].items()) or "-",
        )
        for r in results
    ]
    header = ("beside", "ITL p50 ms", "p99 ms", "p50 / alone", "p99 / alone", "the company")
    model = Path(args.model_id).name if args.model_id else "embedded"
    document = {"model": model, "streams": args.streams, "results": results}
    return stats.table(header, rows), document


def _result(name: str, runs: list[Any]) -> dict[str, Any]:
    company: dict[str, int] = {}
    for _, counts in runs:
        for what, count in counts.items():
            company[what] = company.get(what, 0) + count
    errors = sorted({error for summary, _ in runs for error in summary["errors"]})
    return {
        "beside": name,
        "itl_ms_p50": median(summary["itl_ms"]["p50"] for summary, _ in runs),
        "itl_ms_p99": median(summary["itl_ms"]["p99"] for summary, _ in runs),
        "errors": errors,
        "company": company,
    }


if __name__ == "__main__":
    main()
