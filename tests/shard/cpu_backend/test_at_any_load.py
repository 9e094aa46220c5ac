"""Batch invariance: the CPU kernels compute a sequence to the bit as they would alone.

Neither how many rows a step has, nor into which chunks a prompt is cut, nor in which blocks a
sequence lies changes a number: a prompt has the same answer at any load. Matrices that stay
quantised are held to it in `test_quantised_models.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.cpu_backend.kernel_support import FITTING, cpu_runner
from tests.shard.torch_backend.models_support import prompts, run, sequences
from tgi_trio.shard.cpu_backend.instructions import has_amx, has_dot
from tgi_trio.shard.cpu_backend.weight_layout import CacheNumbers

pytestmark = pytest.mark.usefixtures("one_thread")

Checkpoint = Callable[..., Path]

PROMPTS = prompts(12)
# One for each operation that rows share: attention of all sorts, experts, latents, states.
FAMILIES = (
    *("llama", "mistral", "gemma2", "bloom", "gpt_neox", "mixtral", "gpt_oss", "deepseek_v3"),
    "glm_moe_dsa",
    *("lfm2", "qwen3_next", "kimi_linear", "mamba2", "jamba", "recurrent_gemma", "gemma4_text"),
    *("zamba2", "bailing_hybrid", "qwen4_exp_text"),
)
NUMBERS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "8-bit weights": {"int8": True},
    "keys and values of 8 bits": {"kv": CacheNumbers("fp8_e4m3fn", [(0.5, 0.25)] * 2)},
    "two threads": {"cores": (0, 0)},
}
DOTS = pytest.mark.skipif(not has_dot(), reason="AVX512_BF16")


def logits(runner: Any, recorder: Any, shuffle: int | None, **how: Any) -> list[torch.Tensor]:
    """Return what tokens were chosen from, for each prompt; `how`: see `run`, alone without."""
    recorder.by_place.clear()
    rows = sequences(PROMPTS, shuffle, new=8)
    for together in [rows] if how else [[row] for row in rows]:
        run(runner, together, **how)
    return [recorder.logits(row.id) for row in rows]


def check_invariance(folder: Path, **options: Any) -> None:
    with cpu_runner(folder, **options) as (runner, recorder):
        alone = logits(runner, recorder, None)
        for how in ({"joins": 12}, {"joins": 1, "chunk": 5}, {"joins": 3, "chunk": 20}):
            among = logits(runner, recorder, 5, **how)
            assert all(map(torch.equal, among, alone)), how


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_has_the_same_logits_alone_and_among_others(
    checkpoint: Checkpoint, family: str
) -> None:
    check_invariance(checkpoint(family, **FITTING[family]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("numbers", NUMBERS)
def test_of_other_numbers(checkpoint: Checkpoint, numbers: str) -> None:
    check_invariance(checkpoint("llama", **FITTING["llama"]), **NUMBERS[numbers])


@DOTS
def test_of_dot_products(checkpoint: Checkpoint) -> None:
    check_invariance(checkpoint("llama", **FITTING["llama"]), dtype="bfloat16", pairs="dot")


@pytest.mark.sampled(2)
@pytest.mark.skipif(not has_amx(), reason="AMX")
@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3", "glm_moe_dsa", "jamba"])
def test_of_the_matrix_unit(checkpoint: Checkpoint, family: str) -> None:
    check_invariance(checkpoint(family, **FITTING[family]), dtype="bfloat16", pairs="amx")


@pytest.mark.skipif(not has_amx(), reason="AMX")
def test_of_more_activations_than_a_cache_holds(checkpoint: Checkpoint) -> None:
    """From 65 rows of so wide an MLP on, two panels pass over a block of rows together."""
    wide = {**FITTING["llama"], "intermediate_size": 8192}
    assert sum(map(len, PROMPTS)) > 64
    check_invariance(checkpoint("llama", **wide), dtype="bfloat16", pairs="amx")
