"""When the phases of a start-up ended."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path


def process_start() -> float:
    """Return when this process began, on the monotonic clock; right to a hundredth of a second.

    Where /proc is not mounted, it is now; a server's start is refused there, in words.
    """
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return time.monotonic()
    began = ticks / os.sysconf("SC_CLK_TCK")  # since the machine did
    return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - began)


@dataclass
class Timeline:
    """When the phases of the start-up ended, in seconds since `origin` (monotonic clock)."""

    origin: float = field(default_factory=process_start)
    phases: list[tuple[str, float]] = field(default_factory=list)

    def mark(self, phase: str) -> None:
        self.phases.append((phase, time.monotonic() - self.origin))

    def __str__(self) -> str:
        return ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in self.phases)
