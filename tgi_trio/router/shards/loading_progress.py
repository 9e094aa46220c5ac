"""Shows how much of the weights the shards have read, as a progress bar or as log lines.

The kernel knows: shards map the checkpoint's files, and /proc/PID/smaps tells how much of each
mapping is resident. (The CPU kernels' loader unmaps a file while it packs it; the packed weights
are in mappings that ask for huge pages.) So no backend has to report progress, and the bar of a
shard that hangs stands still.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final, TextIO

import trio

from tgi_trio.errors import Unavailable
from tgi_trio.process.threads import run_in_thread

log = logging.getLogger(__name__)

_PATIENCE: Final = 1.0  # seconds; a shorter load needs no bar
_PERIOD: Final = 0.2  # seconds between two updates of the bar
_LINE_PERIOD: Final = 10.0  # seconds between two log lines, without a terminal
_SUFFIXES: Final = (".safetensors", ".gguf")


def checkpoint_bytes(folder: Path) -> int:
    """Return the size of a model's weights on disk, in bytes."""
    return sum(path.stat().st_size for suffix in _SUFFIXES for path in folder.glob(f"*{suffix}"))


def count_touched_bytes(pid: int) -> int:
    """Return how many bytes of weights a process has read; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps").read_text().splitlines()
    except OSError:
        return 0
    mapped = packed = resident = 0
    is_file = False
    for line in lines:
        name, *rest = line.split(maxsplit=1)
        if not name.endswith(":"):  # the head of a mapping: addresses, rights, ..., path
            is_file = line.endswith(_SUFFIXES)
        elif name == "Rss:":
            resident = int(rest[0].split()[0]) * 1024
            mapped += resident if is_file else 0
        elif name == "VmFlags:" and "hg" in rest[0].split():  # the last line of a mapping
            packed += resident
    return max(mapped, packed)


async def show_loading(
    pids: Callable[[], Sequence[int]],
    folder: Path,
    output: TextIO = sys.stderr,
    *,
    bar_allowed: bool = True,
) -> None:
    """Show the progress of `pids()` (one per rank) until cancelled; silent for quick loads.

    A terminal gets a bar, unless `bar_allowed` is false; everything else gets log records.
    """
    total = checkpoint_bytes(folder)
    await trio.sleep(_PATIENCE)
    if total == 0:
        return
    with suppress(Unavailable):  # without a thread to count in, nothing is shown
        await _show(pids, total, output, bar_allowed=bar_allowed)


async def _show(
    pids: Callable[[], Sequence[int]], total: int, output: TextIO, *, bar_allowed: bool
) -> None:
    from tqdm import tqdm  # few starts come this far

    async def touched() -> int:
        # Ranks read different parts of the same files. Reading a large smaps takes milliseconds.
        found = [await run_in_thread(partial(count_touched_bytes, pid)) for pid in pids()]
        return min(total, sum(found))

    if not (bar_allowed and output.isatty()):
        while True:
            await trio.sleep(_LINE_PERIOD)
            log.info("loading weights: %.0f of %.0f MB", await touched() / 1e6, total / 1e6)
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="loading weights", file=output, leave=False
    ) as bar:
        while True:
            bar.n = await touched()
            bar.refresh()
            await trio.sleep(_PERIOD)
