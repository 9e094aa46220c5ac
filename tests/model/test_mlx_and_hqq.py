"""What MLX's and HQQ's checkpoints say of their matrices, and what of it is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model.quantised_formats import CONFIG, Changes, Q, make
from tests.model.support import Asked, write_json
from tests.support.quantised import real_checkpoint
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.check import check_model
from tgi_trio.model.config import read_config
from tgi_trio.model.facts import read_model_facts
from tgi_trio.model.quantised.mlx_layout import read_mlx_layout


def check(folder: Path) -> list[str]:
    return check_model(read_config(folder), Asked())


MLX = {"bits": 4, "group_size": 64}


@pytest.mark.parametrize(
    "said",
    [
        {"bits": 7},
        {"group_size": 48},
        {"mode": "fp3"},
        {"mode": "mxfp4"},  # its groups have 32
        {"bits": 4, "group_size": 16, "mode": "nvfp4", "global_scale": True},
        {"model.layers.0.mlp.down_proj": {"bits": 9, "group_size": 64}},
    ],
)
def test_variants_of_mlx_that_are_not_written(said: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match=r"of MLX with \d bits in groups of \d+; read are"):
        read_mlx_layout("config.json", MLX | said)


def test_modules_of_mlx_are_what_their_tensors_show(tmp_path: Path) -> None:
    """Names in config.json are mlx-lm's."""
    other: Changes = {
        f"{Q}.weight": ("U32", (64, 12)),
        f"{Q}.scales": ("BF16", (64, 1)),
        f"{Q}.biases": ("BF16", (64, 1)),
    }
    make(tmp_path, "mlx", other, {"layers.0.q": {"bits": 6, "group_size": 64}, "lm_head": False})
    assert check(tmp_path) == []


def test_what_mlx_says_counts_beside_what_the_original_said(tmp_path: Path) -> None:
    make(tmp_path, "mlx")
    config = json.loads((tmp_path / "config.json").read_text())
    own = config.pop("quantization_config")
    original = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    write_json(tmp_path, config | {"quantization": own, "quantization_config": original})
    assert check(tmp_path) == []
    assert read_model_facts(tmp_path).quantize == "mlx"


def hqq_layers(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Write a checkpoint of HQQ's, whose tensors are then changed."""
    made = real_checkpoint("hqq-mixed", folder)
    file = made / "layers.safetensors"
    tensors = load_file(file)
    change(tensors)
    file.unlink()
    save_file(tensors, file)
    return made


HQQ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("nbits", None, f"Tensor '{HQQ}.nbits', one whole number that describes a matrix of HQQ"),
        ("nbits", torch.tensor(7, dtype=torch.int32), "has 7 bits in groups of 64 along axis 1"),
        ("axis", torch.tensor(2, dtype=torch.int32), "in groups of 64 along axis 2 by HQQ's"),
        ("group_size", torch.tensor(-1, dtype=torch.int32), "in groups of -1 along axis 1"),
        ("group_size", torch.tensor(65536, dtype=torch.int32), "in groups of 65536 along axis 1"),
        ("scale", torch.ones(5, 1), rf"'{HQQ}\.scale' in .* has shape \[5, 1\], but config"),
        ("zero", None, f"Tensor '{HQQ}.zero' is missing"),
        ("zero_q", torch.ones(5, 1), f"Tensor '{HQQ}.zero_q' in .* is a part of .* HQQ"),
        ("W_q", torch.zeros(512, 64, dtype=torch.int8), f"'{HQQ}.W_q' in .* is of type I8"),
        ("zero", torch.full((1024, 1), torch.inf), f"'{HQQ}.zero' in .* holds a scale"),
    ],
)
def test_what_describes_a_matrix_of_hqq_is_checked(
    tmp_path: Path, part: str, value: torch.Tensor | None, message: str
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(f"{HQQ}.{part}", None)
        if value is not None:
            tensors[f"{HQQ}.{part}"] = value

    with pytest.raises(ModelLoadError, match=message):
        check(hqq_layers(tmp_path, change))


def test_numbers_that_are_codes_are_not_taken_for_scales(tmp_path: Path) -> None:
    """HQQ may store bytes as the model's dtype."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        codes = torch.full_like(tensors[f"{HQQ}.W_q"], 0xFF)
        tensors[f"{HQQ}.W_q"] = codes.view(torch.bfloat16)

    assert check(hqq_layers(tmp_path, change)) == []


def test_the_file_of_hqqs_own_library_is_refused_by_name(tmp_path: Path) -> None:
    write_json(tmp_path, CONFIG)
    (tmp_path / "qmodel.pt").write_bytes(b"\x80\x02.")
    with pytest.raises(ModelLoadError, match=r"holds qmodel\.pt, in which HQQ's own library"):
        check(tmp_path)
