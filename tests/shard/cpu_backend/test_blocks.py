"""Attention to blocks that an index chooses, in the CPU kernels: beside what all are asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.shard.adapters.peft_support import PeftGolden, adapted, check, install, write_adapter
from tests.shard.cpu_backend.chooser_checks import SQUARES, check_long_context, check_unwritten
from tests.shard.cpu_backend.kernel_support import FITTING, cpu_runner
from tests.shard.cpu_backend.test_at_any_load import DOTS, check_invariance
from tests.shard.torch_backend.models_support import (
    load,
    prompts,
    run,
    sequences,
)
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.fit.cpu_kernels import find_undivided, find_unsupported
from tgi_trio.shard.cpu_backend.weight_layout import CacheNumbers

pytestmark = pytest.mark.usefixtures("one_thread")
Checkpoint = Callable[..., Path]

FAMILY = "minimax_m3_vl_text"
NUMBERS: dict[str, dict[str, Any]] = {
    "float32": {},
    "keys and values of 8 bits": {"kv": CacheNumbers("fp8_e4m3fn", [(0.5, 0.5)] * 3)},
    "two threads": {"cores": (0, 0), "dtype": "bfloat16"},
    "dot products": {"dtype": "bfloat16", "dot": True},
}


def make(checkpoint: Checkpoint, **changes: Any) -> Path:
    return checkpoint(FAMILY, **FITTING[FAMILY] | changes)


@pytest.mark.sampled(4)  # two threads and rounded numbers are asked of the others, too
@pytest.mark.parametrize(
    "numbers", [pytest.param(each, marks=[DOTS] * (each == "dot products")) for each in NUMBERS]
)
def test_a_sequence_has_the_same_logits_alone_and_among_others(
    checkpoint: Checkpoint, numbers: str
) -> None:
    check_invariance(make(checkpoint), **NUMBERS[numbers])


@pytest.mark.parametrize(
    "changes",
    [
        {"index_local_blocks": 0, "index_block_size": 32, "index_topk_blocks": 5},
        {"index_local_blocks": 2, "index_topk_blocks": 7, "index_head_dim": 32},
    ],
)
def test_a_long_context(checkpoint: Checkpoint, changes: dict[str, int]) -> None:
    check_long_context(make(checkpoint, max_position_embeddings=2048, **changes), SQUARES)


def test_what_nobody_has_written_is_not_read(checkpoint: Checkpoint) -> None:
    check_unwritten(make(checkpoint), indexes=2, numbers=3 * 2 * 2 * 32 + 2 * 64)


@pytest.mark.parametrize(
    ("numbers", "same", "tolerance"),
    [
        ({"kv": CacheNumbers("fp8_e5m2", [(1.0, 1.0)] * 3)}, {"kv_cache_dtype": "fp8_e5m2"}, 2e-3),
        ({"quantize": "q8_0"}, {"quantize": "q8_0"}, 0.05),  # as any mixture
    ],
)
def test_rounded_numbers_are_those_of_torch(
    checkpoint: Checkpoint, numbers: dict[str, Any], same: dict[str, Any], tolerance: float
) -> None:
    """What is half-way may be rounded either way, which few choices depend on."""
    folder, found = make(checkpoint), []
    with cpu_runner(folder, **numbers) as kernels:
        for runner, recorder in (kernels, load(folder, dtype="float32", **same)):
            rows = sequences(prompts(8), 3, new=8)
            run(runner, rows)
            found.append([recorder.logits(row.id) for row in rows])
    apart = [float((a - b).abs().max()) for a, b in zip(*found, strict=True)]
    assert float(np.median(apart)) < tolerance


def test_what_does_not_fit_is_refused(checkpoint: Checkpoint) -> None:
    def refusal(**changes: Any) -> str | None:
        spec = decoder_spec(read_config(make(checkpoint, **changes)))
        return find_unsupported(spec, "float32")

    assert refusal() is None
    assert refusal(index_block_size=24) == (
        "an index chooses blocks of 24 tokens, which is no multiple of 16"
    )
    assert refusal(index_head_dim=48) == (
        "an index has keys of 48 numbers, which is no multiple of 32"
    )
    assert refusal(head_dim=48) == (
        "an index chooses blocks for heads of 48 numbers, no multiple of 32"
    )
    spec = decoder_spec(read_config(make(checkpoint)))
    assert spec is not None
    dense = tuple(replace(layer, experts=None) for layer in spec.layers)
    assert find_undivided(replace(spec, layers=dense), 2) == (
        "ranks divide every layer, which the kernels do not do with an index of blocks"
    )


def test_adapters_change_what_an_index_asks(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Queries and keys of attention and of its index have the same names; two adapters and none."""
    base = make(checkpoint)
    modules = {"target_modules": ["q_proj", "k_proj", "o_proj"]}
    folders = [write_adapter(base, tmp_path / str(r), seed=r, r=r, **modules) for r in (4, 3)]
    golden = PeftGolden(base, folders)
    with cpu_runner(base, max_lora_rank=4) as (runner, recorder):
        for number, folder in enumerate(folders, start=1):
            install(runner, number, folder)
        rows = adapted(sequences(prompts(10)[4:], new=8), [1, 0, 2, 1, 2, 0])
        run(runner, rows, chunk=20, joins=2)
        for row in rows:
            check(golden, recorder, row)
