"""A runner whose device is broken for good at some step, as by a fault of a kernel."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.runner import Pending

_STEP_S = 0.01  # of a dry run, as of a device: streams that take no time never run together


class BreakingRunner:
    """Does what another runner does, until its device is broken; see `Runner`."""

    def __init__(self, runner: Any, at: int, rows: int, broken: Path) -> None:
        """Break the device of `runner` behind the step number `at` that decodes `rows` rows.

        `broken` gets the time, of `perf_counter`.
        """
        self._runner = runner
        self._left = at
        self._rows = rows
        self._file = broken

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, plan: StepPlan) -> Pending:
        """Launch a step; what follows it on the device fails."""
        pending: Pending = self._runner.launch(plan)
        if plan.counts.decode_rows >= self._rows or self._left <= 0:
            self._left -= 1
        if self._left == 0:
            self._file.write_text(str(time.perf_counter()))
            break_device(self._runner.device)
        if self._runner.device.type == "cpu":  # which nothing breaks
            time.sleep(_STEP_S)
            if self._left <= 0:
                raise RuntimeError("the device is broken")
        return pending

    def prove_sound(self) -> None:
        """Compute a token, as the other runner does."""
        if self._left <= 0 and self._runner.device.type == "cpu":
            raise RuntimeError("the device is broken")
        self._runner.prove_sound()


def break_device(device: torch.device) -> None:
    """Have a kernel read beyond its memory; the error sticks to the process.

    Indices become numbers of 32 bits in that kernel: this one stays what it is.
    """
    if device.type == "cpu":
        return
    far = torch.full((1,), 1 << 30, dtype=torch.int64, device=device)
    torch.zeros(1, device=device).index_select(0, far)
