"""A decode step of rows with LoRA adapters, beside the same step without, in the CPU kernels.

    python -m bench.model.adapters --shape S --json out.json

Adapters of rank 16 on all linears. Steps of every kind come in turns, and what is shown are ratios
of medians, so that other load on the machine falls on all alike.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from safetensors.numpy import save_file

from bench.harness import stats
from bench.model.subjects import shape_subject
from tgi_trio.ipc.adapters import AdapterOrder
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.adapters.sites import adaptable_linears
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.spec import DecoderSpec
from tgi_trio.shard.contract import BLOCK_SIZE
from tgi_trio.shard.numba_backend.forward import Forward, Tokens
from tgi_trio.shard.numba_backend.loading import load

_RANK: Final = 16
_CONTEXT: Final = 160
# rows, different adapters, and by how much a step may be longer with AVX-512
_CASES: Final = ((8, 0, 1.01), (8, 1, 1.10), (8, 8, 1.30), (32, 0, 1.01), (32, 8, 1.12))


def write_adapter(spec: DecoderSpec, folder: Path, seed: int) -> Path:
    """Write an adapter of all linears with random numbers."""
    draw, tensors = np.random.default_rng(seed), {}
    for _, linear in adaptable_linears(spec):
        for matrix in {piece.matrix for piece in linear.pieces}:
            name = f"base_model.model.{matrix.name.removesuffix('.weight')}"
            a, b = draw.normal(size=(_RANK, matrix.columns)), draw.normal(size=(matrix.rows, _RANK))
            tensors[f"{name}.lora_A.weight"] = (0.01 * a).astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = (0.01 * b).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def tokens(rows: int, adapters: int) -> Tokens:
    """Return a decode step of so many rows; each of the adapters has as many of them."""
    each = -(-_CONTEXT // BLOCK_SIZE)
    tables = 1 + np.arange(rows * each, dtype=np.int32).reshape(rows, each)
    positions = np.full(rows, _CONTEXT - 1, np.int32)
    return Tokens(
        ids=np.arange(rows, dtype=np.int32) + 3,
        positions=positions,
        slots=tables[:, -1] * BLOCK_SIZE + positions % BLOCK_SIZE,
        rows=np.arange(rows, dtype=np.int32),
        tables=tables,
        longest=_CONTEXT,
        adapters=np.arange(rows, dtype=np.int32) * adapters // rows + 1 if adapters else None,
    )


def measure(folder: Path, turns: int) -> list[dict[str, Any]]:
    """Return a row per case; `turns` steps of each."""
    config = read_config(folder)
    spec = decoder_spec(config)
    if spec is None:
        raise SystemExit(f"{folder} is no model of the kernels")
    request = WarmupRequest(64, 2 * _CONTEXT, 32, 64 * _CONTEXT)
    # A thread each: the idle team of the other would spin on the same cores.
    settings = ShardSettings(model_path=folder, device="cpu", cpu_threads=1)
    plain = load(settings, config)
    plain.warm_up(request)
    adapted = load(replace(settings, max_lora_rank=_RANK), config)
    adapted.warm_up(request)
    host = adapted.adapters
    if host is None:
        raise SystemExit("the kernels were loaded without adapters")
    with tempfile.TemporaryDirectory() as place:
        for number in range(1, 9):
            path = write_adapter(spec, Path(place) / str(number), number)
            began = time.perf_counter()
            host.install(number, host.load(AdapterOrder(number, path)))
            loading = time.perf_counter() - began
    results = []
    for rows, adapters, goal in _CASES:
        wanted = np.arange(rows, dtype=np.int32)
        contenders: tuple[tuple[Forward, Tokens, list[float]], ...] = (
            (plain._forward, tokens(rows, 0), []),
            (adapted._forward, tokens(rows, adapters), []),
        )
        for turn in range(turns + 1):
            for forward, step, times in contenders[:: 1 if turn % 2 else -1]:
                began = time.perf_counter()
                forward.run(step, wanted)
                times.append(time.perf_counter() - began)
        base, own = (median(times[1:]) for _, _, times in contenders)
        results.append(
            {
                "rows": rows,
                "adapters": adapters or "loaded, none used",
                "ms without": 1e3 * base,
                "ms": 1e3 * own,
                "ratio": own / base,
                "at most": goal,
                "load, s": loading,
            }
        )
    return results


def main() -> None:
    """Parse flags, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="S")
    parser.add_argument("--checkpoints", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--turns", type=int, default=60)
    stats.add_output_flags(parser)
    args = parser.parse_args()
    results: list[dict[str, Any]] = []

    def found() -> tuple[str, dict[str, Any]]:
        return stats.table_of(results), {"shape": args.shape, "results": results}

    with stats.reporting(args.json, "model.adapters", found):
        results += measure(shape_subject(args.shape, args.checkpoints).folder, args.turns)


if __name__ == "__main__":
    main()
