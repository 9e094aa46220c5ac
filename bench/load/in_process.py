"""What the process of its own does; a child cannot import a package's `__main__`."""

from __future__ import annotations

from pathlib import Path


def load_here(folder: Path, dtype: str, backend: str) -> float:
    """Load as a shard does; return the seconds that took without imports."""
    from tgi_trio.ipc.shard_settings import ShardSettings
    from tgi_trio.shard.__main__ import load

    settings = ShardSettings(model_path=folder, dtype=dtype, device="cpu", cpu_backend=backend)
    runner = load(settings)
    return runner.info.load_ns / 1e9
