"""The team's threads: they meet, sleep when idle, wake up, end; no compiler is needed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.shard.cpu_backend.kernel_support import FITTING, cpu_runner
from tests.shard.torch_backend.models_support import advance, sequence
from tgi_trio.shard.cpu_backend.team import barrier_spins

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def affinity() -> Iterator[None]:
    """Whatever a team pins is free again when it has ended."""
    before = os.sched_getaffinity(0)
    yield
    after = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before)
    assert after == before


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("cpu-")]


def state_of(thread: threading.Thread) -> str:
    """The kernel's letter: R runs, S sleeps."""
    stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    return stat.rpartition(")")[2].split()[0]


def processor_ticks(thread: threading.Thread) -> int:
    stat = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
    return sum(int(word) for word in stat.rpartition(")")[2].split()[11:13])


def test_an_idle_worker_sleeps_and_wakes_up_to_the_same_tokens(
    checkpoint: Callable[..., Path],
) -> None:
    folder = checkpoint("llama", **FITTING["llama"])
    with cpu_runner(folder, cores=(sorted(os.sched_getaffinity(0)) * 2)[:2]) as (runner, recorder):
        (worker,) = workers()
        seen = []
        for _ in range(3):
            row = sequence(0, [5, 6, 7], [1, 2], new=4)
            for count in (3, 1, 1, 1):
                advance(runner, [row], [count])
            seen.append(row.token_ids[:7].tolist())
            deadline = time.monotonic() + 60
            while state_of(worker) != "S" and time.monotonic() < deadline:
                time.sleep(0.01)
            before = processor_ticks(worker)
            time.sleep(0.3)
            assert state_of(worker) == "S" and processor_ticks(worker) == before
        assert seen[0] == seen[1] == seen[2]
        recorder.by_place.clear()
    assert not workers()


@pytest.mark.parametrize(("policy", "steps"), [("PASSIVE", 200), ("ACTIVE", 40)])
def test_threads_that_are_interrupted_at_any_place_give_the_same_logits(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, policy: str, steps: int
) -> None:
    """Four threads on two cores, many steps: no stuck barrier, no lost work."""
    monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    folder = checkpoint("llama", **FITTING["llama"])

    def logits(threads: int) -> list[np.ndarray]:
        cores = sorted(os.sched_getaffinity(0))
        with cpu_runner(folder, cores=[cores[i % len(cores)] for i in range(threads)]) as pair:
            row = sequence(0, list(range(3, 40)), range(1, 20), new=200)
            advance(pair[0], [row], [37])
            for _ in range(steps - 1):
                advance(pair[0], [row], [1])
            return list(pair[1].logits(0).numpy())

    for one, several in zip(logits(1), logits(4), strict=True):
        np.testing.assert_array_equal(one, several)


def test_threads_that_are_to_be_passive_leave_a_shared_core_to_each_other(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads on one core: at each barrier one waits in vain until the other has the core."""
    folder = checkpoint("llama", **FITTING["llama"])
    core = min(os.sched_getaffinity(0))
    spent = dict[str, float]()  # seconds of a processor, however busy the machine is
    for policy in ("ACTIVE", "PASSIVE"):
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
        with cpu_runner(folder, cores=(core, core)) as (runner, _):
            row = sequence(0, [5, 6, 7], [1, 2], new=20)
            advance(runner, [row], [3])
            before = time.process_time()
            for _ in range(19):
                advance(runner, [row], [1])
            spent[policy] = time.process_time() - before
    assert spent["PASSIVE"] < spent["ACTIVE"] / 2


@pytest.mark.parametrize("word", ["PASSIVE", "passive", " Passive "])
def test_openmps_variable_has_threads_yield_their_core_soon(word: str) -> None:
    usual = barrier_spins({})
    assert 0 < barrier_spins({"OMP_WAIT_POLICY": word}) < usual / 10
    assert barrier_spins({"OMP_WAIT_POLICY": "ACTIVE"}) == usual
