"""EXL3's matrices as the CPU kernels multiply them: as stored, between turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.cpu_backend.kernel_support import FITTING, cpu_runner
from tests.shard.ranks.rank_processes import kernel_ranks_of
from tests.shard.torch_backend.golden import Golden, assert_greedy
from tests.shard.torch_backend.models_support import (
    BLOCK,
    GreedyRecorder,
    prompts,
    run,
    sequence,
    tables,
)
from tests.support.exl3 import EXL3, store_exl3
from tests.support.quantised import Array, Tensors, quantise
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.shard.checkpoint.lookup import open_checkpoint
from tgi_trio.shard.cpu_backend.program import pack_program

Make = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("one_thread")
NEW = 8
SIZES = {"hidden_size": 128, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
WIDE = {"intermediate_size": 256}
# What a family has that the operations around a product differ by.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": FITTING["llama"] | SIZES | WIDE,  # biases
    "gemma2": FITTING["gemma2"] | SIZES | WIDE,  # norms behind branches
    "cohere": FITTING["cohere"] | SIZES | WIDE,  # attention beside the MLP
    "starcoder2": FITTING["starcoder2"] | SIZES | WIDE,  # no gates
}
# By the end of a module's name; of the others 4 bits of MCG.
MIXED = {"k_proj": (3, "3inst"), "v_proj": (2, "mul1"), "up_proj": (3, "3inst")}


def store(module: str, weight: Array) -> tuple[Tensors, Array]:
    bits, book = MIXED.get(module.rpartition(".")[2], (4, "mcg"))
    return store_exl3(bits, book)(module, weight)


def make(checkpoint: Make, folder: Path, family: str) -> Path:
    source = checkpoint(family, **FAMILIES[family])
    endings = ("_proj.weight", "lm_head.weight", "c_fc.weight")
    return quantise(source, folder / "q", store, EXL3, endings=endings)


def test_what_is_not_turned_whole_is_dequantised(checkpoint: Make, tmp_path: Path) -> None:
    """A rank's keys and values are half of what is turned together; the rest is as stored."""
    folder = make(checkpoint, tmp_path, "llama")
    golden, batch, recorder = Golden(folder / "plain"), rows(4), GreedyRecorder()
    with kernel_ranks_of(folder, 2, recorder, dtype="float32") as (ranks, _):
        assert "x float32), dequantised ones (turned in part)" in ranks.info.backend
        ranks.warm_up(WarmupRequest(64, 512, 16, 511 * BLOCK))
        run(ranks, batch)
        for row in batch:
            assert_greedy(golden, recorder, row, tolerance=2e-4)


def test_adapters_have_dequantised_matrices(checkpoint: Make, tmp_path: Path) -> None:
    """What they add belongs to results that have been turned."""
    config = read_config(make(checkpoint, tmp_path, "llama"))
    spec = decoder_spec(config)
    assert spec is not None
    with open_checkpoint(config, spec.names.base) as weights:
        for rank, expected in (
            (4, "dequantised ones (3inst, mcg, mul1)"),
            (0, "as they are stored"),
        ):
            with pack_program(spec, weights, "float32", max_lora_rank=rank) as program:
                assert expected in program.describe()
                assert bool(program.kinds) == (rank == 0)


def rows(count: int = 6) -> list[Any]:
    some = prompts(count)
    blocks = tables(some, shuffle=3, new=NEW)
    return [sequence(i, prompt, blocks[i], NEW) for i, prompt in enumerate(some)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_the_dequantised_weights(
    checkpoint: Make, tmp_path: Path, family: str
) -> None:
    folder = make(checkpoint, tmp_path, family)
    golden = Golden(folder / "plain")
    with cpu_runner(folder) as (runner, recorder):
        said = runner._forward.program.describe()
        assert "mcg of 4 bits x float32" in said and "dequantised" not in said
        batch = rows()
        run(runner, batch, chunk=20, joins=2)
        for row in batch:
            assert_greedy(golden, recorder, row, tolerance=2e-4)


def test_a_sequence_has_the_same_logits_alone_and_among_others(
    checkpoint: Make, tmp_path: Path
) -> None:
    """To the last bit, on two threads, in chunks, and with panels that are unpacked for many."""
    folder = make(checkpoint, tmp_path, "llama")
    with cpu_runner(folder, cores=(0, 0)) as (runner, recorder):
        batch = rows()
        run(runner, batch, chunk=60, joins=3, seed=1)
        found = [recorder.logits(row.id) for row in batch]
    with cpu_runner(folder) as (runner, recorder):
        for row, logits in list(zip(rows(), found, strict=True))[::2]:
            run(runner, [row])
            torch.testing.assert_close(recorder.logits(row.id), logits, atol=0.0, rtol=0.0)
