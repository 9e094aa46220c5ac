"""What streams notice of a long prompt whose room has to be copied to the host's memory first.

    python -m bench.schedule.copies --json bench/out/copies.json

The device is full of cached prefixes, and all that a prompt evicts is copied over a bus in virtual
time, in the order of its orders. The floor is a bus that takes no time.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
from tqdm import tqdm

from bench.harness.stats import add_output_flags, reporting, table
from bench.schedule.inputs import limits, request
from bench.schedule.virtual_shard import CostModel, VirtualShard
from tgi_trio.ipc.messages import StepReport
from tgi_trio.router.scheduling import Command, Copy, Extend, Prefill, Scheduler

_BLOCK: Final = 16
_BLOCK_BYTES: Final = 131_072 * _BLOCK  # as `CostModel` has it
_OLD: Final = 2048  # tokens of each prefix that is cached before
_NEW: Final = 400  # tokens that a stream generates
_STARTED: Final = 40  # steps of the streams before the prompt comes
_INSTANT: Final = float("inf")


@dataclass
class CopyingShard(VirtualShard):
    """Copies blocks in order, at so many bytes a second; who is granted one waits for it."""

    bytes_per_s: float = _INSTANT
    ordered: int = 0  # copies
    copied: float = 0.0
    last: dict[int, int] = field(default_factory=dict)  # block -> copies after which it is there
    late: deque[tuple[int, Command]] = field(default_factory=deque)
    waiting: set[int] = field(default_factory=set)  # streams with blocks on their way

    def apply(self, commands: Iterable[Command]) -> None:
        for command in commands:
            match command:
                case Copy(transfers=transfers):
                    self.last |= {
                        each.item: self.ordered + at for at, each in enumerate(transfers, 1)
                    }
                    self.ordered += len(transfers)
                    self.applied = command.number
                case Prefill(number=number, rows=rows):
                    for row in rows:
                        self.late.append((self._wait(row.block_ids), Prefill(number, [row])))
                    self.applied = number
                case Extend(number=number, rows=extends):
                    for each in extends:
                        self.late.append((self._wait(each.block_ids), Extend(number, [each])))
                    self.applied = number
                case _:
                    super().apply([command])
        self.pass_time(0.0)

    def _wait(self, blocks: Iterable[int]) -> int:
        return max((self.last.get(block, 0) for block in blocks), default=0)

    def pass_time(self, seconds: float) -> None:
        """Let copies go on, and rows have what is there."""
        done = self.copied + seconds * self.bytes_per_s / _BLOCK_BYTES if seconds else self.copied
        instant = self.bytes_per_s == _INSTANT
        self.copied = float(self.ordered) if instant else min(done, float(self.ordered))
        number = self.applied
        for _ in range(len(self.late)):
            after, command = self.late.popleft()
            if after <= self.copied:
                super().apply([command])
            else:
                self.late.append((after, command))
        self.applied = number

    def step(self) -> tuple[StepReport, float]:
        report, seconds = super().step()
        report.copied = int(self.copied)
        return report, seconds


@dataclass
class Found:
    """What one run has shown."""

    sat_out: int = 0  # steps, of all streams
    longest: float = 0.0  # seconds between two tokens of a stream
    ttft: float = 0.0  # of the prompt, in seconds


def measure(prompt: int, streams: int, bytes_per_s: float, cached: int) -> Found:
    """Have streams generate beside a prompt; `cached`: tokens of prefixes that fill the device."""
    chosen = limits(
        blocks=cached // _BLOCK + 1, block_size=_BLOCK, max_batch_prefill_tokens=4096,
        token_budget=512, host_blocks=4 * cached // _BLOCK,
    )  # fmt: skip
    scheduler, outputs = Scheduler(chosen), dict[int, list[int]]()
    shard = CopyingShard(_BLOCK, CostModel(), outputs, bytes_per_s=bytes_per_s)
    now, last, found = 0.0, dict[int, float](), Found()

    def submit(first: int, tokens: int, new: int) -> int:
        number = len(outputs) + 1
        outputs[number] = list(range(new))
        scheduler.add(number, request(np.arange(first, first + tokens), new), now)
        return number

    def turn() -> None:
        nonlocal now
        shard.apply(scheduler.schedule(now))
        report, seconds = shard.step()
        seconds = seconds or CostModel().fixed_s  # nobody is there yet
        shard.pass_time(seconds)
        now += seconds
        for part in scheduler.commit(report, now):
            before = last.get(part.sequence_id)
            if before is not None and part.token_ids and part.sequence_id != long:
                found.longest = max(found.longest, now - before)
            if part.token_ids:
                last[part.sequence_id] = now

    long = 0
    for number in range(cached // _OLD):
        submit(1_000_000 + number * _OLD, _OLD, 1)
        while scheduler.held_blocks or scheduler.queue_size:
            turn()
    for number in range(streams):
        submit(100 * number, 64, _NEW)
    for _ in range(_STARTED):
        turn()
    before, began = shard.stalled, now
    found.longest = 0.0
    long = submit(500_000, prompt, 8)
    while scheduler.held_blocks or scheduler.queue_size:
        turn()
        if long in last and not found.ttft:
            found.ttft = now - began
    found.sat_out = shard.stalled - before
    return found


def summary(results: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Return the table of what was measured so far, and the figures."""
    rows = [
        (r["prompt"], r["bus"], r["sat_out"], 1e3 * r["longest_s"], r["ttft_s"]) for r in results
    ]
    head = ("prompt", "bus", "steps sat out", "longest gap, ms", "its first token, s")
    return table(head, rows), {"results": results}


def main() -> None:
    """Parse flags, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, nargs="+", default=[4096, 16_384, 32_768])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--cached", type=int, default=65_536, help="KV tokens of the device")
    parser.add_argument("--bus", type=float, nargs="+", default=[6, 25], help="GB/s")
    add_output_flags(parser)
    args = parser.parse_args()
    results: list[dict[str, Any]] = []
    buses = [*(1e9 * bus for bus in args.bus), _INSTANT]
    with (
        reporting(args.json, "schedule.copies", partial(summary, results)),
        tqdm(total=len(args.prompts) * len(buses), desc="runs") as bar,
    ):
        for prompt in args.prompts:
            for bus in buses:
                found = measure(prompt, args.streams, bus, args.cached)
                name = "no time" if bus == _INSTANT else f"{bus / 1e9:g} GB/s"
                results.append(
                    {"prompt": prompt, "bus": name, "sat_out": found.sat_out,
                     "longest_s": found.longest, "ttft_s": found.ttft}
                )  # fmt: skip
                bar.update()


if __name__ == "__main__":
    main()
