"""What a decision costs, and whether every invariant holds for as long as you like.

    python -m bench.schedule                     # microseconds for schedule + commit
    python -m bench.schedule --steps 1000000     # also: random steps, invariants after each
    python -m bench.schedule --json bench/out/schedule.json

Costs are CPU time of the thread: what else runs on the machine is not in them. The soak mixes
arrivals, cancellations, deadlines, stop strings, faults and crashes of the shard.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.harness.stats import Summary, add_output_flags, reporting, table
from bench.schedule.inputs import limits, request
from bench.schedule.virtual_shard import CostModel, VirtualShard
from tgi_trio.errors import Overloaded
from tgi_trio.ipc.messages import Fault, StepReport
from tgi_trio.router.scheduling import Scheduler


def decode(batch: int, reserve: bool, steps: int) -> Summary:
    """Microseconds of commit + schedule while `batch` sequences decode."""
    scheduler = Scheduler(limits(reserve=reserve))
    rng = np.random.default_rng(0)
    lengths = (100 + np.arange(batch) % 64).tolist()  # so that blocks do not run out in step
    for i, length in enumerate(lengths):
        prompt = rng.integers(0, 30_000, length).astype(np.int32)
        scheduler.add(i, request(prompt, steps + 10), 0.0)
    scheduler.schedule(0.0)
    zeros, ones = [0] * batch, [1] * batch
    samples = []
    gc.collect()
    for step in tqdm(range(steps), desc=f"decode {batch}", leave=False, disable=None):
        report = StepReport(
            step + 1,
            1 << 30,
            forward_ns=10_000_000,
            decode_rows=batch,
            sequence=list(range(batch)),
            computed=[length + step for length in lengths],
            token_count=ones,
            prompt_count=zeros,
            finish=zeros,
            token_ids=[5] * batch,
            logprobs=[-0.5] * batch,
            top_count=zeros,
        )
        start = time.thread_time_ns()
        scheduler.commit(report, float(step))
        scheduler.schedule(float(step))
        samples.append((time.thread_time_ns() - start) / 1e3)
    return Summary.of(samples[1:])


def busy(batch: int, steps: int) -> Summary:
    """Microseconds of commit + schedule while `batch` clients come back as soon as they are served.

    Prompts of 500 tokens, 64 of them shared, 200 answers on average; memory for three quarters.
    """
    rng = np.random.default_rng(0)
    scheduler = Scheduler(limits(blocks=batch * 32, max_batch_size=batch))
    shard = VirtualShard(16, CostModel(), {})
    head = rng.integers(0, 30_000, 64).astype(np.int32)
    number = 0
    samples = []
    waiting = batch
    now = 0.0
    for _ in tqdm(range(steps + 300), desc=f"busy {batch}", leave=False, disable=None):
        for _ in range(waiting):
            number += 1
            prompt = np.concatenate([head, rng.integers(0, 30_000, 436).astype(np.int32)])
            shard.outputs[number] = [5] * int(rng.integers(1, 400))
            scheduler.add(number, request(prompt, 400), now)
        shard.apply(scheduler.schedule(now))
        report, seconds = shard.step()
        now += seconds
        start = time.thread_time_ns()
        progress = scheduler.commit(report, now)
        commands = scheduler.schedule(now)
        samples.append((time.thread_time_ns() - start) / 1e3)
        shard.apply(commands)
        waiting = sum(part.finish != 0 for part in progress)
    return Summary.of(samples[300:])


def lookup(tokens: int, block_size: int) -> Summary:
    """Microseconds to admit a prompt of `tokens` tokens that is cached, per 1,000 tokens."""
    total = 4 * tokens // block_size
    scheduler = Scheduler(limits(blocks=total, block_size=block_size, reserve=True))
    prompt = np.arange(tokens, dtype=np.int32)
    samples = []
    for i in range(50):
        scheduler.add(i, request(prompt, 1), 0.0)
        start = time.thread_time_ns()
        scheduler.schedule(0.0)
        samples.append((time.thread_time_ns() - start) / 1e3 / (tokens / 1000))
        report = StepReport(i, 1 << 30, sequence=[i], computed=[tokens], token_count=[1])
        report.prompt_count, report.finish, report.top_count = [0], [1], [0]
        report.token_ids, report.logprobs = [1], [0.0]
        scheduler.commit(report, 0.0)
    return Summary.of(samples[1:])


class Soak:
    """Random life of a small server; a check after every step."""

    def __init__(self, seed: int, reserve: bool) -> None:
        self.rng = random.Random(seed)
        self.scheduler = Scheduler(
            limits(
                blocks=73,
                block_size=4,
                max_batch_size=12,
                max_batch_prefill_tokens=96,
                token_budget=48,
                max_queued_requests=40,
                reserve=reserve,
                ask_ahead=4,
                grant_ahead=12,
                waiting_served_ratio=1.2,
            )
        )
        self.outputs: dict[int, list[int]] = {}
        self.open: dict[int, None] = {}  # clients still listening
        self.shard = VirtualShard(4, CostModel(), self.outputs)
        self.now = 0.0
        self.number = 0
        self.replies: list[StepReport] = []

    def step(self) -> None:
        """Let a few things happen, then a step of the shard, then look at every invariant."""
        rng, scheduler = self.rng, self.scheduler
        if rng.random() < 0.5:
            self._arrive()
        if rng.random() < 0.08 and self.open:
            victim = rng.choice(list(self.open))
            if rng.random() < 0.7:
                scheduler.abort(victim, self.now)
            else:
                scheduler.finish(victim, self.now)
            del self.open[victim]
        for sequence in scheduler.expire(self.now):
            del self.open[sequence]
        commands = scheduler.schedule(self.now)
        self.shard.apply(commands)
        if rng.random() < 0.003 and self.shard.rows:
            failed = rng.choice(list(self.shard.rows))
            del self.shard.rows[failed]
            self._receive()  # replies keep their order
            for sequence in scheduler.fault([Fault(failed, "")], self.shard.applied, self.now):
                del self.open[sequence]
        if rng.random() < 0.001:
            for sequence in scheduler.shard_lost(self.now):
                del self.open[sequence]
            self.shard = VirtualShard(4, CostModel(), self.shard.outputs)
            self.replies.clear()
        elif self.shard.applied:
            report, seconds = self.shard.step()
            self.now += seconds + 1e-4
            self.replies.append(report)
            if rng.random() < 0.8:
                self._receive()
        scheduler.check()

    def _receive(self) -> None:
        for report in self.replies:
            for part in self.scheduler.commit(report, self.now):
                if part.finish:
                    del self.open[part.sequence_id]
        self.replies.clear()

    def _arrive(self) -> None:
        rng = self.rng
        base = rng.choice([0, 0, 0, 1000, 2000, 5000 + self.number])
        prompt = np.arange(base, base + rng.randint(1, 60), dtype=np.int32)
        count = rng.randint(1, 60)
        deadline = self.now + rng.random() if rng.random() < 0.05 else None
        self.number += 1
        one = request(prompt, count, deadline=deadline, priority=rng.choice([0, 0, 0, 1]))
        try:
            self.scheduler.add(self.number, one, self.now)
        except Overloaded:
            return
        self.open[self.number] = None
        if self.number % 1000 == 0:
            for old in self.outputs.keys() - self.open.keys() - self.shard.rows.keys():
                del self.outputs[old]
        self.outputs[self.number] = [rng.randint(1, 9) for _ in range(rng.randint(1, count))]

    def drain(self) -> None:
        """Abort everyone and see every block back."""
        for sequence in self.open:
            self.scheduler.abort(sequence, self.now)
        for _ in range(3):
            self.shard.apply(self.scheduler.schedule(self.now))
            self.replies.append(self.shard.step()[0])
            self._receive()
        self.scheduler.check()
        left = self.scheduler.total_blocks - self.scheduler.free_blocks
        if left != self.scheduler.cached_blocks or self.scheduler.queue_size:
            raise AssertionError(f"{left} blocks are not back")


def soak(steps: int) -> dict[str, Any]:
    """Run `steps` random steps, half of them with reservation; raises at a broken invariant."""
    start = time.perf_counter()
    counters: dict[str, int] = {}
    with tqdm(total=steps, desc="soak", disable=None) as bar:
        for reserve in (False, True):
            world = Soak(7, reserve)
            for step in range(steps // 2):
                world.step()
                if step % 1000 == 999:
                    bar.update(1000)
            world.drain()
            for name, value in world.scheduler.counters.items():
                counters[name] = counters.get(name, 0) + value
    seconds = time.perf_counter() - start
    return {"steps": steps, "seconds": seconds, "steps_per_s": steps / seconds, **counters}


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=0, help="random steps with invariants")
    parser.add_argument("--rounds", type=int, default=2000, help="samples per measurement")
    add_output_flags(parser)
    options = parser.parse_args()
    measured: dict[str, Summary] = {}
    soaked: dict[str, Any] = {}
    with reporting(options.json, "schedule", partial(summary, measured, soaked)):
        measure(options.rounds, measured)
        if options.steps:
            soaked |= soak(options.steps)


def measure(rounds: int, measured: dict[str, Summary]) -> None:
    """Time what a server does again and again, `rounds` times each."""
    for batch in (32, 256, 512):
        for reserve in (True, False):
            name = f"commit + schedule, batch {batch}, {'reserve' if reserve else 'grow'}"
            measured[name] = decode(batch, reserve, rounds)
    for batch in (32, 256, 512):
        name = f"commit + schedule, batch {batch}, comings and goings"
        measured[name] = busy(batch, rounds)
    for block_size in (1, 16):
        name = f"admit a cached 32k prompt, per 1,000 tokens, blocks of {block_size}"
        measured[name] = lookup(32_768, block_size)


def summary(measured: dict[str, Summary], soaked: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the tables, and what is written."""
    rows = [[name, s.p50, s.p99, s.mean, 1e6 / s.p50] for name, s in measured.items()]
    text = table(["µs", "p50", "p99", "mean", "per second"], rows)
    results: dict[str, Any] = {"us": {name: asdict(s) for name, s in measured.items()}}
    if soaked:
        text += "\n" + table(["soak", "value"], [list(item) for item in soaked.items()])
        results["soak"] = soaked
    return text, results


if __name__ == "__main__":
    main()
