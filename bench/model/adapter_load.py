"""What loading LoRA adapters does to those who are being served: 8 streams of a whole server.

    python -m bench.model.adapter_load --shape S --json out.json

Adapters of rank 8 on all linears, in float32 as PEFT writes them, come by /v1/load_lora_adapter and
go again, one after the other. Seconds with loads and without alternate, so that other load on the
machine falls on both alike. A gap is the time from the end of one step's compute to the start of
the next, as the shard counts it.
"""

from __future__ import annotations

import argparse
import http.client
import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.harness import stats
from bench.harness.adapters import write_adapter
from bench.harness.server import Server, running
from bench.model.subjects import shape_subject
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec

_KEY: Final = "bench"
_HEADERS: Final = {"authorization": f"Bearer {_KEY}", "content-type": "application/json"}
_RANK: Final = 8  # of shape S: 10 MB
_STREAMS: Final = 8
_TOKENS: Final = 400  # of a stream, before it asks again
_GAP: Final = 0.005  # seconds that none should be above
_LOAD: Final = 0.5  # seconds that a load should take at most


@contextmanager
def streams(server: Server, tokens: int) -> Iterator[Counter[str]]:
    """Keep streams going; yield what they count: events, failures."""
    counts: Counter[str] = Counter()
    over = threading.Event()

    def stream(index: int) -> None:
        parameters = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        body = json.dumps({"inputs": f"{index} and so on", "parameters": parameters})
        while not over.is_set():
            connection = http.client.HTTPConnection(server.host, server.port)
            connection.request("POST", "/generate_stream", body, _HEADERS)
            answer = connection.getresponse()
            counts["failed"] += answer.status != 200
            while not over.is_set() and (line := answer.readline()):
                counts["tokens"] += line.startswith(b"data:")
                counts["failed"] += line.startswith(b'data: {"error"')
            connection.close()

    threads = [threading.Thread(target=stream, args=(i,)) for i in range(_STREAMS)]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        over.set()
        for thread in threads:
            thread.join()


def post(server: Server, path: str, body: dict[str, str]) -> float:
    """POST with the key; return the seconds it took. Raises RuntimeError for a refusal."""
    began = time.perf_counter()
    connection = http.client.HTTPConnection(server.host, server.port)
    connection.request("POST", path, json.dumps(body), _HEADERS)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    if answer.status != 200:
        raise RuntimeError(f"{path} answered {answer.status}: {text}")
    return time.perf_counter() - began


def gaps(server: Server) -> dict[float, float]:
    """Return how many gaps there were up to each bound, seconds; inf: all."""
    connection = http.client.HTTPConnection(server.host, server.port)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    start = 'tgi_batch_step_gap_duration_bucket{le="'
    found = (line.removeprefix(start).split('"} ') for line in lines if line.startswith(start))
    return {float(bound): float(count) for bound, count in found}


def measure(
    server: Server, folders: list[Path], turns: int, tokens: int, period: float
) -> list[dict[str, Any]]:
    """Return a row for seconds without loads and one for those with; `period`: of each turn."""
    found: dict[str, Counter[float]] = {"without": Counter(), "loading": Counter()}
    counted = {name: [0.0, 0.0] for name in found}  # seconds, tokens
    loads: list[float] = []
    with streams(server, tokens) as counts:
        time.sleep(period / 2)  # all prompts are computed
        for turn in range(2 * turns):
            kind = "loading" if turn % 2 else "without"
            before, tokens_before, began = gaps(server), counts["tokens"], time.perf_counter()
            if turn % 2:
                loaded = len(loads)
                while loaded == len(loads) or time.perf_counter() - began < period:
                    folder = folders[len(loads) % len(folders)]
                    body = {"lora_name": folder.name, "lora_path": folder.name}
                    loads.append(post(server, "/v1/load_lora_adapter", body))
                    post(server, "/v1/unload_lora_adapter", {"lora_name": folder.name})
            else:
                time.sleep(period)
            after = gaps(server)
            found[kind].update({bound: after[bound] - before[bound] for bound in after})
            counted[kind][0] += time.perf_counter() - began
            counted[kind][1] += counts["tokens"] - tokens_before
    if counts["failed"]:
        raise RuntimeError(f"{counts['failed']} streams were refused")
    size = sum(path.stat().st_size for path in folders[0].iterdir())
    rows = []
    for kind, buckets in found.items():
        steps = buckets[float("inf")]
        above = [bound for bound in sorted(buckets) if buckets[bound] == steps]
        row: dict[str, Any] = {
            "seconds": kind,
            "tokens/s": counted[kind][1] / counted[kind][0],
            "steps": int(steps),
            "gaps above 5 ms": int(steps - buckets[_GAP]),
            "longest gap, ms": f"<= {1e3 * above[0]:g}" if steps else "none",
        }
        row |= {"loads": "", "load, s": "", "longest load, s": "", "at most": ""}
        if kind == "loading":
            row |= {"loads": len(loads), "load, s": median(loads), "longest load, s": max(loads)}
            row |= {"at most": f"{_LOAD} s, no gap; {size / 1e6:.1f} MB a file"}
        rows.append(row)
    return rows


def main() -> None:
    """Parse flags, measure, print, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", default="S")
    parser.add_argument("--checkpoints", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--period", type=float, default=2.0, help="seconds of a turn")
    parser.add_argument("--backend", choices=("kernels", "torch"), default="kernels")
    parser.add_argument("--tokens", type=int, default=_TOKENS)
    stats.add_output_flags(parser)
    args = parser.parse_args()
    base = shape_subject(args.shape, args.checkpoints).folder
    spec = decoder_spec(read_config(base))
    if spec is None:
        raise SystemExit(f"{base} is no model whose linears are known")
    results: list[dict[str, Any]] = []

    def found() -> tuple[str, dict[str, Any]]:
        options = {"shape": args.shape, "backend": args.backend}
        return stats.table_of(results), {**options, "results": results}

    with (
        tempfile.TemporaryDirectory() as place,
        stats.reporting(args.json, "model.adapter_load", found),
    ):
        folders = [write_adapter(spec, Path(place) / f"a{seed}", seed, _RANK) for seed in range(4)]
        flags = ["--model-id", str(base), "--api-key", _KEY, "--cpu-backend", args.backend]
        flags += ["--adapter-updates", "--adapter-folder", place, "--max-lora-rank", str(_RANK)]
        with running(flags) as server:
            results += measure(server, folders, args.turns, args.tokens, args.period)


if __name__ == "__main__":
    main()
