"""What the process of its own does; a child cannot import a package's `__main__`."""

from __future__ import annotations

import os
import time
from pathlib import Path


def load_here(folder: Path, dtype: str, backend: str) -> float:
    """Load as a shard does; return the seconds that took without imports."""
    from tgi_trio.ipc.shard_settings import ShardSettings
    from tgi_trio.shard.__main__ import load

    settings = ShardSettings(model_path=folder, dtype=dtype, device="cpu", cpu_backend=backend)
    runner = load(settings)
    return runner.info.load_ns / 1e9


def load_llama_here(libraries: Path, file: Path) -> tuple[float, float]:
    """Load with llama.cpp; return the seconds until it has, and until a first token is computed.

    It maps the file: what has not been read by then is read with the token.
    """
    from bench.peers.llama_binding import Context, Libraries, Token

    began = time.perf_counter()
    threads = os.cpu_count() or 1
    llama = Libraries(libraries)  # which logs as long as it is there
    with Context(llama, file, tokens=256, sequences=1, threads=threads) as context:
        loaded = time.perf_counter() - began
        context.compute([Token(3, 0, 0, wanted=True)])
        return loaded, time.perf_counter() - began
