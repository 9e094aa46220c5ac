"""Blocks of attention and MLP that several layers share, in the kernels (Zamba2)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.shard.cpu_backend.kernel_support import FITTING, cpu_runner
from tests.shard.test_rounded_models import dequantised
from tests.shard.torch_backend.golden import Golden, assert_greedy
from tests.shard.torch_backend.models_support import TOLERANCES, generated, prompts, run, sequences
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.fit.cpu_kernels import find_unsupported
from tgi_trio.shard.checkpoint.lookup import open_checkpoint
from tgi_trio.shard.cpu_backend.program import pack_program
from tgi_trio.shard.cpu_backend.tables import Buffer, Code, Epilogue

PROMPTS = prompts(6)
SIZES = FITTING["zamba2"]
# As Zamba2 2.7B, whose heads have 160 numbers; and with biases, which are added once.
PLAIN: dict[str, Any] = {
    "hidden_size": 320,
    "n_mamba_heads": 20,
    "use_shared_attention_adapter": False,
    "use_mem_rope": False,
    "add_bias_linear": True,
}
PUBLISHED = {
    "1.2B": {"hidden_size": 2048, "n_mamba_heads": 64, "mamba_d_state": 128, "num_mem_blocks": 1},
    "2.7B": {"hidden_size": 2560, "n_mamba_heads": 80, "mamba_d_state": 64, "num_mem_blocks": 2},
    "7B": {"hidden_size": 3584, "n_mamba_heads": 112, "mamba_d_state": 64, "mamba_ngroups": 2},
}
pytestmark = pytest.mark.usefixtures("one_thread")

Checkpoint = Callable[..., Path]


@pytest.mark.parametrize("int8", [False, True])
def test_a_block_is_packed_once(checkpoint: Checkpoint, int8: bool) -> None:
    """Three layers use two blocks, in turn: the last has the first one's matrices."""
    config = read_config(checkpoint("zamba2", **SIZES))
    spec = decoder_spec(config)
    assert spec is not None
    with (
        open_checkpoint(config, spec.names.base) as weights,
        pack_program(spec, weights, "float32", int8=int8) as program,
    ):
        table = program.operations
    linear = table[(table["code"] == Code.LINEAR) & (table["epilogue"] == Epilogue.STORE)]
    for target, count in ((Buffer.QKV, 1), (Buffer.BRANCH, 2)):  # attention's end and the MLP's
        rows = linear[linear["target"] == target].reshape(3, count)
        for name in ("weights", "scales") if int8 else ("weights",):
            first, second, third = rows[name]
            np.testing.assert_array_equal(first, third)
            assert not set(first) & set(second)


def test_without_turns_and_changes_of_attention(checkpoint: Checkpoint) -> None:
    folder = checkpoint("zamba2", **SIZES | PLAIN)
    with cpu_runner(folder) as (runner, recorder):
        batch = sequences(PROMPTS, 3, new=8)
        run(runner, batch, chunk=20, joins=2)
        for row in batch:
            assert_greedy(Golden(folder), recorder, row, TOLERANCES["zamba2"])


def round_input(linear: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
    """Round what a linear layer reads to 16 bits, 32 numbers with one scale."""
    blocks = given[0].unflatten(-1, (-1, 32))
    scales = (blocks.abs().amax(-1, keepdim=True) / 32767).clamp(min=1e-30)
    return (((blocks / scales).round() * scales).flatten(-2),)


@pytest.mark.parametrize("word", ["eetq", "q4_0"])
def test_stored_codes_are_as_exact_as_rounded_activations(
    checkpoint: Checkpoint, word: str
) -> None:
    """The kernels are no further from the dequantised model than it is from itself with activations
    of 16 bits, which random weights make a lot of.
    """
    folder = checkpoint("zamba2", **SIZES)
    exact, rounded = (dequantised(Golden(folder), word) for _ in range(2))
    for part in rounded.model.modules():
        if isinstance(part, torch.nn.Linear):
            part.register_forward_pre_hook(round_input)
    ours, theirs = [], []
    with cpu_runner(folder, quantize=word, cores=(0, 1)) as (runner, recorder):
        batch = sequences(PROMPTS, 3, new=8)
        run(runner, batch, chunk=20, joins=2)
        for row in batch:
            told = row.token_ids[: row.prompt_length].tolist(), generated(row)
            whole = exact.logits(*told)
            ours.append(float((recorder.logits(row.id) - whole).norm()))
            theirs.append(float((rounded.logits(*told) - whole).norm()))
    assert sum(ours) < 2 * sum(theirs)


@pytest.mark.parametrize("size", PUBLISHED)
def test_published_models_fit(tmp_path: Path, size: str) -> None:
    stated = {"model_type": "zamba2", "vocab_size": 32000, "num_attention_heads": 32}
    (tmp_path / "config.json").write_text(json.dumps(stated | PUBLISHED[size]))
    spec = decoder_spec(read_config(tmp_path))
    assert spec is not None and any(layer.shared for layer in spec.layers)
    assert find_unsupported(spec, "bfloat16") is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"adapter_rank": 8}, "what layers add to shared blocks is of rank 8, not of 32s"),
        ({"num_attention_heads": 16}, "layers share a block with heads of 16 numbers"),
    ],
)
def test_sizes_that_fill_no_panels_are_refused(
    checkpoint: Checkpoint, changes: dict[str, Any], reason: str
) -> None:
    spec = decoder_spec(read_config(checkpoint("zamba2", **SIZES | changes)))
    assert reason in (find_unsupported(spec, "float32") or "")
