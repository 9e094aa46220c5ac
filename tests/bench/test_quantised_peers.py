"""Peers get the weights of a GPTQ or AWQ checkpoint as they are, whatever form they read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from bench.harness import quantised
from bench.peers.to_gguf import main as to_gguf
from bench.peers.to_gguf import rotary_pairs_side_by_side
from bench.peers.vllm_auto_round import as_auto_round
from bench.serve.peers import Findings, report

FORMS = tuple(quantised.FORMATS)
LAYER = "model.layers.1."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("checkpoints")
    for form in FORMS:
        quantised.quantise("tiny", form, made / "plain", made / form)
    return made


def rounded(folder: Path, name: str) -> Any:
    """Return a matrix as its codes and scales say, float32 [out, in]."""
    from safetensors.torch import load_file as load_torch

    group = quantised.group_size("tiny")
    weight = load_torch(folder / "plain" / "model.safetensors")[f"{LAYER}{name}.weight"]
    codes, scales = quantised.round_to_codes(weight, group)
    steps = scales.float().repeat_interleave(group, 0)
    return ((codes - 8).float() * steps).t().numpy()


@pytest.mark.parametrize("form", FORMS)
def test_llama_cpp_gets_the_weights_that_the_codes_say(
    form: str, folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    to_gguf(folder / form, file, "BF16")
    found = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    heads = json.loads((folder / form / "config.json").read_text())["num_key_value_heads"]
    for name, theirs in (("mlp.down_proj", "ffn_down"), ("self_attn.k_proj", "attn_k")):
        expected = rounded(folder, name)
        if theirs == "attn_k":
            expected = rotary_pairs_side_by_side(expected, heads)
        tensor = found[f"blk.1.{theirs}.weight"]
        assert tensor.tensor_type == gguf.GGMLQuantizationType.Q4_0
        assert np.array_equal(gguf.quants.dequantize(tensor.data, tensor.tensor_type), expected)
    assert found["token_embd.weight"].tensor_type == gguf.GGMLQuantizationType.BF16


def test_zero_points_that_the_blocks_have_not_are_refused(folder: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "other"
    checkpoint.mkdir()
    for file in (folder / "awq").iterdir():
        (checkpoint / file.name).write_bytes(file.read_bytes())
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"]["quant_method"] = "gptq"  # which stores one less
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit, match="zero points other than 8"):
        to_gguf(checkpoint, tmp_path / "model.gguf", "BF16")


@pytest.mark.parametrize("form", FORMS)
def test_vllm_gets_the_same_tensors_in_auto_rounds_name(form: str, folder: Path) -> None:
    other = as_auto_round(folder / form)
    assert other == as_auto_round(folder / form)
    before, after = (load_raw(each / "model.safetensors") for each in (folder / form, other))
    assert before.keys() - after.keys() == {name for name in before if name.endswith("g_idx")}
    assert all(np.array_equal(before[name], after[name]) for name in after)
    said = json.loads((other / "config.json").read_text())["quantization_config"]
    assert said["packing_format"] == f"auto_round:auto_{form}"
    assert (other / "tokenizer.json").exists()


def load_raw(file: Path) -> dict[str, Any]:
    from safetensors.torch import load_file as load_torch

    return {name: tensor.float().numpy() for name, tensor in load_torch(file).items()}


def test_a_report_has_all_forms_and_who_was_not_measured() -> None:
    def row(server: str, rate: float) -> dict[str, Any]:
        times = {"p50": 1.0, "p99": 2.0}
        counts = {"requests": 2, "completed": 2, "output_tokens": 10, "cpu_s": 0.1, "errors": []}
        return {
            **counts, "server": server, "output_tokens_per_s": rate, "ttft_ms": times,
            "itl_ms": times,
        }  # fmt: skip

    first = Findings("gptq", [[row("ours", 30.0), row("theirs", 10.0)]], notes={"theirs": "so"})
    second = Findings("awq", [[row("ours", 40.0)]], missing={"theirs": "it ended"})
    text, written = report([first, second])
    assert [(r["numbers"], r["server"], r["ours, times"]) for r in written["rows"]] == [
        ("gptq", "ours", 1.0),
        ("gptq", "theirs", 3.0),
        ("awq", "ours", 1.0),
    ]
    assert written["rows"][0]["CPU ms / token"] == pytest.approx(10)
    assert "theirs: so" in text.splitlines()
    assert "not measured, awq: theirs: it ended" in text.splitlines()
