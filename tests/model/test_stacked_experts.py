"""Tensors that hold all experts of a layer are shown as those of each."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.model.support import write_json
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.checkpoint_files import read_headers
from tgi_trio.model.checkpoint_tensors import read_tensors
from tgi_trio.model.config import ModelConfig, read_config
from tgi_trio.model.stacked_experts import split_first_axis

EXPERTS, WIDTH, HIDDEN = 3, 4, 32
PLACE = "model.layers.0.mlp.experts."


def write(folder: Path, experts: int = EXPERTS, **tensors: np.ndarray) -> ModelConfig:
    config = {
        "model_type": "gpt_oss",
        "vocab_size": 8,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_local_experts": experts,
        "num_experts_per_tok": 1,
    }
    write_json(folder, config)
    save_file({PLACE + name: values for name, values in tensors.items()}, folder / "m.safetensors")
    return read_config(folder)


def numbers(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 255, shape, dtype=np.uint8)


def write_torchao(folder: Path, **tensors: np.ndarray) -> ModelConfig:
    """Write what torchao makes of the experts of a family with a matrix for each."""
    more = {"model_type": "qwen3_moe", "num_experts": EXPERTS, "moe_intermediate_size": WIDTH}
    write_json(folder, dict(write(folder, EXPERTS, **tensors).values) | more)
    return read_config(folder)


def test_every_expert_is_a_view_of_the_file(tmp_path: Path) -> None:
    """Of whatever is stored: matrices, biases, the blocks and scales of MXFP4."""
    config = write(
        tmp_path,
        gate_up_proj=numbers(EXPERTS, HIDDEN, 2 * WIDTH),
        gate_up_proj_bias=numbers(EXPERTS, 2 * WIDTH),
        down_proj_blocks=numbers(EXPERTS, HIDDEN, 1, 16),
        down_proj_scales=numbers(EXPERTS, HIDDEN, 1),
    )
    file = tmp_path / "m.safetensors"
    content, tensors = file.read_bytes(), read_tensors(config)
    assert len(tensors) == 4 * EXPERTS
    for name, whole in load_file(file).items():
        part = name.removeprefix(PLACE)
        for index in range(EXPERTS):
            stored = tensors[f"{PLACE}{index}.{part}"]
            assert stored.shape == whole.shape[1:]
            assert content[stored.first : stored.end] == whole[index].tobytes()


def test_another_number_of_experts_is_refused(tmp_path: Path) -> None:
    config = write(tmp_path, EXPERTS + 1, down_proj_bias=numbers(EXPERTS, HIDDEN))
    with pytest.raises(ModelLoadError, match=r"'model.*down_proj_bias' .*\[3, 32\].* 4 experts"):
        read_tensors(config)


def test_pieces_of_a_tensor_follow_each_other(tmp_path: Path) -> None:
    write(tmp_path, down_proj=numbers(5, 2, 3))
    (whole,) = read_headers(tmp_path).values()
    pieces = list(split_first_axis(whole))
    assert [piece.shape for piece in pieces] == [(2, 3)] * 5
    assert [piece.end - piece.first for piece in pieces] == [6] * 5
    assert pieces[0].first == whole.first and pieces[-1].end == whole.end


def test_gates_and_ups_in_one_are_shown_by_the_names_of_each(tmp_path: Path) -> None:
    """As Qwen 3.5's mixtures are on the hub."""
    values = numbers(EXPERTS, 2 * WIDTH, HIDDEN), numbers(EXPERTS, HIDDEN, WIDTH)
    write(tmp_path, gate_up_proj=values[0], down_proj=values[1])
    stated = json.loads((tmp_path / "config.json").read_text())
    stated |= {"num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": WIDTH}
    write_json(tmp_path, stated | {"model_type": "qwen3_5_moe_text"})
    content, tensors = (
        (tmp_path / "m.safetensors").read_bytes(),
        read_tensors(read_config(tmp_path)),
    )
    assert len(tensors) == 3 * EXPERTS
    gate_up, down = values
    for index in range(EXPERTS):
        matrices = {"gate": gate_up[index, :WIDTH], "up": gate_up[index, WIDTH:]}
        for name, wanted in (matrices | {"down": down[index]}).items():
            stored = tensors[f"{PLACE}{index}.{name}_proj.weight"]
            assert stored.shape == wanted.shape
            assert content[stored.first : stored.end] == wanted.tobytes()


def test_tensors_of_torchao_are_those_of_gates_ups_and_downs(tmp_path: Path) -> None:
    config = write_torchao(
        tmp_path,
        _gate_up_proj_qdata=numbers(EXPERTS, 2 * WIDTH, HIDDEN),
        _gate_up_proj_scale=numbers(EXPERTS, 2 * WIDTH, 1),
        _down_proj_qdata=numbers(EXPERTS, HIDDEN, WIDTH),
        _down_proj_scale=numbers(EXPERTS, HIDDEN, 1),
    )
    tensors, file = read_tensors(config), tmp_path / "m.safetensors"
    content, whole = file.read_bytes(), load_file(file)
    for part in ("qdata", "scale"):
        both = whole[f"{PLACE}_gate_up_proj_{part}"]
        for index in range(EXPERTS):
            halves = both[index, :WIDTH], both[index, WIDTH:], whole[f"{PLACE}_down_proj_{part}"]
            for name, values in zip(("gate", "up", "down"), halves, strict=True):
                stored = tensors[f"{PLACE}{index}.{name}_proj._weight_{part}"]
                expected = values[index] if name == "down" else values
                assert stored.shape == expected.shape
                assert content[stored.first : stored.end] == expected.tobytes()
    assert len(tensors) == 6 * EXPERTS


def test_scales_of_groups_before_outputs_stay_in_one(tmp_path: Path) -> None:
    """A gate's are not one after the other, so that nothing here can read them."""
    config = write_torchao(
        tmp_path,
        _gate_up_proj_qdata=numbers(EXPERTS, 2 * WIDTH, HIDDEN // 2),
        _gate_up_proj_scale=numbers(EXPERTS, 1, 2 * WIDTH),
    )
    assert f"{PLACE}_gate_up_proj_scale" in read_tensors(config)
