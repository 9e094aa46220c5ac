"""What torchao makes of a random model, through transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.shard.made_by_tools.support import WEIGHTS, Make, check, open_model

pytestmark = pytest.mark.usefixtures("one_thread")

TORCHAO: dict[str, Callable[[Any], Any]] = {
    "int8": lambda ao: ao.Int8WeightOnlyConfig(),
    "int8 of the tensor": lambda ao: ao.Int8WeightOnlyConfig(granularity=ao.PerTensor()),
    "w8a8": lambda ao: ao.Int8DynamicActivationInt8WeightConfig(),
    "fp8": lambda ao: ao.Float8WeightOnlyConfig(),
    "8da4w": lambda ao: ao.Int8DynamicActivationIntxWeightConfig(
        weight_dtype=torch.int4,  # type: ignore[attr-defined]
        weight_granularity=ao.PerGroup(32),
    ),
    "3 bits, asymmetric": lambda ao: ao.IntxWeightOnlyConfig(
        weight_dtype=torch.int3,  # type: ignore[attr-defined]
        granularity=ao.PerGroup(64),
        mapping_type=ao.MappingType.ASYMMETRIC,
    ),
    "modules that differ": lambda ao: ao.FqnToConfig(
        {
            "_default": ao.Int8WeightOnlyConfig(),
            "re:.*self_attn.*": ao.Float8WeightOnlyConfig(),
            "model.layers.1.mlp.up_proj": None,
            "lm_head": ao.Int8WeightOnlyConfig(),
        }
    ),
}


@pytest.mark.parametrize("embeddings", [False, True])
@pytest.mark.parametrize("case", TORCHAO)
def test_torchao(source: Path, tmp_path: Path, case: str, embeddings: bool) -> None:
    library = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    in_all = embeddings and case == "modules that differ"
    options = TorchAoConfig(TORCHAO[case](library), include_input_output_embeddings=embeddings)
    model = open_model(source, dtype=torch.float32, quantization_config=options)
    exact = {
        name: weight.dequantize()
        for name, weight in model.named_parameters()
        if hasattr(weight, "tensor_data_names")
    }
    made = tmp_path / "made"
    model.save_pretrained(made)
    assert len(exact) == 14 - (case == "modules that differ") + (2 if in_all else embeddings)
    check(made, exact, source, tmp_path)


@pytest.mark.parametrize("case", ["int8", "fp8"])
def test_experts_of_torchao(checkpoint: Make, tmp_path: Path, case: str) -> None:
    """All of a layer in one tensor, gates before ups, as transformers holds and writes them."""
    library = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    source, config = checkpoint("qwen3_moe"), TORCHAO[case](library)
    every = {"re:.*experts.gate_up_proj": config, "re:.*experts.down_proj": config}
    options = TorchAoConfig(library.FqnToConfig(every | {"_default": config}))
    model = open_model(source, dtype=torch.float32, quantization_config=options)
    exact: dict[str, torch.Tensor] = {}
    for name, weight in model.named_parameters():
        if not hasattr(weight, "tensor_data_names"):
            continue
        place, _, own = name.rpartition(".")
        values = weight.dequantize()
        if own == "weight":
            exact[name] = values
            continue
        for expert, value in enumerate(values):
            parts = {"down": value}
            if own == "gate_up_proj":
                parts = dict(zip(("gate", "up"), value.chunk(2), strict=True))
            exact |= {f"{place}.{expert}.{part}_proj.weight": x for part, x in parts.items()}
    made = tmp_path / "made"
    model.save_pretrained(made)
    assert any(name.endswith("._gate_up_proj_qdata") for name in load_file(made / WEIGHTS))
    check(made, exact, source, tmp_path)
