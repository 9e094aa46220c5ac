"""A process that holds one model and measures on request.

    python -m bench.model.worker KIND FOLDER [THREADS]

KIND is numba or torch (our runners), int8 (numba's with 8-bit weights), avx2 (numba's, compiled as
for a processor without AVX512) or transformers. A line of JSON comes in per measurement, the
fields of a `Case`, and a line with its milliseconds goes out. One process per contender keeps their
threads apart: a pool that spins would take the cores of the next.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.model.cases import Case


def ours(folder: Path, backend: str, quantize: str | None, threads: int) -> Callable[[Case], float]:
    """Return what measures one of our runners; `threads` 0: as many as a server would take."""
    from bench.model.bare import BareModel

    model = BareModel(folder, backend, quantize, threads)

    def measure(case: Case) -> float:
        if case.prefill:
            return model.prefill_ms(case.contexts[0])
        return model.decode_ms(case.contexts, case.steps)

    return measure


def transformers(folder: Path) -> Callable[[Case], float]:
    """Return what measures `generate` of transformers."""
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteriaList

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def times(rows: int, context: int, new: int) -> list[float]:
        """Return the seconds of the prefill and of every decode step after it."""
        ids = torch.randint(3, 1000, (rows, context))
        ends = [time.perf_counter()]

        def note(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            ends.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([note]),
        )
        return [end - start for start, end in pairwise(ends)]

    def measure(case: Case) -> float:
        rows, context = len(case.contexts), max(case.contexts)
        prefill, *steps = times(rows, context, 1 if case.prefill else 1 + case.steps)
        return (prefill if case.prefill else statistics.median(steps)) * 1e3

    return measure


def without_avx512() -> None:
    """Have everything compiled for Intel's Haswell; before any kernel is imported."""
    from numba import config

    told: Any = config  # its settings carry no types
    told.CPU_NAME, told.CPU_FEATURES = "haswell", "+avx2,+fma,+bmi,+bmi2,+lzcnt,+popcnt"


def main(kind: str, folder: Path, threads: int = 0) -> None:
    if kind == "avx2":
        without_avx512()
        kind = "numba"
    if kind == "transformers":
        measure = transformers(folder)
    elif kind == "int8":
        measure = ours(folder, "numba", "eetq", threads)
    else:
        measure = ours(folder, kind, None, threads)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(Case(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
