"""Many adapters, few of them in memory: requests for any of them at random, and what memory does.

    python -m tests.stress.adapters --seconds 600 --json out.json

A thousand LoRA adapters of the embedded model are registered and 32 fit into memory, so nearly
every request has one loaded in the place of another. Some clients leave in the middle, and one
name is loaded and unloaded all the while. Each request says what its adapter said the first time,
or it counts as a failure; what memory does is looked at over the second half.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import orjson
import trio

from bench.harness import stats
from bench.harness.server import running
from bench.harness.vitals import find_shards, vitals
from tests.stress.soak import Connection, Reading, Soak, resident_bytes, slope
from tests.system.adapter_support import write

_KEY: Final = "soak"
_HEADERS: Final = f"authorization: Bearer {_KEY}\r\n"
_CLIENTS: Final = 8
_LEAVING: Final = 0.02  # share of requests whose client leaves
_PERIOD: Final = 1.0  # seconds between two readings, and between two updates
_DIFFERENT: Final = 40  # files; another name's are links to those of one before
_GROWTH: Final = 0.02  # of the memory at half time that may have come by the end
_SLACK: Final = 8 << 20  # bytes that may have come besides
_FILLED: Final = 60.0  # seconds of a run by whose half memory has filled: shorter ones say nothing


@dataclass
class AdapterSoak(Soak):
    """A run under way."""

    names: int = 0
    updates: int = 0
    texts: dict[int, str] = field(default_factory=dict)  # what each file's adapter said first
    changed: int = 0  # answers that were another


def write_adapters(root: Path, names: int, rank: int) -> None:
    """Write folders a0, a1, ...; from the fortieth on their files are those of others."""
    for index in range(names):
        folder = root / f"a{index}"
        if index < _DIFFERENT:
            write(folder, index, rank)
            continue
        folder.mkdir()
        for file in (root / f"a{index % _DIFFERENT}").iterdir():
            (folder / file.name).hardlink_to(file)


async def client(soak: AdapterSoak, more: Callable[[], bool]) -> None:
    """Ask for adapters at random until there is no `more`."""
    while more():
        async with await trio.open_tcp_stream(soak.server.host, soak.server.port) as stream:
            connection = Connection(stream, _HEADERS)
            for _ in range(soak.rng.randint(1, 50)):
                if not more() or await ask(soak, connection):
                    break


async def ask(soak: AdapterSoak, connection: Connection) -> bool:
    """Send one request; return whether its client left."""
    soak.done += 1
    number = soak.rng.randrange(soak.names)
    parameters = {"max_new_tokens": soak.max_tokens, "adapter_id": f"a{number}"}
    leaves = soak.rng.random() < _LEAVING
    path = "/generate_stream" if leaves else "/generate"
    body = {"inputs": "The old harbour", "parameters": parameters}
    status = await connection.ask(path, body, leaves)
    if status == 200:
        said = orjson.loads(connection.body)["generated_text"]
        soak.changed += said != soak.texts.setdefault(number % _DIFFERENT, said)
    elif status:
        soak.failures[status] += 1
    return leaves


async def update(soak: AdapterSoak) -> None:
    """Load another name and unload it, again and again."""
    async with await trio.open_tcp_stream(soak.server.host, soak.server.port) as stream:
        connection = Connection(stream, _HEADERS)
        while True:
            for verb, more in (("load", {"lora_path": "a0"}), ("unload", {})):
                path, body = f"/v1/{verb}_lora_adapter", {"lora_name": "more"} | more
                status = await connection.ask(path, body, False)
                if status != 200:
                    soak.failures[status] += 1
                soak.updates += 1
                await trio.sleep(_PERIOD)


async def watch(soak: AdapterSoak, pids: tuple[int, int]) -> None:
    """Read the vitals again and again."""
    start = time.monotonic()
    while True:
        router, shard = (vitals(pid) for pid in pids)
        soak.readings.append(Reading(time.monotonic() - start, soak.done, router, shard))
        await trio.sleep(_PERIOD)


async def run(soak: AdapterSoak, seconds: float, pids: tuple[int, int]) -> None:
    """Run the clients for as long as that."""
    end = time.monotonic() + seconds
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch, soak, pids)
        nursery.start_soon(update, soak)
        async with trio.open_nursery() as clients:
            for _ in range(_CLIENTS):
                clients.start_soon(client, soak, lambda: time.monotonic() < end)
        nursery.cancel_scope.cancel()


def summary(soak: AdapterSoak) -> dict[str, Any]:
    """Return what is written."""
    half, last = soak.readings[len(soak.readings) // 2], soak.readings[-1]
    result: dict[str, Any] = {
        "requests": soak.done,
        "failures": dict(soak.failures),
        "answers that changed": soak.changed,
        "adapters that answered": len(soak.texts),
        "updates": soak.updates,
        "seconds": last.seconds,
        "requests_per_s": soak.done / max(last.seconds, _PERIOD),
    }
    for name in ("router", "shard"):
        at_half, at_end = (getattr(each, name) for each in (half, last))
        result[name] = {
            "rss_mib_at_half": at_half.rss / 2**20,
            "rss_mib_at_end": at_end.rss / 2**20,
            "bytes_per_request": slope(soak.readings, partial(resident_bytes, name)),
            "descriptors": [at_half.descriptors, at_end.descriptors],
            "threads": [at_half.threads, at_end.threads],
        }
    return result


def judge(soak: AdapterSoak, seconds: float) -> str:
    """Return what is wrong with a run that was to take so long; "": nothing."""
    found = summary(soak)
    if soak.failures or soak.changed:
        return f"{dict(soak.failures)} requests failed, {soak.changed} said something else"
    for name in ("router", "shard") if seconds >= _FILLED else ():
        at_half, at_end = (found[name][f"rss_mib_at_{when}"] for when in ("half", "end"))
        if at_end > (1 + _GROWTH) * at_half + _SLACK / 2**20:
            return f"the {name} grew from {at_half:.0f} to {at_end:.0f} MiB in the second half"
    return ""


def main() -> None:
    """Parse flags, soak, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--adapters", type=int, default=1000, help="names")
    parser.add_argument("--loaded", type=int, default=32, help="of them in memory at a time")
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--rank", type=int, default=8)
    stats.add_output_flags(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        write_adapters(root, args.adapters, args.rank)
        named = ",".join(f"a{i}={root / f'a{i}'}" for i in range(args.adapters))
        flags = ["--lora-adapters", named, "--max-loaded-adapters", str(args.loaded)]
        flags += ["--adapter-updates", "--adapter-folder", place, "--api-key", _KEY]
        flags += ["--max-batch-total-tokens", "8192"]
        with running(flags) as server:
            (shard,) = find_shards(server.pid)
            soak = AdapterSoak(server, random.Random(0), args.max_tokens, names=args.adapters)

            def found() -> tuple[str, dict[str, Any]]:
                result = summary(soak) | {"adapters": args.adapters, "loaded": args.loaded}
                return "\n".join(f"{name}: {value}" for name, value in result.items()), result

            with stats.reporting(args.json, "stress.adapters", found):
                trio.run(run, soak, args.seconds, (server.pid, shard))
    if wrong := judge(soak, args.seconds):
        sys.exit(wrong)


if __name__ == "__main__":
    main()
