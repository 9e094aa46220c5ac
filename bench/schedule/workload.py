"""Requests of the usual profiles, and whether they were served well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Job:
    """One request: seconds, token ids, and how long it turns out to be."""

    id: int
    arrival: float
    prompt: NDArray[np.int32]
    max_new: int
    outputs: list[int]  # tokens it generates; at most max_new
    leaves_after: float | None = None  # seconds until its client gives up


@dataclass(eq=False)
class Served:
    """When its tokens came."""

    job: Job
    times: list[float] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return len(self.times) == len(self.job.outputs)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.job.arrival

    @property
    def gaps(self) -> list[float]:
        return np.diff(self.times).tolist() if len(self.times) > 1 else []


@dataclass(frozen=True)
class Profile:
    """A load: `make(rng, rate, seconds)` gives its jobs; limits decide what counts as good."""

    name: str
    rates: tuple[float, ...]  # requests per second
    ttft_s: float
    itl_s: float  # 99th percentile of one request's gaps
    make: Callable[[np.random.Generator, float, float], list[Job]]


def _arrivals(rng: np.random.Generator, rate: float, seconds: float) -> list[float]:
    gaps = rng.exponential(1 / rate, int(rate * seconds * 1.5) + 10)
    times: NDArray[np.float64] = np.cumsum(gaps)
    return [float(time) for time in times if time < seconds]


def _ids(rng: np.random.Generator, count: int) -> NDArray[np.int32]:
    return rng.integers(0, 100_000, count, dtype=np.int32)


def _uniform(
    low_in: int, high_in: int, low_out: int, high_out: int, max_new: int
) -> Callable[[np.random.Generator, float, float], list[Job]]:
    def make(rng: np.random.Generator, rate: float, seconds: float) -> list[Job]:
        return [
            Job(
                i,
                at,
                _ids(rng, int(rng.integers(low_in, high_in + 1))),
                max_new,
                _ids(rng, int(rng.integers(low_out, high_out + 1))).tolist(),
            )
            for i, at in enumerate(_arrivals(rng, rate, seconds))
        ]

    return make


def _chat(rng: np.random.Generator, rate: float, seconds: float) -> list[Job]:
    """Conversations of several turns; every turn repeats what was said before."""
    turns = 4
    jobs: list[Job] = []
    system = _ids(rng, 200)
    for start in _arrivals(rng, rate / turns, seconds):
        history, at = system, start
        for _ in range(int(rng.integers(1, 2 * turns))):
            history = np.concatenate([history, _ids(rng, int(rng.integers(20, 200)))])
            outputs = _ids(rng, int(min(800, 1 + rng.lognormal(5.0, 0.8))))
            jobs.append(Job(0, at, history, 800, outputs.tolist()))
            history = np.concatenate([history, outputs])
            at += 15 + float(rng.exponential(10))
    return _numbered(jobs)


def _repetition(rng: np.random.Generator, rate: float, seconds: float) -> list[Job]:
    """Eight long instructions, each asked again and again; sometimes four answers at once."""
    prefixes = [_ids(rng, 3000) for _ in range(8)]
    jobs: list[Job] = []
    for at in _arrivals(rng, rate / 1.75, seconds):
        prompt = np.concatenate([prefixes[int(rng.integers(8))], _ids(rng, 50)])
        for _ in range(4 if rng.random() < 0.25 else 1):
            jobs.append(Job(0, at, prompt, 256, _ids(rng, int(rng.integers(20, 200))).tolist()))
    return _numbered(jobs)


def _mixed(rng: np.random.Generator, rate: float, seconds: float) -> list[Job]:
    """64 chats at once all the time, and now and then a prompt of 100,000 tokens."""
    jobs = [
        Job(0, float(rng.random()) * 20, _ids(rng, 300), 800, _ids(rng, 600).tolist())
        for _ in range(64 * int(seconds / 20))
    ]
    for i, job in enumerate(jobs):
        jobs[i] = Job(0, job.arrival + 20 * (i // 64), job.prompt, 800, job.outputs)
    for at in _arrivals(rng, rate, seconds):
        jobs.append(Job(0, at, _ids(rng, 100_000), 100, _ids(rng, 50).tolist()))
    return _numbered(jobs)


def _cancel(rng: np.random.Generator, rate: float, seconds: float) -> list[Job]:
    """Half of the clients leave half a second after their request."""
    plain = _uniform(500, 3000, 50, 800, 800)(rng, rate, seconds)
    return [
        Job(j.id, j.arrival, j.prompt, j.max_new, j.outputs, 0.5 if rng.random() < 0.5 else None)
        for j in plain
    ]


def _numbered(jobs: list[Job]) -> list[Job]:
    jobs.sort(key=lambda job: job.arrival)
    return [
        Job(i, j.arrival, j.prompt, j.max_new, j.outputs, j.leaves_after)
        for i, j in enumerate(jobs)
    ]


PROFILES = (
    Profile("fixed-length", (15, 25, 35), 0.5, 0.05, _uniform(200, 200, 50, 800, 800)),
    Profile("chat", (20, 40, 60), 0.5, 0.05, _chat),
    Profile("code-generation", (3, 5, 7), 1.0, 0.10, _uniform(3000, 6000, 30, 80, 256)),
    Profile("classification", (1, 2, 3), 2.0, 0.20, _uniform(8000, 12000, 30, 80, 256)),
    Profile("prefix-repetition", (8, 16, 32), 1.0, 0.05, _repetition),
    Profile("mixed", (0.05, 0.1), 1.0, 0.05, _mixed),
    Profile("cancel", (8, 16, 24), 1.0, 0.10, _cancel),
)
