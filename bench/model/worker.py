"""A process that holds one model and measures on request.

    python -m bench.model.worker KIND FOLDER [THREADS [ADAPTER ...]]

KIND is kernels or torch (our runners), int8 (kernels with 8-bit weights), avx2 (kernels, compiled
as for a processor without AVX512), without-amx (for one without a matrix unit), transformers, or
peft-float32 and peft-bfloat16. With folders of LoRA adapters the rows of a step have them in turns.
A line of JSON comes in per measurement, the fields of a `Case`, and a line with its milliseconds
goes out. One process per contender keeps their threads apart: a pool that spins would take the
cores of the next.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from bench.model.cases import Case, clock_of


def ours(
    folder: Path,
    backend: str,
    quantize: str | None,
    threads: int,
    adapters: Sequence[Path] = (),
) -> Callable[[Case], float]:
    """Return what measures one of our runners; `threads` 0: as many as a server would take."""
    from bench.model.bare import BareModel

    model = BareModel(folder, backend, quantize, threads, adapters=adapters)

    def measure(case: Case) -> float:
        if case.prefill:
            return model.prefill_ms(case.contexts[0], clock=clock_of(case))
        return model.decode_ms(case.contexts, case.steps, clock_of(case))

    return measure


def transformers(
    folder: Path, dtype: str = "bfloat16", adapters: Sequence[Path] = ()
) -> Callable[[Case], float]:
    """Return what measures `generate` of transformers, of PEFT where there are adapters."""
    import torch
    from transformers import AutoModelForCausalLM, StoppingCriteriaList

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    names = [f"adapter{i}" for i in range(len(adapters))]
    if adapters:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapters[0]), adapter_name=names[0]).eval()
        for name, path in list(zip(names, adapters, strict=True))[1:]:
            model.load_adapter(str(path), adapter_name=name)
        model.to(getattr(torch, dtype))  # A and B are read as float32

    def times(
        rows: int, context: int, new: int, clock: Callable[[], float] = time.perf_counter
    ) -> list[float]:
        """Return the seconds of the prefill and of every decode step after it."""
        ids = torch.randint(3, 1000, (rows, context))
        own = {"adapter_names": [names[i % len(names)] for i in range(rows)]} if names else {}
        ends = [clock()]

        def note(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            ends.append(clock())
            return torch.zeros(len(ids), dtype=torch.bool)

        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([note]),
            **own,
        )
        return [end - start for start, end in pairwise(ends)]

    def measure(case: Case) -> float:
        rows, context = len(case.contexts), max(case.contexts)
        prefill, *steps = times(
            rows, context, 1 if case.prefill else 1 + case.steps, clock_of(case)
        )
        return (prefill if case.prefill else statistics.median(steps)) * 1e3

    return measure


def without_avx512() -> None:
    """Have everything compiled for Intel's Haswell."""
    os.environ["KERNEL_CPU_NAME"] = "haswell"
    os.environ["KERNEL_CPU_FEATURES"] = "+avx2,+fma,+bmi,+bmi2,+lzcnt,+popcnt"


def without_amx() -> None:
    """Have the kernels compiled for this processor without its matrix unit."""
    features = llvm.get_host_cpu_features()
    there = [f"+{name}" for name, has in features.items() if has and not name.startswith("amx")]
    os.environ["KERNEL_CPU_FEATURES"] = ",".join(there)


def main(kind: str, folder: Path, threads: int = 0, adapters: Sequence[Path] = ()) -> None:
    if kind == "avx2":
        without_avx512()
        kind = "kernels"
    elif kind == "without-amx":
        without_amx()
        kind = "kernels"
    if kind in ("transformers", "peft-float32", "peft-bfloat16"):
        measure = transformers(folder, kind.partition("-")[2] or "bfloat16", adapters)
    elif kind == "int8":
        measure = ours(folder, "kernels", "eetq", threads, adapters)
    else:
        measure = ours(folder, kind, None, threads, adapters)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(Case(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main(
        sys.argv[1],
        Path(sys.argv[2]),
        int(sys.argv[3]) if len(sys.argv) > 3 else 0,
        [Path(each) for each in sys.argv[4:]],
    )
