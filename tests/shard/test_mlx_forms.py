"""Checkpoints in mlx-lm's form, quantised or not: tokens are those of the family's own form."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model.support import Asked
from tests.shard.cpu_backend.kernel_support import FITTING, cpu_runner
from tests.shard.ranks.rank_processes import ranks_of
from tests.shard.torch_backend.golden import Golden, assert_greedy
from tests.shard.torch_backend.models_support import (
    BLOCK,
    GreedyRecorder,
    load,
    prompts,
    run,
    sequences,
)
from tests.support.lowered import store_mlx
from tests.support.mlx import FORMS, halve_latents, move_taps, write_as_mlx
from tests.support.quantised import quantise
from tgi_trio.errors import ModelLoadError
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.check import check_model
from tgi_trio.model.config import read_config

Make = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("one_thread")
NEW = 8
SAID = {"bits": 4, "group_size": 32, "mode": "affine"}
# Matrices of layers, which mlx-lm quantises as well as embeddings and heads.
LINEARS = (
    "_proj.weight",
    ".w1.weight",
    ".w2.weight",
    ".w3.weight",
    "_head.weight",
    "tokens.weight",
)


EVEN = {"qwen3_moe": {"moe_intermediate_size": 64}, "minimax_m2": {"intermediate_size": 64}}


def check_tokens(folder: Path, original: Path) -> None:
    assert check_model(read_config(folder), Asked()) == []
    golden, rows = Golden(original), sequences(prompts(3), new=NEW)
    runner, recorder = load(folder)
    run(runner, rows)
    for row in rows:
        assert_greedy(golden, recorder, row, tolerance=5e-4)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", FORMS)
def test_plain_numbers(checkpoint: Make, tmp_path: Path, family: str) -> None:
    source = checkpoint(family)
    folder = write_as_mlx(source, tmp_path / "mlx", FORMS[family])
    shapes = [
        {name: tensor.shape for name, tensor in load_file(each / "model.safetensors").items()}
        for each in (source, folder)
    ]
    assert shapes[0] != shapes[1]
    check_tokens(folder, source)


def quantise_as_mlx(source: Path, folder: Path, family: str) -> Path:
    """Return a checkpoint of 4 bits, embedding and head included; see `quantise` for `plain`."""
    made = quantise(source, folder, store_mlx(4, 32), SAID, endings=LINEARS)
    write_as_mlx(made, folder / "mlx", FORMS[family])
    return folder / "mlx"


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "lfm2_moe", "minimax_m2"])
def test_quantised_experts(checkpoint: Make, tmp_path: Path, family: str) -> None:
    folder = quantise_as_mlx(checkpoint(family, **EVEN.get(family, {})), tmp_path / "q", family)
    check_tokens(folder, tmp_path / "q" / "plain")


def test_quantised_experts_by_kernels_and_by_ranks(checkpoint: Make, tmp_path: Path) -> None:
    source = checkpoint("mixtral", **FITTING["mixtral"])
    folder = quantise_as_mlx(source, tmp_path / "q", "mixtral")
    golden, rows = Golden(tmp_path / "q" / "plain"), sequences(prompts(3), new=NEW)
    with cpu_runner(folder) as (runner, recorder):
        run(runner, rows)
        for row in rows:
            assert_greedy(golden, recorder, row, tolerance=5e-3)
    recorder, rows = GreedyRecorder(), sequences(prompts(3), new=NEW)
    with ranks_of(folder, 2, recorder, dtype="float32") as runner:
        runner.warm_up(WarmupRequest(64, 256, 16, 511 * BLOCK))
        run(runner, rows)
        for row in rows:
            assert_greedy(golden, recorder, row, tolerance=5e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_quantised_embeddings(checkpoint: Make, tmp_path: Path, tied: bool) -> None:
    source = checkpoint("llama", tie_word_embeddings=tied)
    made = quantise(source, tmp_path / "q", store_mlx(4, 64), SAID, endings=LINEARS)
    stored = load_file(made / "model.safetensors")
    assert stored["model.embed_tokens.weight"].dtype == torch.uint32
    assert ("lm_head.scales" in stored) is not tied
    check_tokens(made, made / "plain")


def test_a_latents_halves_are_quantised_each(checkpoint: Make, tmp_path: Path) -> None:
    """As mlx-lm does: first divided, then rounded."""
    source = checkpoint("deepseek_v3", kv_lora_rank=32, qk_nope_head_dim=32, v_head_dim=16)
    folder = write_as_mlx(source, tmp_path / "mlx", lambda t: halve_latents(t, heads=4, key=32))
    stored, exact = {}, load_file(source / "model.safetensors")
    for name, tensor in load_file(folder / "model.safetensors").items():
        place, half, _ = name.partition("embed_q.weight" if "embed_q" in name else "unembed_out.w")
        if not half:
            stored[name] = tensor
            continue
        heads, rows, columns = tensor.shape
        flat = tensor.reshape(-1, columns).numpy()
        packed, weight = store_mlx(4, 32)(name.removesuffix(".weight"), flat)
        stored |= {key: part.reshape(heads, rows, -1) for key, part in packed.items()}
        own = torch.from_numpy(weight).reshape(heads, rows, columns)
        whole = exact[f"{place}kv_b_proj.weight"].reshape(heads, -1, 32)
        if "embed_q" in name:
            whole[:, :32] = own.mT
        else:
            whole[:, 32:] = own
    save_file(stored, folder / "model.safetensors", metadata={"format": "mlx"})
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"quantization": SAID}))
    plain = tmp_path / "plain"
    shutil.copytree(source, plain)
    save_file(exact, plain / "model.safetensors", metadata={"format": "pt"})
    check_tokens(folder, plain)


@pytest.mark.parametrize(
    ("half", "message"),
    [
        ("embed_q", r"two parts of 'model\.layers\.0\.self_attn\.kv_b_proj\.weight' in"),
        ("unembed_out", r"kv_b_proj\.keys\.weight' in .* has shape \[64, 8\], but config"),
    ],
)
def test_halves_that_do_not_fit_are_refused(
    checkpoint: Make, tmp_path: Path, half: str, message: str
) -> None:
    def shorten(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        halves = halve_latents(tensors, heads=4, key=8)
        return {name: t[:, 1:] if half in name.split(".") else t for name, t in halves.items()}

    folder = write_as_mlx(checkpoint("deepseek_v3"), tmp_path / "mlx", shorten)
    with pytest.raises(ModelLoadError, match=message):
        check_model(read_config(folder), Asked())


def test_factors_that_are_in_the_weights(checkpoint: Make, tmp_path: Path) -> None:
    """Falcon H1's, all but those of keys and of what values are made of."""
    factors: dict[str, Any] = {
        "embedding_multiplier": 1.5,
        "lm_head_multiplier": 0.5,
        "attention_in_multiplier": 0.75,
        "attention_out_multiplier": 1.25,
        "key_multiplier": 0.8,
        "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.7,
        "mlp_multipliers": [0.9, 1.1],
        "ssm_multipliers": [1.1, 0.9, 1.2, 0.8, 1.3],
    }
    source = checkpoint("falcon_h1", **factors, tie_word_embeddings=False)
    config = json.loads((source / "config.json").read_text())
    width, states = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    sizes = (width, width, states, states, config["mamba_n_heads"])
    vector = torch.cat(
        [torch.full((n,), own) for n, own in zip(sizes, factors["ssm_multipliers"], strict=True)]
    )
    folded = {
        "embed_tokens.weight": 1.5,
        "lm_head.weight": 0.5,
        "q_proj.weight": 0.75,
        "k_proj.weight": 0.75,
        "o_proj.weight": 1.25,
        "out_proj.weight": 0.7,
        "gate_proj.weight": 0.9,
        "down_proj.weight": 1.1,
    }

    def fold(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for name, tensor in tensors.items():
            if name.endswith("in_proj.weight"):
                tensor.mul_(1.25 * vector[:, None])
            ending = next((end for end in folded if name.endswith(end)), None)
            tensor.mul_(folded[ending] if ending else 1)
        return move_taps(tensors)

    check_tokens(write_as_mlx(source, tmp_path / "mlx", fold), source)


def test_what_cannot_be_undone_is_refused_by_name(checkpoint: Make, tmp_path: Path) -> None:
    source = checkpoint("ernie4_5_moe")

    def leave_out(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        stacked = FORMS["qwen3_moe"](tensors)
        return {name: t for name, t in stacked.items() if "e_score" not in name}

    folder = write_as_mlx(source, tmp_path / "mlx", leave_out)
    with pytest.raises(ModelLoadError, match=r"mlx-lm's form of model type 'ernie4_5_moe', which"):
        check_model(read_config(folder), Asked())
