"""Every family of the table says what transformers says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.shard.torch_backend.family_variants import VARIANTS
from tests.shard.torch_backend.golden import Golden, assert_as_golden, assert_greedy
from tests.shard.torch_backend.models_support import (
    ALONE,
    NEWER,
    TOLERANCES,
    baichuan,
    generated,
    load,
    prompts,
    run,
    sequences,
)
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.check import check_checkpoint, supported_spec
from tgi_trio.model.config import read_config
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner
from tgi_trio.testing.checkpoints import make_checkpoint

PROMPTS = prompts(8)[2:]
NEW = 12
pytestmark = pytest.mark.usefixtures("one_thread")

Checkpoint = Callable[..., Path]

# Phi-3.5-MoE's: a scale with each set of divisors, and the sets differ.
TWO_SCALES = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [2.0 + 0.3 * i for i in range(8)],
    "short_mscale": 1.1,
    "long_mscale": 1.3,
}


ROPE = {
    "linear": {"factor": 2.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "proportional": {"partial_rotary_factor": 0.5, "factor": 1.0},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", sorted(set(ALONE) - set(NEWER)))
def test_family(checkpoint: Checkpoint, family: str) -> None:
    assert_as_golden(checkpoint(family), PROMPTS, NEW, tolerance=TOLERANCES.get(family, 1e-4))


def _check_against(folder: Path, golden: Golden) -> None:
    runner, recorder = load(folder)
    rows = sequences(PROMPTS, shuffle=3, new=NEW)
    run(runner, rows, chunk=20, joins=2)
    for row in rows:
        assert_greedy(golden, recorder, row)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("RefinedWebModel", {}),
        ("RefinedWeb", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ],
)
def test_falcon_by_its_first_name(
    checkpoint: Checkpoint, tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    original = checkpoint("falcon", **changes)
    folder = Path(shutil.copytree(original, tmp_path / "old"))
    config = json.loads((folder / "config.json").read_text())
    old = {"model_type": name}
    for key, first in (("num_attention_heads", "n_head"), ("num_hidden_layers", "n_layer")):
        old[first] = config.pop(key)
    kv_heads = config.pop("num_kv_heads", None)
    if config.pop("new_decoder_architecture"):
        old["n_head_kv"] = kv_heads
    (folder / "config.json").write_text(json.dumps(config | old))
    _check_against(folder, Golden(original))


def test_mimo_is_qwen2_beside_a_layer_that_drafts(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Its own code makes Qwen2's classes do the rest; the layer is not used, as there."""
    original = checkpoint("qwen2")
    folder = Path(shutil.copytree(original, tmp_path / "mimo"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mimo", "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    file = folder / "model.safetensors"
    drafts = {
        f"model.mtp_layers.0.{name}.weight": torch.ones(64)
        for name in ("token_layernorm", "hidden_layernorm", "self_attn.q_proj", "final_layernorm")
    }
    save_file(load_file(file) | drafts, file, {"format": "pt"})
    check_checkpoint(read_config(folder), supported_spec(read_config(folder)))
    _check_against(folder, Golden(original))


class GoldenBiases(Golden):
    """Llama of transformers that does not rotate, with linear biases in its mask."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.model.model.rotary_emb.inv_freq.zero_()

    @torch.no_grad()
    def logits(self, prompt: ListLike[int], tokens: ListLike[int]) -> torch.Tensor:
        ids = torch.tensor([[*prompt, *tokens]])
        places = torch.arange(ids.shape[1])
        behind = places - places[:, None]  # [queries, keys], at most 0 where a key is seen
        slopes = torch.tensor([0.25, 0.0625, 0.015625, 0.00390625])  # of four heads
        mask = (slopes[:, None, None] * behind).masked_fill(behind > 0, float("-inf"))
        out = self.model(input_ids=ids, attention_mask=mask[None])
        return out.logits[0, len(prompt) - 1 : -1].float()


def test_baichuan_is_llama_with_one_projection(checkpoint: Checkpoint, tmp_path: Path) -> None:
    original = checkpoint("llama", num_key_value_heads=4)
    _check_against(baichuan(original, tmp_path / "packed"), Golden(original))


def test_baichuan_2_normalises_its_head(checkpoint: Checkpoint, tmp_path: Path) -> None:
    original = checkpoint("llama", num_key_value_heads=4, vocab_size=125696)
    golden = Golden(original)
    golden.model.lm_head.weight.data /= golden.model.lm_head.weight.norm(dim=1, keepdim=True)
    _check_against(baichuan(original, tmp_path / "packed"), golden)


def test_baichuan_13b_has_linear_biases(checkpoint: Checkpoint, tmp_path: Path) -> None:
    original = checkpoint("llama", num_key_value_heads=4)
    folder = baichuan(original, tmp_path / "packed", positions=False)
    _check_against(folder, GoldenBiases(original))


def test_olmo_hybrid_as_the_hub_has_it(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """transformers renames a norm as it saves, and cuts convolutions in three of one width."""
    original = checkpoint("olmo_hybrid", linear_key_head_dim=8, linear_value_head_dim=16)
    folder = Path(shutil.copytree(original, tmp_path / "hub"))
    tensors = load_file(folder / "model.safetensors")
    norm = tensors.pop("model.layers.1.feedforward_layer_norm.weight")
    tensors["model.layers.1.post_attention_layernorm.weight"] = norm
    for layer in (0, 2):
        names = [f"model.layers.{layer}.linear_attn.{letter}_conv1d.weight" for letter in "qkv"]
        parts = torch.cat([tensors[name] for name in names]).split((32, 32, 64))
        tensors |= {name: part.clone() for name, part in zip(names, parts, strict=True)}
    save_file(tensors, folder / "model.safetensors")
    _check_against(folder, Golden(original))


def test_deepseek_v4_as_the_hub_has_it(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Without the model's prefix, with another name of a norm, and with layers that draft."""
    original = checkpoint("deepseek_v4")
    folder = Path(shutil.copytree(original, tmp_path / "hub"))
    changes = {
        "embed_tokens.": "embed.",
        "hc_head.hc_": "hc_head_",
        ".attn.norm.": ".attn.kv_norm.",
    }
    tensors = {"mtp.0.norm.weight": torch.ones(64)}
    for name, tensor in load_file(folder / "model.safetensors").items():
        name = name.removeprefix("model.")
        for saved, published in changes.items():
            name = name.replace(saved, published)
        tensors[name] = tensor
    assert {"embed.weight", "head.weight", "hc_head_fn"} < tensors.keys()
    save_file(tensors, folder / "model.safetensors")
    _check_against(folder, Golden(original))


@pytest.mark.parametrize("family", ["deepseek_v4", "hy_v4"])
def test_names_of_modules(checkpoint: Checkpoint, tmp_path: Path, family: str) -> None:
    """Of families that transformers saves by others. A layer's experts are one tensor then."""
    original = checkpoint(family)
    folder = Path(shutil.copytree(original, tmp_path / "own"))
    golden = Golden(original)
    golden.model.save_pretrained(folder, save_original_format=False)
    assert "model.layers.1.mlp.experts.gate_up_proj" in load_file(folder / "model.safetensors")
    _check_against(folder, golden)


def test_axk1_as_the_hub_has_it(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Without biases for the choice of experts; a dense layer has a norm that nothing reads."""
    original = checkpoint("axk1")
    folder = Path(shutil.copytree(original, tmp_path / "hub"))
    tensors = load_file(folder / "model.safetensors")
    bias = tensors.pop("model.layers.1.mlp.gate.e_score_correction_bias")
    assert bias.any()
    norm = tensors["model.layers.1.post_mlp_layernorm.weight"]
    tensors["model.layers.0.post_mlp_layernorm.weight"] = norm.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = read_config(folder)
    check_checkpoint(config, supported_spec(config))
    _check_against(folder, Golden(folder))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "changes"), VARIANTS, ids=lambda v: str(v)[:60])
def test_variant(checkpoint: Checkpoint, family: str, changes: dict[str, Any]) -> None:
    assert_as_golden(
        checkpoint(family, **changes), PROMPTS, NEW, tolerance=TOLERANCES.get(family, 1e-4)
    )


@pytest.mark.parametrize("kind", sorted(ROPE))
def test_rotary_scaling(checkpoint: Checkpoint, kind: str) -> None:
    parameters = {"rope_type": kind, "rope_theta": 10000.0, **ROPE[kind]}
    assert_as_golden(checkpoint("llama", rope_parameters=parameters), PROMPTS, NEW)


@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "dynamic"), ("llama", "longrope"), ("nanochat", "dynamic")]
)
def test_rotary_scaling_by_length(checkpoint: Checkpoint, family: str, kind: str) -> None:
    """Frequencies change within the run; only decoding step by step says what is right."""
    parameters: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
    if kind == "longrope":
        parameters |= {
            "short_factor": [1.0 + 0.1 * i for i in range(8)],
            "long_factor": [2.0 + 0.3 * i for i in range(8)],
            "original_max_position_embeddings": 40,
        }
    limit = 160 if kind == "longrope" else 40
    folder = checkpoint(family, rope_parameters=parameters, max_position_embeddings=limit)
    runner, _ = load(folder)
    rows = sequences(PROMPTS, shuffle=3, new=NEW)
    run(runner, rows, chunk=20, joins=2)
    for row, prompt in zip(rows, PROMPTS, strict=True):
        # A model of its own per prompt: transformers' dynamic frequencies outlive a sequence.
        assert generated(row) == Golden(folder).greedy(prompt, NEW)[0]


@pytest.mark.parametrize("original", [8, 200])
def test_two_scales_of_rotation(checkpoint: Checkpoint, original: int) -> None:
    """All sequences beyond the original length, or none; transformers is told the set to use."""
    parameters = TWO_SCALES | {"original_max_position_embeddings": original}
    folder = checkpoint("phimoe", rope_parameters=parameters)
    if original < min(map(len, PROMPTS)):
        told = parameters | {"short_factor": TWO_SCALES["long_factor"]}
        oracle = checkpoint("phimoe", rope_parameters=told)
    else:
        oracle = folder
    _check_against(folder, Golden(oracle))


@pytest.mark.parametrize(
    ("family", "changes", "reuse"),
    [("llama", {}, True), ("jetmoe", {}, True), ("falcon", {"alibi": True}, False)],
)
def test_a_model_says_whether_its_blocks_may_serve_another_sequence(
    tmp_path: Path, family: str, changes: dict[str, Any], reuse: bool
) -> None:
    make_checkpoint(tmp_path, family, **changes)
    assert (
        load_torch_runner(
            ShardSettings(model_path=tmp_path), read_config(tmp_path)
        ).info.prefix_reuse
        is reuse
    )


def test_frequencies_that_change_with_the_length_forbid_reuse(tmp_path: Path) -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    make_checkpoint(tmp_path, "llama", rope_parameters=scaling)
    assert (
        load_torch_runner(
            ShardSettings(model_path=tmp_path), read_config(tmp_path)
        ).info.prefix_reuse
        is False
    )
