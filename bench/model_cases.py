"""What `bench.model` measures, and who is measured."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Case:
    """A decode step of rows with these contexts, or the prefill of the first of them."""

    name: str
    contexts: list[int]
    prefill: bool = False
    steps: int = 12  # decode steps in one reading


CASES = (
    Case("decode 1", [160]),
    Case("decode 8", [160] * 8),
    Case("decode 32", [160] * 32, steps=6),
    Case("decode 32, same total", [525] * 32, steps=4),
    Case("decode 32, contexts 50 to 1000", [50 + i * 950 // 31 for i in range(32)], steps=4),
    Case("prefill 512", [512], prefill=True),
)


class Contender(Protocol):
    """Somebody who can be measured."""

    name: str

    def measure(self, case: Case) -> float | None:
        """Return milliseconds, None for a case it cannot run."""
        ...

    def close(self) -> None: ...


class Worker:
    """A process of `bench.model_worker`."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.model_worker", name, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        if self._line() != "ready":
            raise RuntimeError(f"the worker of {name} did not start")

    def measure(self, case: Case) -> float | None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(case)) + "\n")
        self._process.stdin.flush()
        return float(self._line())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"the worker of {self.name} ended")
        return line


class LlamaCpp:
    """llama.cpp's own benchmark, on the same weights; see `bench/peers/llama_cpp.sh`."""

    name = "llama.cpp"

    def __init__(self, peer: Path, folder: Path, threads: int) -> None:
        self._program = peer / "build/bin/llama-batched-bench"
        self._file = folder.with_suffix(".gguf")
        self._threads = threads
        if not self._file.exists():
            writer = Path(__file__).parent / "peers/to_gguf.py"
            python = peer / "venv/bin/python"
            subprocess.run([python, writer, folder, self._file], check=True)

    def measure(self, case: Case) -> float | None:
        if len(set(case.contexts)) > 1:
            return None  # all its sequences have one length
        rows, context = len(case.contexts), case.contexts[0]
        new = 1 if case.prefill else case.steps
        prompt = context if case.prefill else context - new // 2
        options: dict[str, object] = {
            "-m": self._file,
            "-t": self._threads,
            "-b": 512,
            "-ub": 512,
            "-c": rows * (prompt + new) + 64,
            "-npp": prompt,
            "-ntg": new,
            "-npl": rows,
            "--output-format": "jsonl",
        }
        done = subprocess.run(
            [self._program, *(str(word) for pair in options.items() for word in pair)],
            capture_output=True,
            text=True,
            check=True,
        )
        found = json.loads(next(line for line in done.stdout.splitlines() if line[:1] == "{"))
        return float(found["t_pp"] if case.prefill else found["t_tg"] / new) * 1e3

    def close(self) -> None:
        pass
