"""What `bench.model` measures, and who is measured."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Case:
    """A decode step of rows with these contexts, or the prefill of the first of them."""

    name: str
    contexts: list[int]
    prefill: bool = False
    steps: int = 12  # decode steps in one reading
    peers: bool = True  # False: of interest for our kernels alone
    processor: bool = False  # measured in processor time, of all threads


def clock_of(case: Case) -> Callable[[], float]:
    """Return what the seconds of a case are read from."""
    return time.process_time if case.processor else time.perf_counter


CASES = {
    "decode 1": Case("decode 1", [160]),
    **{f"decode {rows}": Case(f"decode {rows}", [160] * rows) for rows in (2, 4, 8, 16)},
    **{f"decode {rows}": Case(f"decode {rows}", [160] * rows, steps=6) for rows in (32, 64)},
    "uniform 32": Case("uniform 32", [525] * 32, steps=6, peers=False),
    # From 50 to 1000, of the same total.
    "mixed 32": Case("mixed 32", [50 + i * 950 // 31 for i in range(32)], steps=6, peers=False),
    "prefill 512": Case("prefill 512", [512], prefill=True),
    "prefill 2048": Case("prefill 2048", [2048], prefill=True),
}
USUAL = "decode 1", "decode 8", "decode 32", "uniform 32", "mixed 32", "prefill 512"


class Contender(Protocol):
    """Somebody who can be measured."""

    name: str

    def measure(self, case: Case) -> float:
        """Return milliseconds."""
        ...

    def close(self) -> None: ...


class Worker:
    """A process that measures on request, `bench.model.worker` or one that speaks as it does."""

    def __init__(
        self, name: str, command: Sequence[str | Path], settings: Mapping[str, str] | None = None
    ) -> None:
        """`settings` are added to the environment. Raises RuntimeError when it does not start."""
        self.name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **(settings or {})},
        )
        if self._line() != "ready":
            raise RuntimeError(f"the worker of {name} did not start")

    def measure(self, case: Case) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(case)) + "\n")
        self._process.stdin.flush()
        return float(self._line())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"the worker of {self.name} ended")
        return line
