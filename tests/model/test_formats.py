"""Checkpoints in formats that nobody reads are refused by name, and ordinary ones are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.model.support import (
    LLAMA,
    Asked,
    Stored,
    claimed,
    make_folder,
    write_json,
    write_safetensors,
)
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.check import check_model
from tgi_trio.model.config import read_config

LAYER = "model.layers.0."
Q = f"{LAYER}self_attn.q_proj."
Changes = dict[str, Stored | None]


def check(folder: Path, **serving: Any) -> list[str]:
    return check_model(read_config(folder), Asked(**serving))


def quantised(pieces: Changes, keep: bool = False) -> Changes:
    """Return the changes that make every linear layer of LLAMA one of these pieces."""
    changes: Changes = {}
    for part in ("q", "k", "v", "o"):
        module = f"{LAYER}self_attn.{part}_proj"
        if not keep:
            changes[f"{module}.weight"] = None
        changes |= {f"{module}.{name}": stored for name, stored in pieces.items()}
    return changes


I32, F16, F32, U8 = ("I32", (2, 2)), ("F16", (2, 2)), ("F32", (2,)), ("U8", (4, 1))
FORMATS: dict[str, tuple[dict[str, Any], Changes, str]] = {
    "aqlm": (
        {"quant_method": "aqlm", "nbits_per_codebook": 16},
        quantised({"codes": ("I16", (2, 2, 1)), "codebooks": F16, "scales": F16}),
        "aqlm",
    ),
    "vptq": (
        {"quant_method": "vptq", "bits": 2},
        quantised({"indices": I32, "codebooks": F16}),
        "vptq, 2 bits",
    ),
}


def test_factors_of_a_router_are_no_piece_of_a_format(tmp_path: Path) -> None:
    """A name that MLX has beside scales; Inkling's routers have it alone."""
    name, through_transformers = f"{LAYER}mlp.gate.global_scale", {"model_type": "inkling_text"}
    folder = make_folder(tmp_path / "own", changes={name: F32})
    write_json(folder, LLAMA | through_transformers)
    check(folder)
    beside: Changes = {name: F32, f"{LAYER}mlp.gate.scales": F16}
    folder = make_folder(tmp_path / "mlx", changes=beside)
    write_json(folder, LLAMA | through_transformers)
    with pytest.raises(ModelLoadError, match=r"global_scale' in .* in the format MLX"):
        check(folder)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_refused_by_the_name_in_its_config(tmp_path: Path, name: str) -> None:
    said, changes, called = FORMATS[name]
    make_folder(tmp_path, LLAMA, changes)
    write_json(tmp_path, LLAMA | {"quantization_config": said})
    with pytest.raises(ModelLoadError) as error:
        check(tmp_path)
    text = str(error.value)
    assert f"in the format {called}, as quantization_config in config.json says" in text
    assert "float32, bfloat16, float16" in text and "--quantize eetq" in text
    assert "take out" not in text  # the tensors are what the config says


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_refused_by_its_tensors_where_no_file_tells(tmp_path: Path, name: str) -> None:
    make_folder(tmp_path, LLAMA, FORMATS[name][1])
    with pytest.raises(ModelLoadError) as error:
        check(tmp_path)
    text = str(error.value)
    assert f"Tensor '{LAYER}self_attn." in text and "model.safetensors" in text
    assert "nothing here reads" in text and "is missing" not in text
    assert "float32, bfloat16, float16" in text


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_holds_for_types_that_transformers_runs(tmp_path: Path, name: str) -> None:
    said, changes, called = FORMATS[name]
    make_folder(tmp_path, LLAMA, changes)
    write_json(tmp_path, LLAMA | {"model_type": "codegen"})
    with pytest.raises(ModelLoadError, match="nothing here reads"):
        check(tmp_path)
    write_json(tmp_path, LLAMA | {"model_type": "codegen", "quantization_config": said})
    with pytest.raises(ModelLoadError, match=f"in the format {called},"):
        check(tmp_path)


@pytest.mark.parametrize(
    "piece",
    "weight_scale weight_scale_inv SCB qweight qzeros scales g_idx weight_packed input_scale "
    "weight_zero_point weight_shape k_scale output_scale weight.absmax weight.quant_map "
    "weight.nested_absmax _weight_qdata _weight_scale_and_zero input_rotation bias_scale".split(),
)
def test_a_piece_beside_a_whole_weight_is_refused(tmp_path: Path, piece: str) -> None:
    make_folder(tmp_path, LLAMA, {f"{Q}{piece}": F32})
    with pytest.raises(ModelLoadError, match=f"'{Q}{piece}' in .* is a part of quantised weights"):
        check(tmp_path)


@pytest.mark.parametrize("dtype", "F8_E4M3 F8_E5M2 I8 U8 I32 BOOL F4 F8_E8M0".split())
def test_a_weight_of_another_dtype_is_refused(tmp_path: Path, dtype: str) -> None:
    make_folder(tmp_path, LLAMA, {f"{Q}weight": (dtype, (2, 2))})
    with pytest.raises(ModelLoadError, match=f"'{Q}weight' in .* is of type {dtype}"):
        check(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "called"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "gptq, 4 bits"),
        ("quant_config.json", {"w_bit": 4, "version": "GEMM"}, "awq, 4 bits"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "FP8"),
    ],
)
def test_files_beside_the_config_tell_of_a_format(
    tmp_path: Path, file: str, content: dict[str, Any], called: str
) -> None:
    make_folder(tmp_path)
    write_json(tmp_path, content, file)
    with pytest.raises(ModelLoadError, match=rf"in the format {called}, as {file} says"):
        check(tmp_path)


@pytest.mark.parametrize("where", ["text_config", "top"])
def test_plain_weights_under_a_quantised_config_come_with_advice(
    tmp_path: Path, where: str
) -> None:
    said = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    make_folder(tmp_path)
    write_json(tmp_path, LLAMA | (said if where == "top" else {"text_config": said}))
    with pytest.raises(ModelLoadError, match=r"take out quantization_config in config\.json"):
        check(tmp_path)


@pytest.mark.parametrize("empty", [None, {}])
def test_an_empty_quantization_config_says_nothing(tmp_path: Path, empty: object) -> None:
    make_folder(tmp_path)
    write_json(tmp_path, LLAMA | {"quantization_config": empty})
    assert check(tmp_path) == []


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_ordinary_dtypes_are_served(tmp_path: Path, dtype: str) -> None:
    write_json(tmp_path, LLAMA)
    tensors = {name: (dtype, shape) for name, (_, shape) in claimed(tmp_path).items()}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    assert check(tmp_path) == []


@pytest.mark.parametrize("dtype", ["I64", "BOOL"])
def test_tables_of_places_are_let_be_in_models_of_transformers(tmp_path: Path, dtype: str) -> None:
    """DeepSeek V4 has experts by token id; no format stores weights in these dtypes."""
    make_folder(tmp_path, LLAMA, {"model.layers.0.mlp.gate.tid2eid": (dtype, (8, 2))})
    write_json(tmp_path, LLAMA | {"model_type": "codegen"})
    assert check(tmp_path) == []
    write_json(tmp_path, LLAMA)
    with pytest.raises(ModelLoadError, match="tid2eid"):
        check(tmp_path)
