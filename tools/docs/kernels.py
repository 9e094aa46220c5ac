"""What kernels take, compiled for devices that need not be here, for `docs/device/kernels.md`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from tools.docs.markdown import Sections, table

TABLE: Final = Path(__file__).parents[2] / "bench/results/compiled-kernels.json"


def render() -> str:
    """Return how many variants there are, and the most that any takes, by compute capability."""
    entries = [json.loads(line) for line in TABLE.read_text().splitlines()]
    rows = []
    for target in sorted({entry["target"] for entry in entries}):
        own = [entry for entry in entries if entry["target"] == target]
        spilling = [entry["spilled"] for entry in own if entry["spilled"]]
        spilled = f"{len(spilling)} (up to {max(spilling)} bytes)" if spilling else "none"
        shared = max(entry["shared"] for entry in own) / 1024
        rows.append((f"{target / 10}", str(len(own)), spilled, f"{shared:.0f} KB"))
    heads = "compute capability", "variants", "of which spill", "shared memory at most"
    return table(heads, rows)


SECTIONS: Final[Sections] = {"compiled-kernels": render}
