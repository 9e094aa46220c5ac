"""Batch invariance on a device: a sequence has the same bits alone and in a crowd."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.conftest import checkpoint  # noqa: F401  (a fixture)
from tests.shard.torch_backend.models_support import (
    BLOCK,
    GreedyRecorder,
    prompts,
    run,
    sequences,
)
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.shard.runner import Runner
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TEXTS = [*prompts(12), [7 + 31 * i % 500 for i in range(1100)]]  # the last has three spans of keys
REQUEST = WarmupRequest(512, 2048, 16, 511 * BLOCK)
NEW = 24
FAMILIES = (
    *("llama", "qwen3", "gemma2", "gpt_neox", "bloom", "olmo2"),
    *("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"),
    *("lfm2", "qwen3_5_text", "bamba"),  # which keep states
    *("deepseek_v32", "glm_moe_dsa", "minimax_m3_vl_text"),  # whose index chooses
    *("axk2", "hy_v4", "qwen4_exp_text"),  # likewise, with gates or several hidden states
    "deepseek_v4",  # which attends to entries
    *("hunyuan_v1_dense", "mistral4"),  # norms behind rotations; scaled queries over latents
)
NUMBERS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float32": {"dtype": "float32"},
    "codes of 4 bits": {"quantize": "int4"},
    "codes of 8 bits": {"quantize": "q8_0"},
    "FP8": {"quantize": "fp8"},
    "keys and values of 8 bits": {"kv_cache_dtype": "fp8_e4m3fn"},
}
LONG: dict[str, Any] = {"max_position_embeddings": 2048}

Checkpoint = Callable[..., Path]


def start(folder: Path, graphs: tuple[int, ...], **options: Any) -> tuple[Runner, GreedyRecorder]:
    told: dict[str, Any] = {"dtype": "bfloat16", "batch_invariant": True} | options
    settings = ShardSettings(model_path=folder, **told)
    sampler = GreedyRecorder()
    runner = load_torch_runner(
        settings,
        read_config(settings.model_path),
        device="cuda",
        sampler=sampler,
        graph_sizes=graphs,
    )
    runner.warm_up(REQUEST)
    return runner, sampler


def check(folder: Path, **options: Any) -> None:
    """Compare launched and recorded, in any chunks, with each sequence alone and launched."""
    alone: list[torch.Tensor] | None = None
    for graphs in ((), (1, 2, 4, 8, 16)):
        runner, recorder = start(folder, graphs, **options)
        if alone is None:
            rows = sequences(TEXTS, new=NEW)
            for row in rows:
                run(runner, [row])
            alone = [recorder.logits(row.id) for row in rows]
        ways: tuple[dict[str, Any], ...] = (
            {"joins": 13},
            {"joins": 1, "chunk": 50},
            {"joins": 3, "chunk": 200},
        )
        for how in ways:
            recorder.by_place.clear()
            rows = sequences(TEXTS, 5, new=NEW)
            run(runner, rows, **how)
            among = [recorder.logits(row.id) for row in rows]
            assert all(map(torch.equal, among, alone)), (graphs, how)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(checkpoint: Checkpoint, family: str) -> None:  # noqa: F811
    check(checkpoint(family, **LONG))


@pytest.mark.parametrize("numbers", NUMBERS.values(), ids=NUMBERS)
def test_numbers(checkpoint: Checkpoint, numbers: dict[str, Any]) -> None:  # noqa: F811
    check(checkpoint("llama", hidden_size=512, intermediate_size=1024, **LONG), **numbers)
