"""What is measured on a device, part by part: each in a process of its own.

An error of a device sticks to its process, and a kernel that hangs is never done: either ends its
part and no other. Rows go to a file as they are found, a line of JSON each.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.device.choices import CHOICES
from bench.device.state_shapes import STATES
from bench.harness.server import mortal

Row = dict[str, Any]

TILED: Final = (*STATES, "tokens", "mixture")  # shapes of which alternatives are measured
LEAST_S: Final = 15.0  # a part that has less left is not begun: importing torch takes some of it
_DYING_S: Final = 10.0  # a process that waits for a driver may not end at all
_TOLD: Final = 300  # characters of why a part has failed


@dataclass(frozen=True, slots=True)
class Part:
    """What one process measures."""

    name: str
    kind: str  # "steps", "tiles", "adapters", "server", "break" or "peer"
    shape: str
    seconds: float  # that it may take
    rounded: str = "plain"  # what linear layers hold
    without: str = ""  # a choice of the warm-up's that is not made, see `choices.py`
    invariant: bool = False  # batch invariance is kept


def choose_parts(
    shapes: Sequence[str],
    weights: Sequence[str],
    *,
    adapters: bool,
    server: str,
    peers: Iterable[str],
) -> list[Part]:
    """Return the parts, the most valuable first: plain steps, the whole server, then all others.

    Of the first shape also steps where batch invariance is kept, for its price. Of the last shape
    also decodes of few rows without each of the warm-up's choices.

    `server`: the shape of the whole server's model; "": none.
    """
    plain = [Part(shape, "steps", shape, 120.0) for shape in shapes if "plain" in weights]
    found = list(plain)
    found += [
        Part(f"{shape} tiles", "tiles", shape, 60.0)
        for shape in shapes
        if shape.removeprefix("dry ") in TILED
    ]
    if server:
        found.append(Part(f"server {server}", "server", server, 150.0))
        found.append(Part(f"broken device {server}", "break", server, 120.0))
    rounded = [word for word in weights if word != "plain"]
    found += [
        Part(f"{shape} {word}", "steps", shape, 100.0, word) for word in rounded for shape in shapes
    ]
    if plain:
        name = f"{plain[0].shape} batch invariant"
        found.append(Part(name, "steps", plain[0].shape, 90.0, invariant=True))
    if adapters and shapes:
        found.append(Part(f"{shapes[-1]} adapters", "adapters", shapes[-1], 90.0))
    for choice in CHOICES if plain else ():
        name = f"{plain[-1].shape} without {choice}"
        found.append(Part(name, "steps", plain[-1].shape, 60.0, without=choice))
    found += [Part(name, "peer", "L", 240.0) for name in peers]
    return found


def run_parts(
    parts: Sequence[Part],
    command: Callable[[Part], Sequence[str]],
    rows: Path,
    seconds: float,
    tell: Callable[[list[Row]], None],
    *,
    least: float = LEAST_S,
) -> None:
    """Run every part by its `command`, which appends to `rows`, within `seconds` for all.

    `tell` is given all rows after each part, those among them that say why a part has none. A part
    that has less than `least` seconds left is not begun.
    """
    end = time.monotonic() + seconds
    for part in parts:
        limit = min(part.seconds, end - time.monotonic())
        why = "not begun, the time was up" if limit < least else _run(command(part), limit)
        if why:
            append_row(rows, {"shape": part.name, "what": part.kind, "why": why})
        tell(read_rows(rows))


def append_row(rows: Path, row: Row) -> None:
    """Add a row to a file of them, on a line of its own though another was cut off."""
    with rows.open("ab+") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(row).encode() + b"\n")


def read_rows(rows: Path) -> list[Row]:
    """Return what has been found by now; a line that was cut off is left out."""
    found = []
    for line in rows.read_text().splitlines() if rows.exists() else ():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            print(f"{rows}: not a whole row: {line[:80]}", file=sys.stderr)
    return found


def _run(argv: Sequence[str], seconds: float) -> str:
    """Run a command; return why it has not done all that it should, empty where it has."""
    process = subprocess.Popen(
        argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, preexec_fn=mortal()
    )
    try:
        _, told = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        try:
            process.communicate(timeout=_DYING_S)
        except subprocess.TimeoutExpired:
            return f"not done within {seconds:.0f} s, and does not die"
        return f"not done within {seconds:.0f} s"
    print(told, file=sys.stderr, end="", flush=True)
    if process.returncode == 0:
        return ""
    lines = told.strip().splitlines() or ["nothing was said"]
    return f"exit {process.returncode}: {lines[-1][-_TOLD:]}"
