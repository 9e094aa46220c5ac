"""Ours, reservation in order of arrival, and TGI's algorithm, in virtual time on one cost model.

Ours comes three times: told the profile's limits by flags, without any flag, and with every block
reserved up front instead of granted as a sequence grows.

    python -m bench.schedule.policies --json bench/out/policies.json --plot bench/out/policies.png

Goodput: requests per second whose first token came in time and whose gaps' 99th percentile was
within the profile's limit. All three get the same card, the same KV blocks and the same requests.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.harness.stats import Summary, add_output_flags, reporting, table
from bench.schedule.inputs import limits, request
from bench.schedule.tgi import Tgi
from bench.schedule.virtual_shard import CostModel, VirtualShard
from bench.schedule.workload import PROFILES, Job, Profile, Served
from tgi_trio.ipc.messages import StepReport
from tgi_trio.router.scheduling import Scheduler, SchedulingLimits

BLOCK = 16
GAP_S = 15e-6  # between two steps of a shard with standing orders


def ours(blocks: int, budget: int, **changes: Any) -> SchedulingLimits:
    """Growth, prefix cache, paced prompts; everything else as it is without flags."""
    return limits(
        blocks=blocks,
        block_size=BLOCK,
        max_batch_prefill_tokens=4096,
        token_budget=budget,
        **changes,
    )


def told(profile: Profile, blocks: int, budget: int, **changes: Any) -> SchedulingLimits:
    """The same, with the profile's limits as --target-ttft and --target-itl."""
    return ours(blocks, budget, target_ttft=profile.ttft_s, target_itl=profile.itl_s, **changes)


def reserving(blocks: int, budget: int) -> SchedulingLimits:
    """First in first out with up-front reservation: no growth, no cache, no pace, no passing."""
    return limits(
        blocks=blocks,
        block_size=BLOCK,
        max_batch_prefill_tokens=4096,
        token_budget=budget,
        reserve=True,
        prefix_caching=False,
        skip_limit=0,
        stretch=1e9,
        target_itl=0.0,
        target_ttft=float("inf"),
        waiting_served_ratio=1e9,
        max_waiting_tokens=1 << 60,
    )


class Service:
    """A scheduler and its virtual shard; commands take effect at the next boundary of a step."""

    def __init__(self, limits: SchedulingLimits, cost: CostModel) -> None:
        self.scheduler = Scheduler(limits)
        self.outputs: dict[int, list[int]] = {}
        self.shard = VirtualShard(limits.block_size, cost, self.outputs)

    def run(self, jobs: list[Job]) -> list[Served]:
        """Serve `jobs`, sorted by arrival; returns one record for each."""
        scheduler, shard = self.scheduler, self.shard
        arriving = deque(jobs)
        served = {job.id: Served(job) for job in jobs}
        leaving = deque(
            sorted((j.arrival + j.leaves_after, j.id) for j in jobs if j.leaves_after is not None)
        )
        self.outputs.update({job.id: job.outputs for job in jobs})
        now = 0.0
        before: StepReport | None = None
        while arriving or scheduler.queue_size or scheduler.held_blocks or before is not None:
            report, seconds = shard.step() if shard.applied else (None, 0.0)
            end = now + seconds + GAP_S
            if before is not None:  # the router reads it while the next step runs
                self._deliver(before, now, served)
                shard_commands = scheduler.schedule(now)
            else:
                shard_commands = []
            idle = not seconds and not shard_commands and not scheduler.held_blocks
            if idle and arriving:
                end = max(end, arriving[0].arrival)
            while arriving and arriving[0].arrival <= end:
                job = arriving.popleft()
                scheduler.add(job.id, request(job.prompt, job.max_new), job.arrival)
                shard_commands += scheduler.schedule(job.arrival)
            while leaving and leaving[0][0] <= end:
                at, sequence = leaving.popleft()
                if scheduler.abort(sequence, at):
                    shard_commands += scheduler.schedule(at)
            shard.apply(shard_commands)
            before = report if report is not None and (report.sequence or seconds) else None
            if before is None and report is not None:
                self._deliver(report, end, served)
            now = end
        return list(served.values())

    def _deliver(self, report: StepReport, now: float, served: dict[int, Served]) -> None:
        for part in self.scheduler.commit(report, now):
            served[part.sequence_id].times += [now] * len(part.token_ids)


def measure(profile: Profile, served: list[Served], seconds: float) -> dict[str, Any]:
    """Return the figures of one run with `seconds` of arrivals."""
    done = [s for s in served if s.complete]
    good = sum(
        s.ttft <= profile.ttft_s and (not s.gaps or np.percentile(s.gaps, 99) <= profile.itl_s)
        for s in done
    )
    busy = max(s.times[-1] for s in done) - min(s.job.arrival for s in served)
    return {
        "goodput": good / seconds,
        "completed": len(done),
        "tokens_per_s": sum(len(s.times) for s in served) / busy,
        "ttft": asdict(Summary.of([s.ttft for s in done])),
        "itl": asdict(Summary.of([gap for s in done for gap in s.gaps])),
    }


def compare(profile: Profile, seconds: float, blocks: int, budget: int) -> list[dict[str, Any]]:
    """Run every policy at every rate of a profile."""
    cost = CostModel()
    # TGI has no such targets; the best that can be told it is a smaller prefill budget.
    fitting = int(0.7 * profile.itl_s / cost.token_s) // BLOCK * BLOCK
    runs: dict[str, Callable[[list[Job]], list[Served]]] = {
        "ours": lambda jobs: Service(told(profile, blocks, budget), cost).run(jobs),
        "ours, no flags": lambda jobs: Service(ours(blocks, budget), cost).run(jobs),
        "ours, reserving": lambda jobs: Service(
            told(profile, blocks, budget, reserve=True), cost
        ).run(jobs),
        "fifo + reservation": lambda jobs: Service(reserving(blocks, budget), cost).run(jobs),
        "tgi": lambda jobs: Tgi(blocks, BLOCK, 4096, cost).run(jobs),
        "tgi, fitting budget": lambda jobs: Tgi(blocks, BLOCK, fitting, cost).run(jobs),
    }
    results = []
    for rate in profile.rates:
        jobs = profile.make(np.random.default_rng(1), rate, seconds)
        for name, run in runs.items():
            figures = measure(profile, run(jobs), seconds)
            results.append({"profile": profile.name, "rate": rate, "policy": name, **figures})
    return results


def plot(path: Path, results: list[dict[str, Any]]) -> None:
    """Draw goodput over rate, a panel per profile."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(r["profile"] for r in results))
    figure, axes = pyplot.subplots(1, len(names), figsize=(3.2 * len(names), 3.2))
    for axis, name in zip(np.atleast_1d(axes), names, strict=True):
        for policy in dict.fromkeys(r["policy"] for r in results):
            points = [r for r in results if (r["profile"], r["policy"]) == (name, policy)]
            axis.plot(
                [p["rate"] for p in points], [p["goodput"] for p in points], "o-", label=policy
            )
        axis.set(title=name, xlabel="requests/s", ylim=(0, None))
    np.atleast_1d(axes)[0].set_ylabel("goodput, requests/s")
    np.atleast_1d(axes)[0].legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"written: {path}")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60, help="virtual seconds of arrivals")
    parser.add_argument("--kv-tokens", type=int, default=150_000, help="KV tokens of the card")
    parser.add_argument("--step-token-budget", type=int, default=512, help="TGI has 4096")
    parser.add_argument("--profile", action="append", help="only these profiles")
    parser.add_argument("--plot", type=Path, help="also draw goodput to this file")
    add_output_flags(parser)
    options = parser.parse_args()
    chosen = [p for p in PROFILES if not options.profile or p.name in options.profile]
    blocks = options.kv_tokens // BLOCK + 1
    results: list[dict[str, Any]] = []
    with reporting(options.json, "schedule.policies", partial(summary, results)):
        for profile in tqdm(chosen, desc="profiles", disable=None):
            results += compare(profile, options.seconds, blocks, options.step_token_budget)
    if options.plot:
        plot(options.plot, results)


def summary(results: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Return the table, and what is written."""
    header = [
        "profile",
        "rate/s",
        "policy",
        "goodput/s",
        "tokens/s",
        "TTFT p50 s",
        "p99",
        "ITL p99 ms",
    ]
    rows = [
        [
            r["profile"], r["rate"], r["policy"], r["goodput"], r["tokens_per_s"],
            r["ttft"]["p50"], r["ttft"]["p99"], r["itl"]["p99"] * 1e3,
        ]
        for r in results
    ]  # fmt: skip
    return table(header, rows), {"results": results}


if __name__ == "__main__":
    main()
