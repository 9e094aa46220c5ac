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
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import trio
from tqdm import tqdm

from bench import stats
from bench.server import running
from tgi_trio.client.address import Address
from tgi_trio.client.http import Client
from tgi_trio.client.load import one_request, prompt
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


async def round_of(client: Client, args: argparse.Namespace, seed: int, long: bool) -> Any:
    """Run the chats once; return their gaps from when all stream, and the long prompt's TTFT.

    Both in milliseconds; the TTFT is None without a long prompt. Raises RuntimeError when a
    request fails, or when the chats were over before the long prompt was answered: such a round
    says nothing.
    """
    rng = random.Random(seed)
    beginning = Beginning(args.chats, args.after)
    chats: list[RequestRecord] = []
    intruder: list[RequestRecord] = []

    async def chat(number: int, text: str) -> None:
        heard = partial(beginning.heard, number)
        chats.append(await one_request(client, text, args.max_tokens, heard=heard))

    async def disturb(text: str) -> None:
        await beginning.all_stream.wait()
        intruder.append(await one_request(client, text, 2))

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
        raise RuntimeError("a chat was over before the long prompt's first token: --max-tokens")
    gaps = [
        (b - a) * 1e3
        for record in chats
        for a, b in itertools.pairwise(record.events)
        if a >= beginning.at
    ]
    return gaps, intruder[0].ttft * 1e3 if intruder else None


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
    gaps: dict[bool, list[list[float]]] = {False: [], True: []}
    ttft: list[float] = []
    with running(flags) as server:
        client = Client(Address(server.host, server.port))
        trio.run(round_of, client, args, 999, True)  # warm-up
        for number in tqdm(range(args.rounds), desc="rounds", disable=None):
            for long in (False, True):
                found, first = trio.run(round_of, client, args, 2 * number + long, long)
                gaps[long].append(found)
                ttft += [first] if first is not None else []
    ratios = [
        float(np.percentile(b, 99) / np.percentile(a, 99))
        for a, b in zip(gaps[False], gaps[True], strict=True)
    ]
    names = {False: "chats alone", True: "with a long prompt"}
    summaries = {names[k]: Summary.of(list(itertools.chain(*v))) for k, v in gaps.items()}
    rows = [[name, s.n, s.p50, s.p90, s.p99, s.mean] for name, s in summaries.items()]
    print(stats.table(["ITL, ms", "gaps", "p50", "p90", "p99", "mean"], rows))
    ratio = float(np.median(ratios))
    print(f"p99 with / without: {ratio:.2f} (median of {args.rounds} rounds; goal {GOAL:g})")
    print(f"TTFT of the long prompt: {np.median(ttft):.0f} ms (median)")
    results = {
        "itl_ms": {name: asdict(summary) for name, summary in summaries.items()},
        "p99_ratios": ratios,
        "p99_ratio": ratio,
        "goal": GOAL,
        "long_prompt_ttft_ms": ttft,
    }
    stats.write_json(args.json, "mixed", results)


if __name__ == "__main__":
    main()
