"""What images cost: the router's loop and CPU, decoding beside them, second questions, memory.

    python -m bench.images --json bench/out/images.json

The server runs as it always does, with the turns of the router's loop timed. Its model is made on
the spot and knows nothing; its tower sees `--side` pixels, 16 x 16 of which are a token. Every
image is new to the server except in the second questions. CPU time of an image is that of the
router's process less what a text of as many tokens takes. Beside it: what receiving as many bytes
takes the router, of a body that is refused by its type (less what one of few bytes takes), and a
thread that does nothing but read them.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import trio
from numpy.typing import NDArray
from tqdm import tqdm

from bench.harness import stats
from bench.harness.server import Server, serving
from bench.harness.vitals import cpu_seconds, vitals
from bench.images.asking import (
    MB,
    Pace,
    chat,
    chat_in_words,
    count_tokens,
    hostile_pictures,
    make_picture,
    post,
    stream,
)
from bench.images.bare_receiver import bare_receiver
from tgi_trio.client.address import Address
from tgi_trio.client.http import Client
from tgi_trio.demo.vision import make_vision_model
from tgi_trio.testing.ports import reserve_port

GOALS = {
    "longest_turn_ms": 5.0,
    "cpu_ms": 2.0,
    "decode_ratio": 1.01,
    "second_ratio": 1.3,
    "memory_mib": 256 + 200,
}


@dataclass
class Found:
    """What has been measured so far."""

    rows: list[dict[str, Any]] = field(default_factory=list)  # by size of an image
    windows: list[tuple[float, float]] = field(default_factory=list)  # of these, CLOCK_MONOTONIC
    decode_ratios: list[float] = field(default_factory=list)
    firsts: list[tuple[float, float]] = field(default_factory=list)  # second question's, text's, s
    memory_mib: float | None = None
    refused: dict[str, str] = field(default_factory=dict)

    def add_turns(self, turns: NDArray[np.float64]) -> None:
        """Take in the turns [N, 4] of the loop, known when the server has ended."""
        for row, (begin, end) in zip(self.rows, self.windows, strict=False):
            own = turns[(begin <= turns[:, 0]) & (turns[:, 0] <= end)]
            _, wall, cpu = 1e3 * np.vstack((own[:, :3], np.zeros((1, 3)))).T
            for name, times in (("turn", wall), ("its CPU", cpu)):
                for part in (99, 99.9, 100):
                    row[f"{name}, ms, {_PARTS[part]}"] = float(np.percentile(times, part))
            row["turns > 5 ms"], row["by CPU"] = int((wall > 5).sum()), int((cpu > 5).sum())

    def summary(self) -> tuple[str, dict[str, Any]]:
        """Return the tables, and what is written."""
        lines = [stats.table_of(self.rows)]
        results: dict[str, Any] = {"goals": GOALS, "images": self.rows, "refused": self.refused}
        second_ratios = [asked / text for asked, text in self.firsts]
        for name, ratios in [("decode", self.decode_ratios), ("second", second_ratios)]:
            results[f"{name}_ratios"] = ratios
            if ratios:
                median = results[f"{name}_ratio"] = float(np.median(ratios))
                goal = GOALS[f"{name}_ratio"]
                lines.append(f"{_NAMES[name]}: {median:.3f} of text's (goal {goal:g})")
        if self.firsts:
            asked, text = (1e3 * np.median(self.firsts, axis=0)).tolist()
            results["second_ms"], results["text_ms"] = asked, text
            lines.append(f"that is {asked:.1f} ms, and {text:.1f} of a text")
        if self.memory_mib is not None:
            results["memory_mib"] = self.memory_mib
            lines.append(
                f"router's memory with hostile images: {self.memory_mib:+.0f} MiB at its peak "
                f"(goal {GOALS['memory_mib']:g})"
            )
        return "\n".join(lines), results


_PARTS = {99: "99 %", 99.9: "99.9 %", 100: "longest"}
_LEAST_S = 1e-6  # where tokens came together to a client that had waited for a core

_NAMES = {
    "decode": "gap between tokens, image prompts",
    "second": "first token of a second question about an image",
}


@contextmanager
def watched(folder: Path, turns: Path) -> Iterator[Server]:
    """Serve the model in `folder`; when it has ended, `turns` has those of its loop."""
    with reserve_port() as port:
        flags = ["--model-id", str(folder), "--hostname", "127.0.0.1", "--port", str(port)]
        flags += ["--payload-limit", str(40 * MB), "--image-memory", str(256 * 2**20)]
        command = [sys.executable, "-m", "bench.images.watched_server", str(turns), *flags]
        with serving(command, port, output=subprocess.DEVNULL) as server:
            yield server


async def send_images(client: Client, picture: bytes, args: argparse.Namespace) -> None:
    """Have clients ask about `args.images` images, each one after the other."""
    numbers = iter(range(args.images))

    async def one_client() -> None:
        for number in numbers:
            # Behind its end: no decoder reads it, and it is another file.
            body = orjson.dumps(chat(picture + number.to_bytes(4, "big"), max_tokens=1))
            status, answer = await post(client, "/v1/chat/completions", body)
            if status != 200:
                raise RuntimeError(f"{status}: {answer[:300]!r}")

    async with trio.open_nursery() as nursery:
        for _ in range(args.clients):
            nursery.start_soon(one_client)


async def cost_of(
    server: Server, client: Client, size: float, args: argparse.Namespace, found: Found
) -> None:
    """Measure images of `size` megabytes."""
    picture = make_picture(int(size * MB))
    tokens = await count_tokens(client, chat(picture, max_tokens=1))
    began, cpu = time.monotonic(), cpu_seconds(server.pid)
    await send_images(client, picture, args)
    whole = (cpu_seconds(server.pid) - cpu) / args.images
    found.windows.append((began, time.monotonic()))

    words = await chat_in_words(client, tokens, "once")
    said, cpu = words["messages"][0]["content"], cpu_seconds(server.pid)
    for number in range(args.images):
        content = f"{number}{said}"
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        await post(client, "/v1/chat/completions", orjson.dumps(body))
    text = (cpu_seconds(server.pid) - cpu) / args.images

    large = orjson.dumps(chat(picture))
    received = await receiving(server, client, large, args.images)
    received -= await receiving(server, client, b"{}", args.images)
    with bare_receiver() as bare:
        other = Client(Address("127.0.0.1", bare.port))
        for _ in range(args.images):
            await post(other, "/", large)
        least = bare.cpu / args.images

    found.rows.append(
        {
            "image, MB": len(picture) / MB,
            "images": args.images,
            "CPU, ms": 1e3 * (whole - text),
            "receiving": 1e3 * received,
            "beside it": 1e3 * (whole - text - received),
            "a bare reader": 1e3 * least,
            "beside that": 1e3 * (whole - text - least),
        }
    )


async def receiving(server: Server, client: Client, body: bytes, times: int) -> float:
    """Return the router's CPU time, in seconds, for a body that it reads and refuses."""
    cpu = cpu_seconds(server.pid)
    for _ in range(times):
        await post(client, "/tokenize", body, "text/plain")
    return (cpu_seconds(server.pid) - cpu) / times


def random_ids(rng: random.Random, count: int) -> list[int]:
    """Return token ids of ordinary words."""
    return [rng.randrange(300, 2000) for _ in range(count)]


async def decode_round(client: Client, args: argparse.Namespace, number: int) -> float:
    """Return the mean gap between tokens of image prompts over that of texts as long."""
    body = chat(make_picture(MB // 10) + b"d")
    tokens = await count_tokens(client, {**body, "max_tokens": 1})
    # Also a chat: what an answer's events cost is the same.
    text = await chat_in_words(client, tokens, str(number))

    async def mean_gap(images: bool) -> float:
        paces: list[Pace] = []

        async def one() -> None:
            asked = body if images else text
            paces.append(await stream(client, "/v1/chat/completions", asked, args.tokens))

        async with trio.open_nursery() as nursery:
            for _ in range(args.streams):
                nursery.start_soon(one)
        # All of them decode in the last half of each: prompts come before.
        gaps = [gap for pace in paces for gap in pace.gaps[args.tokens // 2 :]]
        return max(float(np.mean(gaps)), _LEAST_S)

    first = number % 2 == 0
    found = {images: await mean_gap(images) for images in (first, not first)}
    return found[True] / found[False]


async def second_round(
    client: Client, args: argparse.Namespace, number: int
) -> tuple[float, float]:
    """Return the time to the first token of a second question, and of a text as long, in seconds.

    What is asked stands in front of the image, so that the image's own KV is not found again.
    """
    picture, rng = make_picture(int(args.sizes[0] * MB)) + b"s", random.Random(-1 - number)
    body = chat(picture, f"Question {number}: ")
    tokens = await count_tokens(client, {**chat(picture, "Once "), "max_tokens": 1})
    asked = await stream(client, "/v1/chat/completions", body, 2)
    text = {"prompt": random_ids(rng, tokens), "temperature": 0}
    return asked.first, (await stream(client, "/v1/completions", text, 2)).first


async def attack(server: Server, client: Client, times: int, found: Found) -> None:
    """Send what is hostile, all at once and several times; note what became of the memory."""
    before = vitals(server.pid).rss

    async def send(name: str, picture: bytes) -> None:
        status, answer = await post(
            client, "/v1/chat/completions", orjson.dumps(chat(picture, max_tokens=1))
        )
        found.refused[name] = f"{status} {answer[:160].decode(errors='replace')}"

    async with trio.open_nursery() as nursery:
        for name, picture in hostile_pictures().items():
            for _ in range(times):
                nursery.start_soon(send, name, picture)
    found.memory_mib = (_peak(server.pid) - before) / 2**20


def _peak(pid: int) -> int:
    """Return the most memory that a process ever had, in bytes."""
    line = next(
        line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmHWM" in line
    )
    return int(line.split()[1]) * 1024


def measure(server: Server, args: argparse.Namespace, found: Found) -> None:
    """Measure everything."""
    client = Client(Address(server.host, server.port))
    trio.run(count_tokens, client, chat(make_picture(1000), max_tokens=1))  # decoders start
    if args.attacks:
        trio.run(attack, server, client, args.attacks, found)
    for size in tqdm(args.sizes, desc="sizes", disable=None):
        trio.run(cost_of, server, client, size, args, found)
    for number in tqdm(range(args.rounds), desc="rounds", disable=None):
        found.decode_ratios.append(trio.run(decode_round, client, args, number))
        found.firsts.append(trio.run(second_round, client, args, number))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", type=float, nargs="+", default=[1, 3, 10], help="megabytes")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--images", type=int, default=32, help="of each size")
    parser.add_argument("--side", type=int, default=256, help="pixels that the tower sees")
    parser.add_argument("--streams", type=int, default=8, help="that decode at the same time")
    parser.add_argument("--tokens", type=int, default=64, help="of each of them")
    parser.add_argument("--attacks", type=int, default=4, help="times each hostile image is sent")
    parser.add_argument("--rounds", type=int, default=9)
    stats.add_output_flags(parser)
    return parser.parse_args(argv)


def main() -> None:
    """Run and print."""
    args = parse()
    found = Found()
    with tempfile.TemporaryDirectory() as name, stats.reporting(args.json, "images", found.summary):
        folder, turns = Path(name, "model"), Path(name, "turns.npy")
        make_vision_model(folder, steps=0, side=args.side)
        try:
            with watched(folder, turns) as server:
                measure(server, args, found)
        finally:
            if turns.is_file():
                found.add_turns(np.load(turns))


if __name__ == "__main__":
    main()
