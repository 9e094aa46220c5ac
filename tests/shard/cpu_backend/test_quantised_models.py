"""Models whose weights are multiplied as they are stored: tokens of the numbers that they mean."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.shard.cpu_backend.kernel_support import FITTING, cpu_runner
from tests.shard.torch_backend.golden import Golden, assert_greedy
from tests.shard.torch_backend.models_support import (
    BLOCK,
    GreedyRecorder,
    generated,
    prompts,
    run,
    sequence,
    sequences,
    tables,
)
from tests.support.gguf_files import Tensor, float32, gguf, llama_tensors
from tests.support.quantised import DATA, real_checkpoint
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.gguf.block_types import SERVED
from tgi_trio.model.gguf.folder import gguf_folder
from tgi_trio.shard.checkpoint.lookup import open_checkpoint
from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.cpu_backend.instructions import multiplies_pairs
from tgi_trio.shard.cpu_backend.kinds.kind import active_block_bytes
from tgi_trio.shard.cpu_backend.loading import load_cpu_runner

PROMPTS = prompts(16)
pytestmark = pytest.mark.usefixtures("one_thread")

Checkpoint = Callable[..., Path]
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
NUMBERS = {kind.name: number for number, kind in SERVED.items()}
# Where the halves of scales lie in a block, and how large they may be for weights of about 0.05.
SCALES = {
    "Q4_0": ([0], 0.01),
    "Q4_1": ([0], 0.01),
    "Q5_0": ([0], 0.005),
    "Q8_0": ([0], 0.0007),
    "Q2_K": ([80], 0.003),
    "Q4_K": ([0], 0.0003),
    "Q5_K": ([0], 0.00015),
    "Q6_K": ([208], 0.00004),
    "TQ1_0": ([52], 0.08),
    "TQ2_0": ([64], 0.08),
}


def random_blocks(name: str, shape: tuple[int, ...], draw: np.random.Generator) -> Tensor:
    """Return a matrix of random blocks whose weights are neither large nor all alike."""
    kind = next(kind for kind in SERVED.values() if kind.name == name)
    blocks = draw.integers(0, 256, (*shape[:-1], shape[-1] // kind.weights, kind.bytes), np.uint8)
    places, size = SCALES[name]
    for place in places:
        scales = draw.uniform(0.5 * size, size, blocks.shape[:-1]).astype("<f2")
        blocks[..., place : place + 2] = scales[..., None].view(np.uint8)
        if name in ("Q4_K", "Q5_K", "Q2_K"):  # lows of about half of what the codes are
            lows = (scales * np.float16(7 if name == "Q4_K" else 15)).astype("<f2")
            blocks[..., place + 2 : place + 4] = lows[..., None].view(np.uint8)
        if name == "TQ2_0":  # no code of 3, which stands for 2
            blocks[..., :64] &= ~((blocks[..., :64] & np.uint8(0x55)) << np.uint8(1))
        if name == "Q4_1":
            blocks[..., 2:4] = (scales * np.float16(-7.5)).astype("<f2")[..., None].view(np.uint8)
    return shape, NUMBERS[name], blocks.tobytes()


def write(source: Path, target: Path, kinds: Mapping[str, str], other: str) -> Path:
    """Write a Llama as GGUF; `kinds`: of matrices by a part of their names, `other` of the rest.

    Returns its folder.
    """
    config = json.loads((source / "config.json").read_text())
    tensors = llama_tensors(source, SIZES["num_attention_heads"], SIZES["num_key_value_heads"])
    draw = np.random.default_rng(11)
    stored = {}
    for name, array in tensors.items():
        if array.ndim == 1:
            stored[name] = float32(array)
            continue
        kind = next((kind for part, kind in kinds.items() if part in name), other)
        stored[name] = random_blocks(kind, array.shape, draw) if kind != "F32" else float32(array)
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.dimension_count": config["head_dim"],
        "llama.rope.freq_base": config["rope_parameters"]["rope_theta"],
        "llama.vocab_size": config["vocab_size"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [f"<{i}>" for i in range(config["vocab_size"])],
        "tokenizer.ggml.merges": ["a b"],
    }
    file = target / "model.gguf"
    file.write_bytes(gguf(metadata, stored))
    return gguf_folder(file, target / "cache", tokenizer=False)


def dequantised(source: Path, folder: Path) -> Golden:
    """Return transformers' model with the numbers that the file's weights mean."""
    golden, config = Golden(source), read_config(folder)
    spec = decoder_spec(config)
    assert spec is not None
    with open_checkpoint(config, spec.names.base) as weights:
        for name, parameter in golden.model.named_parameters():
            if parameter.dim() == 2:
                numbers = weights.matrix(name, (parameter.shape[0], parameter.shape[1]))
                parameter.data = torch.from_numpy(np.array(numbers.dequantised()))
    return golden


def rows() -> list[ShardSequence]:
    return sequences(PROMPTS, 3, new=16)


MODELS = {
    "Q4_0 with a head of Q6_K": ({"token_embd": "Q6_K"}, "Q4_0"),
    "Q8_0": ({}, "Q8_0"),
    "Q4_K_M": ({"token_embd": "Q6_K", "0.attn_v": "Q6_K", "1.ffn_down": "Q6_K"}, "Q4_K"),
    "Q4_K_M of a small model": ({"token_embd": "Q8_0", "attn_v": "Q8_0", "down": "Q4_K"}, "Q5_0"),
    "Q2_K, embedding and one more": ({"token_embd": "Q2_K", "ffn_down": "Q2_K"}, "Q8_0"),
    "TQ2_0 and TQ1_0 with a head of Q6_K": ({"token_embd": "Q6_K", "ffn": "TQ1_0"}, "TQ2_0"),
    "Q5_K beside plain numbers": ({"attn_k": "F32", "token_embd": "F32"}, "Q5_K"),
    "a gate and an up of two kinds": ({"ffn_gate": "Q4_0", "attn_v": "Q2_K"}, "Q8_0"),
}


@pytest.fixture(scope="module", params=MODELS)
def model(
    request: pytest.FixtureRequest, checkpoint: Checkpoint, tmp_path_factory: Any
) -> tuple[Path, Golden]:
    source = checkpoint("llama", **SIZES)
    folder = write(source, tmp_path_factory.mktemp("gguf"), *MODELS[request.param])
    return folder, dequantised(source, folder)


@pytest.mark.sampled(2, first=1)
def test_tokens_are_those_of_the_dequantised_weights(model: tuple[Path, Golden]) -> None:
    """With activations of 16 bits, however steps are put together."""
    folder, golden = model
    with cpu_runner(folder, active_bits=16) as (runner, recorder):
        batch = rows()
        run(runner, batch, chunk=20, joins=3, seed=1)
        for row in batch:
            assert_greedy(golden, recorder, row, tolerance=3e-3)
    assert len({tuple(generated(row)) for row in batch}) > len(batch) // 2


@pytest.mark.sampled(2)
def test_a_sequence_has_the_same_logits_alone_and_among_others(
    model: tuple[Path, Golden],
) -> None:
    """To the last bit: with activations of 8 bits, on two threads; chunks are others than alone."""
    folder, _ = model
    with cpu_runner(folder, active_bits=8, cores=(0, 0)) as (runner, recorder):
        batch = rows()
        run(runner, batch, chunk=20, joins=3, seed=1)
        found = [recorder.logits(row.id) for row in batch]
    with cpu_runner(folder, active_bits=8) as (runner, recorder):
        for row, logits in list(zip(rows(), found, strict=True))[::5]:
            run(runner, [row])
            torch.testing.assert_close(recorder.logits(row.id), logits, atol=0.0, rtol=0.0)


@pytest.mark.parametrize(("given", "expected"), [(None, 8), (8, 8), (16, 16)])
def test_activations_are_as_wide_as_asked_for(
    checkpoint: Checkpoint, tmp_path: Path, given: int | None, expected: int
) -> None:
    folder = write(checkpoint("llama", **SIZES), tmp_path, {}, "Q4_0")
    settings = ShardSettings(model_path=folder, activations=given, cpu_threads=1)
    runner = load_cpu_runner(settings, read_config(folder))
    try:
        assert f"(q4_0 x int{expected})" in runner.info.backend
        operations = runner._forward.program.operations
        used = set(operations["active_bytes"][operations["active_bytes"] > 0].tolist())
        assert used == {active_block_bytes(expected)}
    finally:
        runner.close()


def test_activations_of_plain_weights_are_left_alone(
    checkpoint: Checkpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoint("llama", **SIZES)
    settings = ShardSettings(model_path=folder, activations=16, cpu_threads=1)
    load_cpu_runner(settings, read_config(folder)).close()
    assert "--activations 16 changes nothing" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["bnb-nf4", "ct-fp8-block"])
def test_floating_codes_in_bfloat16(tmp_path: Path, name: str) -> None:
    """A model in bfloat16 multiplies them as pairs where its processor does, and says so."""
    folder = real_checkpoint(name, tmp_path)
    settings = ShardSettings(model_path=folder, dtype="bfloat16", cpu_threads=1)
    runner = load_cpu_runner(settings, read_config(folder))
    try:
        words = "x bfloat16" if multiplies_pairs("bfloat16") else "x float32"
        assert words in runner.info.backend
        runner.sampler = recorder = GreedyRecorder()
        runner.warm_up(WarmupRequest(64, 512, 16, 511 * BLOCK))
        every = json.loads((DATA / name / "expected.json").read_text())
        blocks = tables([each["input_ids"] for each in every], new=1)
        batch = [sequence(i, each["input_ids"], blocks[i], 1) for i, each in enumerate(every)]
        run(runner, batch, chunk=20)
        for row, each in zip(batch, every, strict=True):
            found = float(recorder.logits(row.id).log_softmax(-1)[0, each["ids"][0]])
            assert abs(found - each["logprobs"][0]) < 0.03
        together = [recorder.logits(row.id) for row in batch]
        for i, each in enumerate(every):  # to the bit as among the others
            alone = sequence(len(every) + i, each["input_ids"], blocks[i], 1)
            run(runner, [alone], chunk=7)
            assert torch.equal(recorder.logits(alone.id), together[i])
    finally:
        runner.close()


@pytest.mark.parametrize("quantize", ["fp8", "bitsandbytes-nf4"])
def test_experts_of_floating_codes_in_bfloat16_are_the_same_at_any_load(
    checkpoint: Checkpoint, quantize: str
) -> None:
    """A prompt alone has other numbers of rows for every expert than it has among others."""
    folder = checkpoint("mixtral", **FITTING["mixtral"])
    settings = ShardSettings(model_path=folder, dtype="bfloat16", quantize=quantize, cpu_threads=1)
    runner = load_cpu_runner(settings, read_config(folder))
    try:
        assert "as they are stored" in runner.info.backend
        runner.sampler = recorder = GreedyRecorder()
        runner.warm_up(WarmupRequest(64, 512, 16, 511 * BLOCK))
        batch = rows()
        run(runner, batch, chunk=40, joins=8, seed=1)
        together = [recorder.logits(row.id) for row in batch]
        for row, expected in list(zip(rows(), together, strict=True))[::5]:
            run(runner, [row])
            assert torch.equal(recorder.logits(row.id), expected)
    finally:
        runner.close()
