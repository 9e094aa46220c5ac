"""Blocks of GGUF files: turned, cut and stacked as numbers are, and multiplied as they lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.shard.cpu_backend.kernel_support import MIXTURES, cpu_runner
from tests.shard.gguf.converted_first import made
from tests.shard.gguf.files import NEW, answers, gguf, write
from tests.shard.torch_backend.golden import Golden, assert_greedy
from tests.shard.torch_backend.models_support import generated, prompts, run, sequences
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.fit.cpu_kernels import find_unsupported
from tgi_trio.model.gguf.folder import gguf_folder
from tgi_trio.shard.cpu_backend.tables import Code

pytestmark = pytest.mark.usefixtures("one_thread")

PARTS = ("gate", "up", "down")
# Of what is turned, cut or stacked, and has inputs enough for blocks.
BLOCKS = {
    "gpt2": {"n_embd": 128},
    "gptneox": {},
    "falcon-40b": {},
    "deepseek2": {"qk_nope_head_dim": 32, "kv_lora_rank": 32, "v_head_dim": 32},
    "phimoe": {},
    "gpt-oss": {"intermediate_size": 64},
}


@pytest.mark.parametrize("case", BLOCKS)
def test_blocks_are_turned_as_numbers_are(
    checkpoint: Callable[..., Path], tmp_path: Path, case: str
) -> None:
    """A file of blocks says what one of their numbers says, to the last bit."""
    name, _, said, arrays = made(checkpoint, case, **BLOCKS[case])
    kind = gguf.GGMLQuantizationType.Q8_0
    blocks = {
        own: gguf.quantize(np.ascontiguousarray(array), kind)
        for own, array in arrays.items()
        if own.endswith(".weight") and array.ndim > 1 and array.shape[-1] % 32 == 0
    }
    exact = {own: gguf.dequantize(content, kind) for own, content in blocks.items()}
    write(tmp_path / "blocks.gguf", name, said, arrays | blocks)
    write(tmp_path / "exact.gguf", name, said, arrays | exact)
    rows, recorder = answers(tmp_path / "blocks.gguf", tmp_path)
    expected, other = answers(tmp_path / "exact.gguf", tmp_path)
    for row, twin in zip(rows, expected, strict=True):
        assert generated(row) == generated(twin)
        torch.testing.assert_close(
            recorder.logits(row.id), other.logits(twin.id), atol=0.0, rtol=0.0
        )


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q5_1"])
def test_cpu_kernels_multiply_stacked_experts_as_they_are_stored(
    checkpoint: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    """Their logits are those that transformers has with the numbers that the blocks mean."""
    name, source, said, arrays = made(checkpoint, "qwen3moe", **MIXTURES["qwen3_moe"])
    number = gguf.GGMLQuantizationType[kind]
    blocks = {
        own: gguf.quantize(np.ascontiguousarray(array), number)
        for own, array in arrays.items()
        if "_exps." in own
    }
    exact = {own: torch.from_numpy(gguf.dequantize(b, number)) for own, b in blocks.items()}
    golden = Golden(source)
    for i, layer in enumerate(golden.model.model.layers):
        gate, up, down = (exact[f"blk.{i}.ffn_{part}_exps.weight"] for part in PARTS)
        layer.mlp.experts.gate_up_proj.data = torch.cat((gate, up), dim=1)
        layer.mlp.experts.down_proj.data = down
    write(tmp_path / "blocks.gguf", name, said, arrays | blocks, kind)
    folder = gguf_folder(tmp_path / "blocks.gguf", tmp_path / "cache", tokenizer=False)
    rows = sequences(prompts(8), 3, new=NEW)
    with cpu_runner(folder) as (runner, recorder):
        operations = runner._forward.program.operations
        experts = operations[operations["code"] == Code.EXPERTS]
        assert len(experts) and experts["multiply"].all()
        run(runner, rows, chunk=20, joins=3, seed=1)
    texts = [(row.token_ids[: row.prompt_length].tolist(), generated(row)) for row in rows]
    expected = torch.cat([golden.logits(*text) for text in texts])
    found = torch.cat([recorder.logits(row.id) for row in rows])
    assert float((found - expected).norm() / expected.norm()) < 1e-3


@pytest.mark.parametrize(("case", "more"), [("llama3", {}), ("gpt-oss-yarn", MIXTURES["gpt_oss"])])
def test_scaled_positions_are_no_reason_against_the_cpu_kernels(
    checkpoint: Callable[..., Path], tmp_path: Path, case: str, more: dict[str, Any]
) -> None:
    name, source, said, arrays = made(checkpoint, case, **more)
    write(tmp_path / "model.gguf", name, said, arrays)
    folder = gguf_folder(tmp_path / "model.gguf", tmp_path / "cache", tokenizer=False)
    spec = decoder_spec(read_config(folder))
    assert spec is not None and find_unsupported(spec, "float32") is None
    rows = sequences(prompts(6), 3, new=NEW)
    with cpu_runner(folder) as (runner, recorder):
        run(runner, rows, chunk=20, joins=2)
    golden = Golden(source)
    for row in rows:
        assert_greedy(golden, recorder, row, tolerance=2e-3)


def test_cpu_kernels_multiply_gpt_oss_as_its_files_have_it(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Experts in MXFP4, gates and ups apart, with biases; what the blocks mean is a checkpoint."""
    name, source, said, arrays = made(checkpoint, "gpt-oss-yarn", **MIXTURES["gpt_oss"])
    number = gguf.GGMLQuantizationType.MXFP4
    blocks = {
        own: gguf.quantize(np.ascontiguousarray(array), number)
        for own, array in arrays.items()
        if own.endswith("_exps.weight")
    }
    exact = {own: torch.from_numpy(gguf.dequantize(b, number)) for own, b in blocks.items()}
    golden = Golden(source)
    for i, layer in enumerate(golden.model.model.layers):
        gate, up, down = (exact[f"blk.{i}.ffn_{part}_exps.weight"] for part in PARTS)
        both = torch.stack((gate, up), dim=2).flatten(1, 2)  # each gate beside its up
        layer.mlp.experts.gate_up_proj.data = both.transpose(1, 2).contiguous()
        layer.mlp.experts.down_proj.data = down.transpose(1, 2).contiguous()
    write(tmp_path / "blocks.gguf", name, said, arrays | blocks, "MXFP4")
    folder = gguf_folder(tmp_path / "blocks.gguf", tmp_path / "cache", tokenizer=False)
    rows = sequences(prompts(8), 3, new=NEW)
    with cpu_runner(folder) as (runner, recorder):
        operations = runner._forward.program.operations
        experts = operations[operations["code"] == Code.EXPERTS]
        assert len(experts) and experts["multiply"].all()
        run(runner, rows, chunk=20, joins=3, seed=1)
    texts = [(row.token_ids[: row.prompt_length].tolist(), generated(row)) for row in rows]
    expected = torch.cat([golden.logits(*text) for text in texts])
    found = torch.cat([recorder.logits(row.id) for row in rows])
    assert float((found - expected).norm() / expected.norm()) < 1e-3
