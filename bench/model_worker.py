"""A process that holds one model and measures on request.

    python -m bench.model_worker KIND FOLDER

KIND is numba or torch (our runners), avx2 (numba's, compiled as for a processor without AVX512) or
transformers. A line of JSON comes in per measurement, the
fields of a `Case`, and a line with its milliseconds goes out. One process per contender keeps their
threads apart: a pool that spins would take the cores of the next.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench.model_cases import Case


def ours(folder: Path, backend: str) -> Callable[[Case], float]:
    """Return what measures one of our runners."""
    from bench.bare import BareModel

    model = BareModel(folder, backend)

    def measure(case: Case) -> float:
        if case.prefill:
            return model.prefill_ms(case.contexts[0])
        return model.decode_ms(case.contexts, case.steps)

    return measure


def transformers(folder: Path) -> Callable[[Case], float]:
    """Return what measures `generate` of transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

    def seconds(rows: int, context: int, new: int) -> float:
        ids = torch.randint(3, 1000, (rows, context))
        start = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
        )
        return time.perf_counter() - start

    def measure(case: Case) -> float:
        rows, context = len(case.contexts), max(case.contexts)
        if case.prefill:
            return seconds(1, context, 1) * 1e3
        first = seconds(rows, context, 1)
        return (seconds(rows, context, 1 + case.steps) - first) / case.steps * 1e3

    return measure


def without_avx512() -> None:
    """Have everything compiled for Intel's Haswell; before any kernel is imported."""
    from numba import config

    config.CPU_NAME, config.CPU_FEATURES = "haswell", "+avx2,+fma,+bmi,+bmi2,+lzcnt,+popcnt"


def main(kind: str, folder: Path) -> None:
    if kind == "avx2":
        without_avx512()
        kind = "numba"
    measure = transformers(folder) if kind == "transformers" else ours(folder, kind)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(Case(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
