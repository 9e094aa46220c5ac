"""What compressed-tensors makes of a random model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.made_by_tools.support import check, open_model

pytestmark = pytest.mark.usefixtures("one_thread")

EXPONENTS = {
    **{"type": "float", "strategy": "group", "group_size": 32},
    **{"scale_dtype": torch.uint8, "zp_dtype": torch.uint8},
}
# Of weights: form, and arguments; of activations, where they are quantised as well.
COMPRESSED: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "w4a16, asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": 64},
        None,
    ),
    "w8a16": ("pack-quantized", {"num_bits": 8, "strategy": "channel"}, None),
    "w8a8": (
        "int-quantized",
        {"num_bits": 8, "strategy": "channel"},
        {"num_bits": 8, "strategy": "token", "dynamic": True},
    ),
    "fp8 of the tensor": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "tensor"},
        None,
    ),
    "fp8 of channels": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        None,
    ),
    "fp8 of blocks": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 64]},
        None,
    ),
    "nvfp4": (
        "nvfp4-pack-quantized",
        {
            **{"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            **{"scale_dtype": torch.float8_e4m3fn, "zp_dtype": torch.float8_e4m3fn},
        },
        None,
    ),
    "mxfp4": ("mxfp4-pack-quantized", {"num_bits": 4, **EXPONENTS}, None),
    "mxfp8": ("mxfp8-quantized", {"num_bits": 8, **EXPONENTS}, None),
}


def extremes(weight: torch.Tensor, said: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and the largest weight of each run that shares a scale."""
    rows, columns = weight.shape
    if said["strategy"] in ("group", "tensor_group"):
        runs = weight.reshape(rows, -1, said["group_size"])
        return runs.amin(-1), runs.amax(-1)
    if said["strategy"] == "block":
        tall, wide = said["block_structure"]
        runs = weight.reshape(rows // tall, tall, columns // wide, wide)
        return runs.amin((1, 3)), runs.amax((1, 3))
    if said["strategy"] == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    return weight.amin().reshape(1), weight.amax().reshape(1)


@pytest.mark.parametrize("case", COMPRESSED)
def test_compressed_tensors(source: Path, tmp_path: Path, case: str) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    form, said, activations = COMPRESSED[case]
    weights = QuantizationArgs(**said)
    inputs = None if activations is None else QuantizationArgs(**activations)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=weights, input_activations=inputs, format=form
    )
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=["lm_head"],
        format=form,
        quantization_status=QuantizationStatus.COMPRESSED,
    )
    model = open_model(source, dtype=torch.float32)
    apply_quantization_config(model, config)
    exact: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if not hasattr(module, "weight_scale"):
            continue
        weight = module.weight.data.float()
        factor = getattr(module, "weight_global_scale", None)
        if factor is not None:
            factor.data.copy_(generate_gparam(weight.amin(), weight.amax()))
        scale, zero = calculate_qparams(*extremes(weight, said), weights, factor)
        kept = module.weight_scale
        kept.data.copy_(scale.reshape(kept.shape).to(kept.dtype))
        offset = getattr(module, "weight_zero_point", None)
        if offset is not None:
            offset.data.copy_(zero.reshape(offset.shape).to(offset.dtype))
        codes = quantize(weight, kept.data, offset, weights, global_scale=factor)
        exact[f"{name}.weight"] = dequantize(codes, kept.data, offset, weights, global_scale=factor)
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    made = tmp_path / "made"
    model.save_pretrained(made)
    compressor.update_config(made)
    assert len(exact) == 14
    check(made, exact, source, tmp_path)
