"""Attention to blocks that an index chooses, in the CPU kernels: beside what all are asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.shard.cpu_backend.chooser_checks import (
    ROUNDED,
    SQUARES,
    WAYS,
    check_adapters,
    check_long_context,
    check_rounded,
    check_unwritten,
)
from tests.shard.cpu_backend.kernel_support import FITTING
from tests.shard.cpu_backend.test_at_any_load import check_invariance
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.fit.cpu_kernels import find_undivided, find_unsupported

pytestmark = pytest.mark.usefixtures("one_thread")
Checkpoint = Callable[..., Path]

FAMILY = "minimax_m3_vl_text"


def make(checkpoint: Checkpoint, **changes: Any) -> Path:
    return checkpoint(FAMILY, **FITTING[FAMILY] | changes)


@pytest.mark.sampled(4)  # two threads and rounded numbers are asked of the others, too
@pytest.mark.parametrize("numbers", [pytest.param({}, id="float32"), *WAYS])
def test_a_sequence_has_the_same_logits_alone_and_among_others(
    checkpoint: Checkpoint, numbers: dict[str, Any]
) -> None:
    check_invariance(make(checkpoint), **numbers)


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


@pytest.mark.parametrize("rounding", ROUNDED)
def test_rounded_numbers_are_those_of_torch(checkpoint: Checkpoint, rounding: str) -> None:
    tolerance = 0.05 if "weights" in rounding else 2e-3  # as any mixture
    check_rounded(make(checkpoint), rounding, tolerance)


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
    check_adapters(make(checkpoint), tmp_path, 1e-4)
