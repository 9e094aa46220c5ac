"""llama.cpp's server without a compiler: xllamacpp publishes it built for AVX2, 34 MB."""

from __future__ import annotations

import os
from pathlib import Path

from bench.peers.environment import Environment
from bench.peers.llama_cpp import write_gguf

_PACKAGES = ("xllamacpp==2026.10.11549", "gguf==0.19.0")
_RECIPE = " ".join(_PACKAGES)


class Xllamacpp:
    """Its command."""

    def __init__(self, home: Path) -> None:
        """Install it under `home` unless it is there. Raises Unavailable."""
        self._environment = environment = Environment(home / "xllamacpp")
        if not environment.made(_RECIPE):
            environment.create()
            environment.pip("install", *_PACKAGES)
            environment.finish(_RECIPE)

    def serve_command(self, checkpoint: Path, port: int, clients: int) -> list[str | Path]:
        """Return the command that serves `checkpoint` to as many clients at a time."""
        script = Path(__file__).with_name("xllamacpp_serve.py")
        weights, threads = write_gguf(self._environment, checkpoint), os.cpu_count() or 1
        place = f"{port}", f"{clients}", f"{threads}"
        return [self._environment.python, script, weights, *place]
