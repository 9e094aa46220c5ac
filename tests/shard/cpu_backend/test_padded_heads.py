"""Heads that fill no whole panels in the CPU kernels: zeros behind each while it attends."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.shard.cpu_backend.kernel_support import HYBRIDS, VARIANT, cpu_runner
from tests.shard.torch_backend.golden import Golden, assert_greedy
from tests.shard.torch_backend.models_support import generated, prompts, run, sequences
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.fit.cpu_kernels import find_unsupported
from tgi_trio.shard.cpu_backend import kernel_groups, verified
from tgi_trio.shard.cpu_backend.self_tests import padding as padding_self_test
from tgi_trio.shard.cpu_backend.unsupported import UnsupportedError
from tgi_trio.shard.cpu_backend.weight_layout import CacheNumbers

# What stands behind heads meets biases, norms of every kind, turns of every kind, and states.
NARROW: dict[str, dict[str, Any]] = {
    "phi": {"hidden_size": 320},  # heads of 80, as Phi-2 has them, half of which turns
    "qwen3": {"head_dim": 24},
    "hunyuan_v1_dense": {"head_dim": 40},
    "olmo2": {},
    "gptj": {},
    "mimo_v2_flash": {"head_dim": 16, "v_head_dim": 8},
    "falcon_h1": HYBRIDS["falcon_h1"] | {"head_dim": 16},
    "llama4_text": {"intermediate_size": 64},
}

Checkpoint = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("family", NARROW)
def test_tokens_and_logits(checkpoint: Checkpoint, family: str) -> None:
    folder = checkpoint(family, **NARROW[family])
    golden, batch = Golden(folder), sequences(prompts(8), 3, new=8)
    with cpu_runner(folder) as (runner, recorder):
        run(runner, batch, chunk=20, joins=3, seed=1)
        for row in batch:
            assert_greedy(golden, recorder, row, 1e-4)
    assert len({tuple(generated(row)) for row in batch}) == len(batch)


def test_zeros_lie_in_the_cache_and_codes_are_multiplied_behind_them(
    checkpoint: Checkpoint,
) -> None:
    """Weights and K and V of 8 bits, two threads."""
    folder = checkpoint("llama", head_dim=16, hidden_size=128)
    golden, batch = Golden(folder), sequences(prompts(6), 3, new=6)
    kept = CacheNumbers("fp8_e4m3fn", [(0.25, 0.25)] * 2)
    with cpu_runner(folder, quantize="eetq", kv=kept, cores=(0, 1)) as (runner, recorder):
        assert runner.info.kv_bytes_per_token == 2 * 2 * 2 * 32
        run(runner, batch, chunk=20, joins=3, seed=1)
        for row in batch:
            exact = golden.logits(row.token_ids[: row.prompt_length].tolist(), generated(row))
            found = recorder.logits(row.id)
            assert float((found - exact).norm() / exact.norm()) < 0.2


def test_kernels_that_are_wrong_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verified.open_kernel_group(kernel_groups.NARROW_HEADS, VARIANT)
    monkeypatch.setattr(padding_self_test, "_flat", lambda heads: np.roll(heads, 1).reshape(3, -1))
    with pytest.raises(UnsupportedError, match="of narrow heads failed: PAD is"):
        verified.open_kernel_group(kernel_groups.NARROW_HEADS, VARIANT)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("lfm3", {"head_dim": 16}, "heads have 16 numbers, .* and gates"),
        ("gemma4_text", {}, "heads have 16 numbers, .* and their values are normalised"),
        (
            "llama",
            {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 24},
            "72",
        ),
    ],
)
def test_what_has_no_room_for_zeros_is_refused(
    checkpoint: Checkpoint, family: str, changes: dict[str, Any], reason: str
) -> None:
    spec = decoder_spec(read_config(checkpoint(family, **changes)))
    assert re.search(reason, find_unsupported(spec, "float32") or "")
