"""LoRA adapters with random numbers, as PEFT would write them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tgi_trio.model.adapters.sites import adaptable_linears
from tgi_trio.model.specs.decoder import DecoderSpec


def write_adapter(
    spec: DecoderSpec, folder: Path, seed: int, rank: int, *, dora: bool = False
) -> Path:
    """Write an adapter of all linears of layers; `dora`: with magnitudes, and of what has such."""
    draw, tensors = np.random.default_rng(seed), {}
    for site, linear in adaptable_linears(spec):
        if site.role == "head" or (dora and (site.of_expert or site.role == "latent up")):
            continue
        for matrix in {piece.matrix for piece in linear.pieces}:
            name = f"base_model.model.{matrix.name.removesuffix('.weight')}"
            a = draw.standard_normal((rank, matrix.columns), np.float32)
            b = draw.standard_normal((matrix.rows, rank), np.float32)
            tensors[f"{name}.lora_A.weight"] = np.float32(0.01) * a
            tensors[f"{name}.lora_B.weight"] = np.float32(0.01) * b
            if dora:
                tensors[f"{name}.lora_magnitude_vector"] = np.ones(matrix.rows, np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    config["use_dora"] = dora
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
