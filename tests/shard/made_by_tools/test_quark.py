"""Checkpoints that AMD's Quark makes on the spot, of a random model: read to their numbers.

Quark brings onnx and plotly, and is installed beside (`pip install amd-quark`); skipped without it.
What it made once is in `tests/data/quantised` (`quark-mixed`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.made_by_tools.support import SIZES, Make, check, open_model

pytestmark = pytest.mark.usefixtures("one_thread")
INTEGERS = {"scale_type": "float", "round_method": "half_even", "is_dynamic": False}
GROUPS = INTEGERS | {"ch_axis": 1, "group_size": 32}
CHANNELS = INTEGERS | {"ch_axis": 0}
TENSOR = INTEGERS | {"observer_method": "min_max"}
# Name of a spec of Quark's for weights, and its arguments.
SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "int4": ("Int4PerGroupSpec", GROUPS | {"symmetric": True}),
    "uint4": ("Uint4PerGroupSpec", GROUPS | {"symmetric": False}),
    "int4 of channels": ("Int4PerChannelSpec", CHANNELS | {"symmetric": True}),
    "uint4 of channels": ("Uint4PerChannelSpec", CHANNELS | {"symmetric": False}),
    "int4 of the tensor": ("Int4PerTensorSpec", TENSOR | {"symmetric": True}),
    "int8": ("Int8PerGroupSpec", GROUPS | {"symmetric": False}),
    "int8 of channels": ("Int8PerChannelSpec", CHANNELS | {"symmetric": True}),
    "int8 of the tensor": ("Int8PerTensorSpec", TENSOR | {"symmetric": True}),
    "uint8": ("Uint8PerGroupSpec", GROUPS | {"symmetric": False}),
    "uint8 of channels": ("Uint8PerChannelSpec", CHANNELS | {"symmetric": False}),
    "fp8 of the tensor": (
        "FP8E4M3PerTensorSpec",
        {"observer_method": "min_max", "is_dynamic": False},
    ),
    "fp8 of channels": ("FP8E4M3PerChannelSpec", {"ch_axis": 0, "is_dynamic": False}),
    "mxfp4": ("OCP_MXFP4Spec", {"ch_axis": -1, "is_dynamic": False}),
}
Quantise = Callable[..., None]


@pytest.fixture
def quantise(checkpoint: Make, tmp_path: Path) -> Quantise:
    """Write a checkpoint, and hold it to what its weights are by Quark's own loader."""
    library = pytest.importorskip("quark.torch")
    from quark.torch.quantization.config import config as configs

    source = checkpoint("llama", **SIZES)

    def run(spec: tuple[str, dict[str, Any]], packing: str = "reorder") -> None:
        weight = getattr(configs, spec[0])(**spec[1]).to_quantization_spec()
        every = configs.QLayerConfig(weight=weight)
        quantiser = library.ModelQuantizer(
            configs.QConfig(global_quant_config=every, exclude=["lm_head"])
        )
        rows: Any = torch.arange(16).reshape(2, 8)
        texts: Any = torch.utils.data.DataLoader(rows)
        model = open_model(source, dtype=torch.float32)
        model = quantiser.freeze(quantiser.quantize_model(model, texts))
        made = tmp_path / "made"
        with torch.no_grad():
            library.export_safetensors(model, str(made), pack_method=packing)
        exact = {}
        for name, module in open_model(made, dtype=torch.float32).named_modules():
            if getattr(module, "weight_quantizer", None) is not None:
                exact[f"{name}.weight"] = module.weight_quantizer(module.weight.data)
        assert len(exact) == 14
        check(made, exact, source, tmp_path)

    return run


@pytest.mark.parametrize("case", SPECS)
def test_quark(quantise: Quantise, case: str) -> None:
    quantise(SPECS[case])


@pytest.mark.parametrize("case", ["int4", "uint4 of channels"])
def test_quark_in_order(quantise: Quantise, case: str) -> None:
    quantise(SPECS[case], "order")
