"""Decodes of rows with LoRA adapters beside the same step without, on a device."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.device.models import ADAPTER_RANK
from bench.device.roofline import Ceiling
from bench.device.steps import Bench, Plan
from bench.harness.adapters import write_adapter
from tgi_trio.ipc.adapters import AdapterOrder
from tgi_trio.shard.adapter_host import AdapterHost
from tgi_trio.shard.torch_backend.models.decoder import Decoder

_TURNS = 2


def measure_adapters(
    shape: str, device: torch.device, dtype: torch.dtype, plan: Plan, ceiling: Ceiling, most: int
) -> list[dict[str, Any]]:
    """Return rows of a table: no adapter, one, and `most` different ones, for each batch size.

    The steps come in turns and the fastest counts; `over_bare` is against those of none.
    """
    bench = Bench.start(shape, device, dtype, plan, adapters=most)
    model, host = bench.runner.model, bench.runner.adapters
    if host is None or not isinstance(model, Decoder):
        raise RuntimeError(f"{shape} was made without adapters")
    with tempfile.TemporaryDirectory() as place:
        took = _load(host, write_adapter(model.spec, Path(place) / "one", 0, ADAPTER_RANK), most)
    found = [{"what": f"load an adapter of rank {ADAPTER_RANK}", "step_ms": took * 1e3}]
    for rows in plan.batches:
        counts = sorted({0, 1, min(rows, most)})
        best: dict[int, dict[str, Any]] = {}
        for turn in range(_TURNS):
            for adapters in counts[:: -1 if turn else 1]:
                row = bench.decode(rows, ceiling, adapters=adapters)
                if adapters not in best or row["step_ms"] < best[adapters]["step_ms"]:
                    best[adapters] = row
        for adapters in counts:
            ratio = best[adapters]["step_ms"] / best[0]["step_ms"]
            found.append(best[adapters] | {"over_bare": ratio})
    return found


def _load(host: AdapterHost, folder: Path, most: int) -> float:
    """Load an adapter under numbers from 1 on; return the seconds of the fastest."""
    took = []
    for number in range(1, most + 1):
        began = time.perf_counter()
        host.install(number, host.load(AdapterOrder(number, folder)))
        took.append(time.perf_counter() - began)
    return min(took)
