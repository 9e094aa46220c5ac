"""What the machine can do at all: two C processes and one token."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from bench.ipc.sampling import IDLE_S, Budget, Case, Placement, Row, summarise

SOURCE = Path(__file__).with_name("floor.c")


class NoCompiler(Exception):
    """There is no C compiler on this machine."""


def measure(place: Placement, budget: Budget) -> list[Row]:
    """Compile and run the floor; raises NoCompiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise NoCompiler("no C compiler: the floor is left out")
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "floor")
        subprocess.run([compiler, "-O2", "-o", program, str(SOURCE)], check=True)

        def run(kind: str, mode: str, samples: int) -> Row:
            idle = round(IDLE_S * 1e6) if mode == "idle" else 0
            command = [program, kind, str(samples), str(idle), str(place.router), str(place.peer)]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            return summarise(
                f"C {kind}", Case(mode, 8, place.pinned), [int(x) for x in text.split()]
            )

        return [
            run("spin", "hot", 10 * budget.hot_samples),
            run("eventfd", "hot", budget.hot_samples),
            run("eventfd", "idle", budget.slow_samples),
        ]
