"""As `test_families.py`, for newer architectures: what the converter does is in `converted.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.masking_utils import sliding_window_overlay

from tests.shard.cpu_backend.kernel_support import HYBRIDS, cpu_runner
from tests.shard.gguf.cases_newer import FAMILIES, SEEING
from tests.shard.gguf.converted import convert
from tests.shard.gguf.files import NEW, answers, gguf, write
from tests.shard.torch_backend.golden import Golden, assert_greedy
from tests.shard.torch_backend.models_support import generated, prompts, run, sequences
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.gguf.folder import gguf_folder
from tgi_trio.model.matrices.delta_rule import delta_rule_refs
from tgi_trio.model.matrices.references import run_of
from tgi_trio.model.specs.mixers import DeltaRule
from tgi_trio.model.split import unit_share
from tgi_trio.shard.checkpoint.formats.plain import PlainMatrix
from tgi_trio.shard.checkpoint.side_by_side import join_columns
from tgi_trio.testing.wrapped_checkpoints import make_wrapped

pytestmark = pytest.mark.usefixtures("one_thread")


# Sizes that the CPU kernels hold.
ON_CPU: dict[str, dict[str, Any]] = {
    "afmoe": {"head_dim": 32},
    "laguna with wide gates": {"head_dim": 32, "shared_expert_intermediate_size": 64},
    "granite_swa with experts": {"intermediate_size": 64, "shared_intermediate_size": 64},
    "minicpm3": {"kv_lora_rank": 32, "q_lora_rank": 32, "v_head_dim": 32}
    | {"qk_nope_head_dim": 32, "qk_rope_head_dim": 32},
}


def made(
    checkpoint: Callable[..., Path], case: str, folder: Path | None = None, **more: Any
) -> tuple[str, Path, dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    """Return a case's architecture, checkpoint, and what its file says and holds.

    `folder`: for a checkpoint of a model that sees, of which a file has the text.
    """
    family, changes = FAMILIES[case]
    name = case.partition(" ")[0]
    if folder is None:
        source = checkpoint(family, **changes | more)
    else:
        source = make_wrapped(folder, family, **changes | more)
    config = json.loads((source / "config.json").read_text())
    config |= config.get("text_config", {})
    tensors = load_file(source / "model.safetensors")
    stored = {own: tensor.float().numpy() for own, tensor in tensors.items()}
    said, arrays = convert(case, config, stored)
    tokens = [str(token) for token in range(config["vocab_size"])]
    said |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens}
    return name, source, said, arrays


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", FAMILIES)
def test_tokens_and_logits_are_those_of_the_source(
    checkpoint: Callable[..., Path], tmp_path: Path, case: str
) -> None:
    wrapped = tmp_path if FAMILIES[case][0] in SEEING else None
    name, source, said, arrays = made(checkpoint, case, wrapped)
    write(tmp_path / "model.gguf", name, said, arrays)
    rows, recorder = answers(tmp_path / "model.gguf", tmp_path)
    golden = Golden(source)
    for row in rows:
        assert_greedy(golden, recorder, row, tolerance=1e-3)


@pytest.mark.parametrize("case", ON_CPU)
def test_cpu_kernels_say_what_the_source_says(
    checkpoint: Callable[..., Path], tmp_path: Path, case: str
) -> None:
    name, source, said, arrays = made(checkpoint, case, **ON_CPU[case])
    write(tmp_path / "model.gguf", name, said, arrays)
    rows = sequences(prompts(6)[1::2], 3, new=NEW)
    folder = gguf_folder(tmp_path / "model.gguf", tmp_path / "cache", tokenizer=False)
    with cpu_runner(folder) as (runner, recorder):
        run(runner, rows, chunk=20, joins=2)
    golden = Golden(source)
    for row in rows:
        assert_greedy(golden, recorder, row, tolerance=1e-3)


def test_whole_numbers_are_no_weights(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    name, _, said, arrays = made(checkpoint, "deepseek4")
    arrays["blk.0.attn_norm.weight"] = arrays["blk.0.attn_norm.weight"].astype(np.int32)
    write(tmp_path / "model.gguf", name, said, arrays)
    with pytest.raises(ModelLoadError, match="is of type I32, which nothing here reads"):
        answers(tmp_path / "model.gguf", tmp_path)


def test_a_window_of_mimo_is_stated_with_the_token_itself(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Not so where a checkpoint as published says it, in a key that no file has."""
    name, source, said, arrays = made(checkpoint, "mimo2")
    write(tmp_path / "model.gguf", name, said, arrays)
    folder = gguf_folder(tmp_path / "model.gguf", tmp_path / "cache", tokenizer=False)
    window, last = said["mimo2.attention.sliding_window"], 99
    assert _window(folder) == window
    # What llama.cpp masks of the tokens before one, and what transformers does.
    seen = [place for place in range(last + 1) if not last - place >= window]
    masked = sliding_window_overlay(window)
    assert seen == [place for place in range(last + 1) if masked(0, 0, last, place)]

    config = json.loads((source / "config.json").read_text()) | {"sliding_window_size": window - 1}
    published = tmp_path / "published"
    published.mkdir()
    (published / "config.json").write_text(json.dumps(config))
    assert AutoConfig.from_pretrained(published).sliding_window == _window(published) == window


def _window(folder: Path) -> int:
    spec = decoder_spec(read_config(folder))
    assert spec is not None
    return max(layer.window for layer in spec.layers)


def test_cpu_kernels_let_value_heads_take_turns(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Qwen 3.5's, whose last matrix stays the blocks that it is."""
    name, source, said, arrays = made(checkpoint, "qwen35", **HYBRIDS["qwen3_5_text"])
    kind = gguf.GGMLQuantizationType.Q8_0
    blocks = {
        own: gguf.quantize(np.ascontiguousarray(array), kind)
        for own, array in arrays.items()
        if own.endswith("ssm_out.weight")
    }
    golden = Golden(source)
    keys, each = 2, 2
    for own, content in blocks.items():
        exact = gguf.dequantize(content, kind)
        heads = exact.reshape(len(exact), each, keys, -1).swapaxes(1, 2)
        layer = golden.model.model.layers[int(own.split(".")[1])]
        layer.linear_attn.out_proj.weight.data = torch.tensor(heads.reshape(exact.shape))
    write(tmp_path / "model.gguf", name, said, arrays | blocks)
    folder = gguf_folder(tmp_path / "model.gguf", tmp_path / "cache", tokenizer=False)
    rows = sequences(prompts(6), 3, new=NEW)
    with cpu_runner(folder) as (runner, recorder):
        run(runner, rows, chunk=20, joins=2)
    texts = [(row.token_ids[: row.prompt_length].tolist(), generated(row)) for row in rows]
    expected = torch.cat([golden.logits(*text) for text in texts])
    found = torch.cat([recorder.logits(row.id) for row in rows])
    assert float((found - expected).norm() / expected.norm()) < 1e-3


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_have_the_value_heads_of_their_key_heads(ranks: int) -> None:
    """In the order of the file, in which they take turns on a rank, too."""
    mixer = DeltaRule(
        key_heads=4, value_heads=12, key_dim=2, value_dim=3, taps=4,
        layout="stacked", norm_eps=1e-6, tiled=True,
    )  # fmt: skip
    refs = delta_rule_refs(mixer, "mixer", 5)
    for rank in range(ranks):
        share = partial(unit_share, rank=rank, ranks=ranks)
        mine = range(4)[share(run_of("heads", 4))]
        heads = [i * 4 + key for i in range(3) for key in mine]
        spans = refs.rate.units.spans(share(refs.rate.units))
        assert [place for span in spans for place in range(span.start, span.stop)] == heads
        columns = next(iter(refs.output.cuts(share))).columns
        found = [place for span in columns for place in range(span.start, span.stop)]
        assert found == [3 * head + place for head in heads for place in range(3)]
        assert len(columns) == (1 if ranks == 1 else 3)


def test_columns_in_several_runs_are_one_matrix() -> None:
    whole = np.arange(60, dtype=np.float32).reshape(4, 15)
    spans = [slice(2, 5), slice(9, 11), slice(12, 15)]
    joined = join_columns([PlainMatrix(whole).columns(span) for span in spans])
    expected = np.concatenate([whole[:, span] for span in spans], axis=1)
    assert joined.shape == (4, 8)
    np.testing.assert_array_equal(joined.dequantised(), expected)
    np.testing.assert_array_equal(joined.rows(slice(1, 3)).dequantised(), expected[1:3])
    np.testing.assert_array_equal(joined.columns(slice(1, 6)).dequantised(), expected[:, 1:6])
    np.testing.assert_array_equal(joined.columns(slice(3, 5)).dequantised(), expected[:, 3:5])


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "heads that share no keys": ("qwen35", {"ssm.group_count": 3}, "4 heads cannot share 3 keys"),
    "no heads of a state": ("qwen35moe", {"ssm.time_step_rank": 0}, "time_step_rank cannot be 0"),
    "no state": ("qwen3next", {"ssm.state_size": None}, "has no qwen3next.ssm.state_size"),
    "all layers draft": ("qwen35", {"nextn_predict_layers": 5}, "nextn_predict_layers is 5"),
    "kinds of few layers": ("qwen35", {"attention.recurrent_layers": [1]}, "names not all layers"),
    "another choice": ("kimi-linear", {"expert_gating_func": 1}, "chosen as 1 says"),
    "all of a key turns": ("kimi-linear", {"rope.dimension_count": 16}, "turns 16 of 16"),
    "every layer shares": ("gemma3n", {"attention.shared_kv_layers": 4}, "shared_kv_layers is 4"),
    "a bound that is none": (
        "gemma3n", {"activation_sparsity_scale": [float("nan")] * 4}, "sparsity_scale cannot be",
    ),
    "heads of a kind": (
        "gemma4 of few", {"attention.head_count_kv": [2, 1, 4, 1]}, "differs among layers",
    ),
    "widths by layer": ("gemma4", {"feed_forward_length": [128, 64]}, "cannot be .128, 64."),
    "mamba with heads": ("mamba", {"attention.head_count": 4}, "states num_attention_heads"),
    "a state in halves": ("mamba2", {"ssm.time_step_rank": 7}, "7 heads cannot share a state"),
    "no rule": ("jamba", {"attention.head_count_kv": [2, 2, 0]}, "no rule by which"),
    "no multiple": ("jamba", {"ssm.inner_size": 100}, "100 is no multiple of 64"),
    "heads beside windows": ("mimo2", {"attention.head_count_kv": [2, 3]}, "cannot be .2, 3."),
    "no activation": ("apertus", {"/xielu.beta": None}, "xielu.beta names not all layers"),
    "endless activation": ("apertus", {"/xielu.eps": [float("inf")] * 2}, "xielu.eps cannot be"),
    "too many experts": ("llama4", {"expert_used_count": 5}, "5 of 4 experts"),
    "experts in Ministral": ("mistral3", {"expert_count": 4}, "has experts"),
    "groups behind a softmax": (
        "mistral4", {"expert_group_count": 2, "expert_group_used_count": 1}, "softmax of groups",
    ),
    "shares that are not": ("afmoe", {"expert_weights_norm": False}, "are not normalised"),
    "another choice of Trinity's": ("afmoe", {"expert_gating_func": 1}, "gating_func is 1"),
    "no pattern": ("exaone-moe", {"attention.sliding_window_pattern": 0}, "pattern cannot be 0"),
    "a pattern of few layers": (
        "mellum", {"attention.sliding_window_pattern": [True]}, "names not all layers",
    ),
    "weighed experts": ("cohere2moe", {"expert_weights_scale": 2.0}, "multiplied by a number"),
    "gates of other heads": (
        "laguna", {"attention.head_count": [4, 4, 8]}, "gates of its heads are .4, 8, 8.",
    ),
    "more turns than a head": ("laguna", {"rope.dimension_count_swa": 32}, "turns 32 of 16"),
    "heads of a kind of Step's": (
        "step35", {"attention.head_count": [4, 8, 4]}, "head_count differs among layers",
    ),
    "other KV heads in a window": (
        "step35", {"attention.head_count_kv": [2, 4, 4]}, "another number of KV heads",
    ),
    "limits of few layers": ("step35", {"swiglu_clamp_exp": [0.5]}, "clamp_exp names not all"),
    "endless limits": ("step35", {"swiglu_clamp_exp": [float("inf")] * 3}, "clamp_exp cannot be"),
    "no windows": ("muse-glimmer", {"attention.sliding_window": None}, "no layer of it has"),
    "other scores of experts": ("deepseek4", {"expert_gating_func": 2}, "gating_func is 2"),
    "runs of two lengths": (
        "deepseek4", {"attention.compress_ratios": [0, 4, 24, 8]}, "compress_ratios differ",
    ),
    "limits by layer": (
        "deepseek4", {"swiglu_clamp_exp": [0.5, 0.5, 0.5, 1.0]}, "not the same everywhere",
    ),
    "turns of GLM 5.3": ("glm5-next", {"rope.dimension_count": 8}, "it turns by position"),
    "shared keys": ("xverse", {"attention.head_count_kv": 2}, "its heads share keys"),
    "a dense layer of Ling's": (
        "bailingmoe", {"leading_dense_block_count": 1}, "first layers have no experts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_by_name(
    checkpoint: Callable[..., Path], tmp_path: Path, case: str
) -> None:
    model, changes, reason = REFUSED[case]
    wrapped = tmp_path if FAMILIES[model][0] in SEEING else None
    name, _, said, arrays = made(checkpoint, model, wrapped)
    for key, value in changes.items():
        said[key[1:] if key.startswith("/") else f"{name}.{key}"] = value
    said = {key: value for key, value in said.items() if value is not None}
    write(tmp_path / "model.gguf", name, said, arrays)
    with pytest.raises(ModelLoadError, match=reason):
        gguf_folder(tmp_path / "model.gguf", tmp_path / "cache", tokenizer=False)
