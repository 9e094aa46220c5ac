"""What HQQ makes of a random model, as transformers saves it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.shard.made_by_tools.support import check, open_model

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("bits", "group", "axis", "as_numbers"),
    [
        *((1, 32, 1, False), (3, 64, 1, False), (4, 64, 1, True), (8, 128, 1, False)),
        *((2, 64, 0, True), (3, 64, 0, False), (4, 64, 0, False)),
    ],
)
def test_hqq(
    source: Path, tmp_path: Path, bits: int, group: int, axis: int, as_numbers: bool
) -> None:
    """As transformers saves it: what its modules say of themselves, and `HqqConfig`."""
    library = pytest.importorskip("hqq.core.quantize")
    said = library.BaseQuantizeConfig(
        nbits=bits, group_size=group, axis=axis, view_as_float=as_numbers
    )
    model = open_model(source, dtype=torch.float32)
    exact: dict[str, torch.Tensor] = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            own = library.HQQLinear(module, said, compute_dtype=torch.float32, device="cpu")
            exact[f"{name}.weight"] = own.dequantize()
            model.set_submodule(name, own)
    made = tmp_path / "made"
    made.mkdir()
    stored = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(stored, made / "model.safetensors", metadata={"format": "pt"})
    described = {"quant_method": "hqq", "quant_config": said, "skip_modules": ["lm_head"]}
    values = json.loads((source / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(values | {"quantization_config": described}))
    assert len(exact) == 14
    check(made, exact, source, tmp_path)
