"""Where a front sends requests: prefix hits, waiting and the busiest replica, in virtual time.

    python -m bench.cluster.routing                      # 10, 100 and 1,000 replicas
    python -m bench.cluster.routing --replicas 10000 --slots 4 --seconds 20
    python -m bench.cluster.routing --json bench/out/routing.json --plot bench/out/routing.png

What decides is `tgi_trio.cluster.routing` itself. Four ways are compared: at random; the less busy
of two; prefixes, each front knowing only its own; prefixes, fronts telling each other. Fronts hear
of replicas' loads, and of one another, every `--feed` seconds. Replicas are busy for 70 % of what
they can do, and their caches are smaller than what all conversations would need. A decision's cost
is CPU time of the thread, hashing of a prompt of 4 KiB included.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from bench.cluster.conversations import THINK_S, TURNS, Conversation, Conversations
from bench.cluster.virtual_replica import SERVICE_S, VirtualReplica
from bench.harness.stats import Summary, add_output_flags, reporting, table_of
from tgi_trio.cluster.prefix_chain import Chain, make_prefix_chain
from tgi_trio.cluster.routing import Routing

BUSY: Final = 0.7  # of all slots, on average
WARM: Final = 0.4  # of the seconds are not counted: caches are empty at first
PARTS_PER_SLOT: Final = 6.25  # that a replica's cache holds
HEADS_PER_SLOT: Final = 30  # that a front remembers, so that it knows a conversation's last turn
APPLICATIONS: Final = 10  # per replica


@dataclass(frozen=True)
class Policy:
    """A way to choose; fronts that `share` tell each other what they sent where."""

    name: str
    choice: str  # random, two or prefix
    fronts: int
    share: bool = False


POLICIES: Final = (
    Policy("random", "random", 4),
    Policy("less busy of two", "two", 4),
    Policy("prefix, one front", "prefix", 1),
    Policy("prefix, four that do not talk", "prefix", 4),
    Policy("prefix, four that tell", "prefix", 4, share=True),
)


@dataclass
class Cluster:
    """So many replicas and fronts in virtual time."""

    policy: Policy
    replicas: int
    slots: int
    feed_s: float
    seed: int = 1
    ttft: list[float] = field(default_factory=list)
    found: int = 0  # parts of prompts that were in the replica's cache
    asked: int = 0  # parts of prompts
    peak: int = 0  # most requests at one replica at once
    requests: int = 0

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        names = [str(number) for number in range(self.replicas)]
        parts = max(60, int(PARTS_PER_SLOT * self.slots))
        self.machines = {name: VirtualReplica(name, self.slots, parts) for name in names}
        self.fronts = [
            Routing(self.draw, heads=HEADS_PER_SLOT * self.slots * self.replicas)
            for _ in range(self.policy.fronts)
        ]
        for front in self.fronts:
            for name in names:
                front.add(name)
        self.names = names
        self.talk: list[tuple[Routing, str, Chain]] = []
        self._events: list[tuple[float, int, str, Any]] = []
        self._number = count()

    def run(self, seconds: float) -> None:
        """Let conversations begin and go on for so many seconds."""
        conversations = Conversations(self.draw, APPLICATIONS * self.replicas)
        rate = BUSY * self.slots * self.replicas / SERVICE_S / (sum(TURNS) / 2)
        warm = seconds * WARM
        self._at(0.0, "begin", None)
        self._at(0.0, "feed", None)
        counted = False
        with tqdm(total=round(seconds), desc=self.policy.name, leave=False, disable=None) as bar:
            while self._events:
                now, _, kind, what = heappop(self._events)
                if now > seconds:
                    return
                if now >= warm and not counted:
                    counted = True
                    self._forget()
                if int(now) > bar.n:
                    bar.update(int(now) - bar.n)
                match kind:
                    case "begin":
                        self._at(now + self.draw.expovariate(rate), "begin", None)
                        self._arrive(conversations.begin(), now)
                    case "turn":
                        self._arrive(what, now)
                    case "end":
                        machine, one = what
                        self._end(machine, one, now)
                    case "feed":
                        self._feed()
                        self._at(now + self.feed_s, "feed", None)

    def figures(self) -> dict[str, Any]:
        """Return what was seen since the caches were warm."""
        served = [machine.served for machine in self.machines.values()]
        ttft = Summary.of(self.ttft)
        return {
            "replicas": self.replicas,
            "slots": self.slots,
            "policy": self.policy.name,
            "requests": self.requests,
            "hit": self.found / max(1, self.asked),
            "TTFT p50 ms": ttft.p50 * 1e3,
            "TTFT p99 ms": ttft.p99 * 1e3,
            "most served / mean": max(served) * len(served) / max(1, sum(served)),
            "most at once / slots": self.peak / self.slots,
        }

    def _at(self, time_s: float, kind: str, what: Any) -> None:
        heappush(self._events, (time_s, next(self._number), kind, what))

    def _forget(self) -> None:
        self.ttft.clear()
        self.found = self.asked = self.peak = self.requests = 0
        for machine in self.machines.values():
            machine.served = 0

    def _choose(self, front: Routing, chain: Chain) -> str:
        if self.policy.choice == "random":
            return self.draw.choice(self.names)
        return front.order(chain if self.policy.choice == "prefix" else ())[0]

    def _arrive(self, one: Conversation, now: float) -> None:
        one.front = self.draw.randrange(len(self.fronts))
        front = self.fronts[one.front]
        name = self._choose(front, one.chain)
        front.sent(name, one.chain)
        if self.policy.share:
            self.talk.append((front, name, one.chain))
        machine = self.machines[name]
        one.arrived = now
        self.requests += 1
        if machine.running < machine.slots:
            self._start(machine, one, now)
        else:
            machine.queue.append(one)
        self.peak = max(self.peak, machine.load)

    def _start(self, machine: VirtualReplica, one: Conversation, now: float) -> None:
        first, end, found = machine.start(one, now)
        self.ttft.append(first - one.arrived)
        self.found += found
        self.asked += len(one.chain)
        self._at(end, "end", (machine, one))

    def _end(self, machine: VirtualReplica, one: Conversation, now: float) -> None:
        machine.running -= 1
        self.fronts[one.front].finished(machine.name)
        one.extend()
        if one.turns:
            self._at(now + self.draw.expovariate(1 / THINK_S), "turn", one)
        if machine.queue:
            self._start(machine, machine.queue.popleft(), now)

    def _feed(self) -> None:
        for teller, name, chain in self.talk:
            for front in self.fronts:
                if front is not teller:
                    front.learn(name, chain)
        self.talk.clear()
        for front in self.fronts:
            for one in self.machines.values():
                waiting = len(one.queue)
                front.report(one.name, requests=one.running + waiting, slots=one.slots)


def decide(replicas: int, slots: int, rounds: int) -> Summary:
    """Microseconds of thread CPU that a request of 4 KiB costs: its chain, the order, the note."""
    draw = random.Random(1)
    routing = Routing(draw)
    for number in range(replicas):
        routing.add(str(number))
        load = draw.randint(0, slots)
        routing.report(str(number), requests=load, slots=slots)
    bodies = [b'{"messages": "' + draw.randbytes(4080) + b'"}' for _ in range(rounds // 4)]
    samples = []
    for number in range(rounds):  # each prompt comes four times
        body = bodies[number % len(bodies)]
        start = time.thread_time_ns()
        chain = make_prefix_chain(body)
        name = routing.order(chain)[0]
        routing.sent(name, chain)
        samples.append((time.thread_time_ns() - start) / 1e3)
        routing.finished(name)
    return Summary.of(samples)


def plot(path: Path, results: list[dict[str, Any]]) -> None:
    """Draw hits, waiting and the busiest replica over the number of replicas."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = ("hit", "TTFT p99 ms", "most served / mean", "decision p50 us")
    figure, axes = pyplot.subplots(1, len(shown), figsize=(3.6 * len(shown), 3.4))
    for axis, key in zip(axes, shown, strict=True):
        for policy in dict.fromkeys(r["policy"] for r in results):
            points = [r for r in results if r["policy"] == policy]
            axis.plot([p["replicas"] for p in points], [p[key] for p in points], "o-", label=policy)
        axis.set(title=key, xlabel="replicas", xscale="log", ylim=(0, None))
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"written: {path}")


def ratios(results: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield for each number of replicas how fronts that tell each other compare."""
    for replicas in dict.fromkeys(r["replicas"] for r in results):
        of = {r["policy"]: r for r in results if r["replicas"] == replicas}
        # a run of a few seconds finds nothing in its caches
        if len(of) == len(POLICIES) and all(r["hit"] for r in of.values()):
            random_one, _, single, _, telling = (of[policy.name] for policy in POLICIES)
            yield {
                "replicas": replicas,
                "hits, four that tell / random": telling["hit"] / random_one["hit"],
                "hits, four that tell / one front": telling["hit"] / single["hit"],
                "most served / mean": telling["most served / mean"],
                "decision p50 us": telling["decision p50 us"],
            }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--replicas", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--slots", type=int, default=8, help="of a replica")
    parser.add_argument("--seconds", type=float, default=60, help="virtual seconds")
    parser.add_argument("--feed", type=float, default=0.1, help="seconds between reports")
    parser.add_argument("--plot", type=Path, help="also draw the figures to this file")
    add_output_flags(parser)
    options = parser.parse_args()
    results: list[dict[str, Any]] = []
    with reporting(options.json, "cluster.routing", partial(summary, results)):
        for replicas in options.replicas:
            cost = decide(replicas, options.slots, 4000)
            for policy in POLICIES:
                cluster = Cluster(policy, replicas, options.slots, options.feed)
                cluster.run(options.seconds)
                results.append(cluster.figures() | {"decision p50 us": cost.p50})
    if options.plot:
        plot(options.plot, results)


def summary(results: list[dict[str, Any]]) -> tuple[str, dict[str, Any]]:
    """Return the tables, and what is written."""
    compared = list(ratios(results))
    text = table_of(results) + ("\n" + table_of(compared) if compared else "")
    return text, {"results": results, "ratios": compared}


if __name__ == "__main__":
    main()
