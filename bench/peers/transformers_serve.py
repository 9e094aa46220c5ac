"""`transformers serve`: the project's torch and transformers, and what the server wants besides."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from bench.peers.environment import Environment

_PACKAGES = ("accelerate", "fastapi", "uvicorn", "openai", "rich", "typer")
_RECIPE = " ".join(_PACKAGES)


class TransformersServe:
    """Its command; without a flag it answers one request after the other."""

    def __init__(self, home: Path) -> None:
        """Install what is missing under `home` unless it is there. Raises Unavailable."""
        self._environment = environment = Environment(home / "transformers-serve")
        if not environment.made(_RECIPE):
            environment.create()
            environment.see(Path(sysconfig.get_path("purelib")))
            environment.pip("install", *_PACKAGES)
            environment.finish(_RECIPE)

    def serve_command(self, checkpoint: Path, port: int, *flags: str) -> list[str | Path]:
        """Return the command that serves `checkpoint`."""
        main = "from transformers.cli.transformers import main; main()"
        return [
            self._environment.python,
            *("-c", main, "serve"),
            checkpoint,
            *flags,
            *("--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "bfloat16"),
        ]
