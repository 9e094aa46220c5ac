"""What bitsandbytes makes of a random model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.made_by_tools.support import check, open_model

pytestmark = pytest.mark.usefixtures("one_thread")

BYTES: dict[str, dict[str, Any]] = {
    "int8": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "nf4, double": {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
    },
}


@pytest.mark.parametrize("case", BYTES)
def test_bitsandbytes(source: Path, tmp_path: Path, case: str) -> None:
    library = pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    options = BitsAndBytesConfig(**BYTES[case], bnb_4bit_compute_dtype=torch.float32)
    model = open_model(
        source, dtype=torch.float32, quantization_config=options, device_map={"": "cpu"}
    )
    exact: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, library.nn.Linear4bit):
            assert weight is not None
            exact[f"{name}.weight"] = library.functional.dequantize_4bit(
                weight.data, weight.quant_state
            )
        elif isinstance(module, library.nn.Linear8bitLt):
            assert weight is not None
            exact[f"{name}.weight"] = weight.data.float() * weight.SCB[:, None] / 127
    made = tmp_path / "made"
    model.save_pretrained(made)
    assert len(exact) == 14
    check(made, exact, source, tmp_path)
