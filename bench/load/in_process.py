"""What the process of its own does; a child cannot import a package's `__main__`."""

from __future__ import annotations

from pathlib import Path


def load_here(folder: Path, dtype: str, backend: str) -> float:
    """Load as a shard does; return the seconds that took without imports."""
    from tgi_trio.shard.__main__ import ShardSettings, load

    runner = load(ShardSettings(str(folder), dtype=dtype, device="cpu", cpu_backend=backend))
    return runner.info.load_ns / 1e9
