"""What one prompt as long as the context does to 64 chats, through the whole server.

    python -m bench.mixed --json bench/out/mixed.json

Every round runs the chats twice: alone, and with one long prompt that arrives when all of them
stream. Compared are the gaps between tokens of the chats from there on; the goal is a 99th
percentile of at most twice that of the chats alone.
"""

from __future__ import annotations

import argparse
import itertools
import random
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import trio
from tqdm import tqdm

from bench.harness import stats
from bench.harness.server import running
from tgi_trio.client.address import Address
from tgi_trio.client.http import Client
from tgi_trio.client.load import prompt, send_request
from tgi_trio.client.measures import RequestRecord, Summary

GOAL = 2.0


class Beginning:
    """The moment when every chat has had its first tokens: only then is there a pace to keep."""

    def __init__(self, chats: int, tokens: int) -> None:
        self._left = [tokens] * chats
        self._waiting = chats
        self.all_stream = trio.Event()
        self.at = 0.0  # seconds, trio's clock

    def heard(self, chat: int) -> None:
        self._left[chat] -= 1
        if self._left[chat] == 0:
            self._waiting -= 1
            if self._waiting == 0:
                self.at = trio.current_time()
                self.all_stream.set()


class Overtaken(RuntimeError):
    """A chat was over before all streamed, or the long prompt was answered: it says nothing."""


async def round_of(
    client: Client, args: argparse.Namespace, max_tokens: int, seed: int, long: bool
) -> tuple[list[float], float | None]:
    """Run the chats once; return their gaps from when all stream, and the long prompt's TTFT.

    Both in milliseconds; the TTFT is None without a long prompt. Raises RuntimeError when a
    request fails, and Overtaken.
    """
    rng = random.Random(seed)
    beginning = Beginning(args.chats, args.after)
    chats: list[RequestRecord] = []
    intruder: list[RequestRecord] = []

    async def chat(number: int, text: str) -> None:
        heard = partial(beginning.heard, number)
        chats.append(await send_request(client, text, max_tokens, on_event=heard))

    async def disturb(text: str) -> None:
        await beginning.all_stream.wait()
        intruder.append(await send_request(client, text, 2))

    async with trio.open_nursery() as nursery:
        for number in range(args.chats):
            nursery.start_soon(chat, number, prompt(rng, args.words))
        if long:
            nursery.start_soon(disturb, prompt(rng, args.long_words))
    for record in chats + intruder:
        if record.error:
            raise RuntimeError(f"a request failed: {record.error}")
    last = min(record.events[-1] for record in chats)
    if intruder and intruder[0].events[0] > last:
        raise Overtaken(f"a chat of {max_tokens} tokens was over before the long prompt's first")
    gaps = [
        (b - a) * 1e3
        for record in chats
        for a, b in itertools.pairwise(record.events)
        if a >= beginning.at
    ]
    if not gaps:
        raise Overtaken(f"chats of {max_tokens} tokens were over before all of them streamed")
    return gaps, intruder[0].ttft * 1e3 if intruder else None


class Rounds:
    """What has been measured so far."""

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: answers of the chats, to begin with."""
        self.max_tokens = max_tokens
        self.gaps: dict[bool, list[list[float]]] = {False: [], True: []}
        self.ttft: list[float] = []

    def add(self, client: Client, args: argparse.Namespace, number: int, most: int) -> None:
        """Measure a round, the `number`-th.

        On a busy machine the chats may be over before the long prompt is answered: the round is
        then repeated, and answers are twice as long from there on, `most` tokens at the most.
        Raises Overtaken when that is not enough.
        """
        while True:
            try:
                (alone, _), (beside, ttft) = (
                    trio.run(round_of, client, args, self.max_tokens, 2 * number + long, long)
                    for long in (False, True)
                )
                break
            except Overtaken:
                if self.max_tokens >= most:
                    raise
                self.max_tokens = min(2 * self.max_tokens, most)
        self.gaps[False].append(alone)
        self.gaps[True].append(beside)
        if ttft is not None:
            self.ttft.append(ttft)

    def summary(self) -> tuple[str, dict[str, Any]]:
        """Return the table, and what is written."""
        ratios = [
            float(np.percentile(b, 99) / np.percentile(a, 99))
            for a, b in zip(self.gaps[False], self.gaps[True], strict=True)
        ]
        names = {False: "chats alone", True: "with a long prompt"}
        summaries = {names[k]: Summary.of(list(itertools.chain(*v))) for k, v in self.gaps.items()}
        rows = [[name, s.n, s.p50, s.p90, s.p99, s.mean] for name, s in summaries.items()]
        lines = [stats.table(["ITL, ms", "gaps", "p50", "p90", "p99", "mean"], rows)]
        results: dict[str, Any] = {
            "itl_ms": {name: asdict(summary) for name, summary in summaries.items()},
            "p99_ratios": ratios,
            "goal": GOAL,
            "max_tokens": self.max_tokens,
            "long_prompt_ttft_ms": self.ttft,
        }
        if ratios:
            ratio = results["p99_ratio"] = float(np.median(ratios))
            lines += [
                f"p99 with / without: {ratio:.2f} (median of {len(ratios)} rounds; goal {GOAL:g})",
                f"TTFT of the long prompt: {np.median(self.ttft):.0f} ms (median)",
            ]
        return "\n".join(lines), results


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model-id", help="served model; the embedded one by default")
    parser.add_argument("--chats", type=int, default=64)
    parser.add_argument("--words", type=int, default=40, help="prompt of a chat")
    parser.add_argument("--max-tokens", type=int, default=120, help="answer of a chat")
    parser.add_argument("--long-words", type=int, default=700, help="prompt of the other one")
    parser.add_argument("--after", type=int, default=4, help="tokens of every chat before it")
    parser.add_argument("--rounds", type=int, default=5)
    stats.add_output_flags(parser)
    args = parser.parse_args()
    flags = ["--model-id", args.model_id] if args.model_id else []
    found = Rounds(args.max_tokens)
    with stats.reporting(args.json, "mixed", found.summary), running(flags) as server:
        client = Client(Address(server.host, server.port))
        with suppress(Overtaken):
            trio.run(round_of, client, args, args.max_tokens, 999, True)  # warm-up
        context = trio.run(client.get, "/info")["max_total_tokens"]
        for number in tqdm(range(args.rounds), desc="rounds", disable=None):
            # Half of the context is left to the prompt.
            found.add(client, args, number, max(args.max_tokens, context // 2))


if __name__ == "__main__":
    main()
