"""Copies of KV blocks to the host's memory and back, on a device.

    python -m bench.device.host_copies --json bench/out/host-copies.json

What `--prefix-cache-host-bytes` does between two steps, for the KV cache of a model of 8B (32
layers of 8 heads of 128, bfloat16): bytes a second out and back, with neighbouring places and with
scattered ones; the host's time to launch 256 blocks; and what a step's kernels take while copies
run beside them. The floor is one copy of as many bytes of pinned memory, in the same run.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from tqdm import tqdm

from bench.harness import stats
from tgi_trio.ipc.transfers import Transfer
from tgi_trio.shard.machine.accelerator import current_device, current_kind, synchronize
from tgi_trio.shard.torch_backend.host_copies import Planes, TorchHostCopies
from tgi_trio.shard.torch_backend.kv_cache import KVCache, KVShape

_SHAPE: Final = KVShape(32, 8, 128)
_SMALL: Final = KVShape(2, 2, 8)
_AT_ONCE: Final = 256  # blocks, as `loop/transfers.py` launches them
_ROWS: Final = 12  # of the table
_SIDE: Final = 4096  # of the matrices that stand for a step


def seconds_of(device: torch.device, repeats: int, run: Callable[[], object]) -> float:
    """Return the median of the seconds from the first launch of `run` to the end of its work."""
    found = []
    for _ in range(1 + repeats):
        synchronize(device)
        began = time.perf_counter()
        run()
        synchronize(device)
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


@torch.inference_mode()
def measure(
    device: torch.device, rows: list[dict[str, Any]], bar: tqdm[Any], *, small: bool, repeats: int
) -> None:
    """Append a row for everything that is measured, as it is."""
    blocks = 16 if small else _AT_ONCE
    cache = KVCache(_SMALL if small else _SHAPE, 1 + 2 * blocks, torch.bfloat16, device)
    block = sum(plane.nbytes for plane in cache.planes) // cache.blocks
    copies = TorchHostCopies(Planes(cache.planes, ()), 4 * blocks * block, device)
    size = blocks * block
    host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type != "cpu")
    there = torch.empty(size, dtype=torch.uint8, device=device)

    def note(name: str, seconds: float, nbytes: int = size) -> None:
        rows.append({"what": name, "ms": 1e3 * seconds, "GB/s": nbytes / 1e9 / seconds})
        bar.update()

    timed = partial(seconds_of, device, repeats)
    note("one copy of pinned memory, out", timed(lambda: host.copy_(there, non_blocking=True)))
    note("one copy of pinned memory, back", timed(lambda: there.copy_(host, non_blocking=True)))
    numbers = list(range(1, 1 + blocks))
    shuffled = random.Random(0).sample(numbers, blocks)
    for name, places in (("neighbours", numbers), ("scattered", shuffled)):
        for way in (False, True):
            ordered = [Transfer(n, p, way) for n, p in zip(numbers, places, strict=True)]
            word = "back" if way else "out"
            note(f"{blocks} blocks, {name}, {word}", timed(partial(copies.launch, ordered)))
            took = []
            for _ in range(repeats):
                synchronize(device)
                began = time.perf_counter()
                copies.launch(ordered)
                took.append(time.perf_counter() - began)
            note(f"launching them, {name}, {word}", statistics.median(took))
    side = 64 if small else _SIDE
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))

    def step() -> None:
        for _ in range(20):
            left @ right

    alone = timed(step)
    ordered = [Transfer(n, n, False) for n in numbers]
    note("20 products, alone", alone, 0)

    def beside() -> None:
        copies.launch(ordered)
        stream = None if device.type == "cpu" else torch.accelerator.current_stream(device)
        step()
        if stream is not None:
            stream.synchronize()  # the step's end; the copies may go on

    took = []
    for _ in range(1 + repeats):
        synchronize(device)
        began = time.perf_counter()
        beside()
        took.append(time.perf_counter() - began)
    note("20 products, copies beside them", statistics.median(took[1:]), 0)


def main() -> None:
    """Parse flags, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry-run", action="store_true", help="small, and on a CPU if need be")
    parser.add_argument("--repeats", type=int, default=10)
    stats.add_output_flags(parser)
    args: Any = parser.parse_args()
    kind = current_kind()
    if not kind and not args.dry_run:
        raise SystemExit("torch sees no device; --dry-run goes without")
    device = current_device(kind) if kind else torch.device("cpu")
    rows: list[dict[str, Any]] = []
    path: Path | None = args.json
    with (
        stats.reporting(
            path, "device.host_copies", lambda: (stats.table_of(rows), {"results": rows})
        ),
        tqdm(total=_ROWS, desc="copies") as bar,
    ):
        measure(device, rows, bar, small=args.dry_run, repeats=args.repeats)


if __name__ == "__main__":
    main()
