"""A runner that notes when each of its steps was launched and read, and what its device did."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tgi_trio.shard.contract import StepPlan, StepResult
from tgi_trio.shard.runner import Pending


class Step(NamedTuple):
    """What is noted of a step; times in nanoseconds of `perf_counter`, one clock for all."""

    rows: int
    prefill_tokens: int
    launched: int  # its launch begins
    waiting: int  # its launch has ended
    asked: int  # its tokens are asked for
    read: int  # and are there
    forward: int  # that the device says it took
    idle: int  # that the device had nothing to do before it; -1: nobody knows
    processor: int  # of all threads until now
    own: int  # of the thread that steps


class TimedRunner:
    """Does what another runner does, and notes it; see `Runner`."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.steps: list[Step] = []
        self.warm_up_s: dict[str, float] = {}
        self.done: Any = None  # the event of the step that was read last

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def warm_up(self, request: Any) -> Any:
        """Warm up; note how long its parts take."""
        from bench.device.warm_up import timed_warm_up

        with timed_warm_up() as self.warm_up_s:
            return self._runner.warm_up(request)

    def launch(self, plan: StepPlan) -> Pending:
        """Launch a step."""
        began = time.perf_counter_ns()
        return _Timed(self, plan, self._runner.launch(plan), began)

    def write(self, path: Path) -> None:
        """Write what has been noted."""
        told = {"warm_up": self.warm_up_s, "fields": Step._fields, "steps": self.steps}
        path.write_text(json.dumps(told))


class _Timed:
    """See `Pending`."""

    def __init__(self, runner: TimedRunner, plan: StepPlan, pending: Any, began: int) -> None:
        self._runner, self._plan, self._pending = runner, plan, pending
        self._began, self._launched = began, time.perf_counter_ns()

    def proceed(self) -> None:
        self._pending.proceed()

    def result(self) -> StepResult:
        asked = time.perf_counter_ns()
        found: StepResult = self._pending.result()
        read, before, idle = time.perf_counter_ns(), self._runner.done, -1
        began = getattr(self._pending, "began", None)
        self._runner.done = getattr(self._pending, "done", None)
        if before is not None and began is not None:
            idle = int(before.elapsed_time(began) * 1e6)
        counts = self._plan.counts
        self._runner.steps.append(
            Step(
                *(len(self._plan.rows), counts.prefill_tokens, self._began, self._launched),
                *(asked, read, found.forward_ns, idle),
                *(time.process_time_ns(), time.thread_time_ns()),
            )
        )
        return found


Table = NDArray[np.int64]  # [steps, fields of `Step`]
_FIELDS: Final = {name: place for place, name in enumerate(Step._fields)}


def read_steps(path: Path) -> tuple[Table, dict[str, float]]:
    """Return what a `TimedRunner` has written: its steps, and the seconds of its warm-up."""
    told = json.loads(path.read_text())
    return np.array(told["steps"], np.int64).reshape(-1, len(_FIELDS)), told["warm_up"]


def describe(table: Table, began: float, ended: float, rows: int) -> dict[str, Any]:
    """Return medians of the steps in a time (seconds of `perf_counter`) that decode `rows` rows
    and nothing else, each behind another such, and which part of all steps in it had a prompt.

    "idle_us": of the device, between two; "turn_us": from tokens that are read to the launch of the
    step after the next; "ahead": which part was launched before the one before was read; shares of
    a processor that all threads took, and the one that steps.
    """
    column = {name: table[:, place] for name, place in _FIELDS.items()}
    inside = (column["read"] >= began * 1e9) & (column["launched"] <= ended * 1e9)
    steady = inside & (column["rows"] == rows) & (column["prefill_tokens"] == 0)
    here = np.flatnonzero(steady[2:] & steady[1:-1] & steady[:-2]) + 2
    found: dict[str, Any] = {
        "steps": int(inside.sum()),
        "with_prompts": float((column["prefill_tokens"][inside] > 0).mean()) if inside.any() else 0,
        "steady_steps": len(here),
    }
    if not len(here):
        return found
    took = column["read"][here] - column["read"][here - 1]
    parts = {
        "period_ms": took / 1e6,
        "forward_ms": column["forward"][here] / 1e6,
        "idle_us": column["idle"][here] / 1e3,
        "launch_us": (column["waiting"] - column["launched"])[here] / 1e3,
        "waited_us": (column["read"] - column["asked"])[here] / 1e3,
        "turn_us": (column["launched"][here] - column["read"][here - 2]) / 1e3,
    }
    found["ahead"] = float((column["launched"][here] < column["read"][here - 1]).mean())
    found |= {name: float(np.median(values)) for name, values in parts.items()}
    found["period_p99_ms"] = float(np.percentile(took, 99)) / 1e6
    for name in ("processor", "own"):
        spent = column[name][here] - column[name][here - 1]
        found[f"{name}_share"] = float(spent.sum() / took.sum())
    return found
