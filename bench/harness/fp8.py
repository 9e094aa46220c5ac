"""Checkpoints of FP8 in the shapes of real models, with scales of blocks as DeepSeek's and Qwen's.

The shape's random weights are rounded to the nearest number, which is all that speed depends on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.harness.checkpoints import make

if TYPE_CHECKING:
    import torch

BLOCK: Final = 128  # inputs and outputs that share a scale
_LARGEST: Final = 448.0


def round_to_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 numbers [out, in] of weights [out, in], and float32 scales [blocks, blocks]."""
    import torch

    outputs, inputs = weight.shape
    down, across = -(-outputs // BLOCK), -(-inputs // BLOCK)
    padded = torch.zeros(down * BLOCK, across * BLOCK)
    padded[:outputs, :inputs] = weight.float()
    blocks = padded.reshape(down, BLOCK, across, BLOCK)
    scales = blocks.abs().amax((1, 3)) / _LARGEST
    numbers = (blocks / scales[:, None, :, None]).reshape(padded.shape)[:outputs, :inputs]
    return numbers.to(torch.float8_e4m3fn).contiguous(), scales


def write_fp8(shape: str, plain: Path, folder: Path) -> Path:
    """Write the shape in FP8 to `folder` unless it is there; embeddings and the head stay.

    `plain`: where its bfloat16 checkpoint is, or is to be made. Returns `folder`.
    """
    from safetensors.torch import load_file, save_file

    done = folder / "config.json"  # written last
    if done.exists():
        return folder
    make(shape, plain)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        tensors[name] = tensor
        if name.endswith("_proj.weight"):
            tensors[name], tensors[f"{name}_scale_inv"] = round_to_fp8(tensor)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for file in plain.glob("tokenizer*"):
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    done.write_text(json.dumps(config, indent=2))
    return folder
