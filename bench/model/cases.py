"""What `bench.model` measures, and who is measured."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from bench.peers import llama_cpp


@dataclass(frozen=True)
class Case:
    """A decode step of rows with these contexts, or the prefill of the first of them."""

    name: str
    contexts: list[int]
    prefill: bool = False
    steps: int = 12  # decode steps in one reading
    peers: bool = True  # False: of interest for our kernels alone


CASES = {
    "decode 1": Case("decode 1", [160]),
    "decode 8": Case("decode 8", [160] * 8),
    "decode 32": Case("decode 32", [160] * 32, steps=6),
    "uniform 32": Case("uniform 32", [525] * 32, steps=6, peers=False),
    # From 50 to 1000, of the same total.
    "mixed 32": Case("mixed 32", [50 + i * 950 // 31 for i in range(32)], steps=6, peers=False),
    "prefill 512": Case("prefill 512", [512], prefill=True),
}


class Contender(Protocol):
    """Somebody who can be measured."""

    name: str

    def measure(self, case: Case) -> float:
        """Return milliseconds."""
        ...

    def close(self) -> None: ...


class Worker:
    """A process that measures on request, `bench.model.worker` or one that speaks as it does."""

    def __init__(
        self, name: str, command: Sequence[str | Path], settings: Mapping[str, str] | None = None
    ) -> None:
        """`settings` are added to the environment. Raises RuntimeError when it does not start."""
        self.name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **(settings or {})},
        )
        if self._line() != "ready":
            raise RuntimeError(f"the worker of {name} did not start")

    def measure(self, case: Case) -> float:
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
    """llama.cpp's own benchmark, on the same weights; it feeds random tokens and samples none.

    Sequences that decode share the prompt, which is computed once.
    """

    def __init__(self, name: str, home: Path, folder: Path, threads: int) -> None:
        """Install it under `home` unless it is there. Raises Unavailable.

        `name`: llama_cpp.NAME, or NAME_Q8_0 for weights of 8 bits.
        """
        peer = llama_cpp.LlamaCpp(home)
        self.name = name
        self._program = peer.batched_bench
        self._file = peer.weights(folder, "Q8_0" if name == llama_cpp.NAME_Q8_0 else "BF16")
        self._threads = threads

    def measure(self, case: Case) -> float:
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
        words = [str(word) for pair in options.items() for word in pair]
        done = subprocess.run(
            [self._program, "-pps", *words],
            capture_output=True,
            text=True,
            check=True,
        )
        found = json.loads(next(line for line in done.stdout.splitlines() if line[:1] == "{"))
        return float(found["t_pp"] if case.prefill else found["t_tg"] / new) * 1e3

    def close(self) -> None:
        pass
