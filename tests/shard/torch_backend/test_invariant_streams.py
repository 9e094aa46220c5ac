"""Batch invariance where a layer computes one of several hidden states, and cuts its gates.

Over the stand-in: bits alone and in a crowd. What other layers are held to:
`test_batch_invariance.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.shard.torch_backend.interpreter import need_triton

need_triton()

from tests.shard.torch_backend.invariant_support import (  # noqa: E402  (it imports Triton)
    Crowd,
    small_parts,  # noqa: F401  (a fixture)
)
from tgi_trio.shard.torch_backend.layers import gating  # noqa: E402
from tgi_trio.shard.torch_backend.layers.streams import alternating_updates  # noqa: E402

Checkpoint = Callable[..., Path]

FAMILY = "gemma3n_text"
# One layer that cuts its gates, and one that does not and reads the keys of the first.
LAYERS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["full_attention"] * 2,
    "num_kv_shared_layers": 1,
    "activation_sparsity_pattern": [0.9, 0.0],
    "intermediate_size": [128, 96],
}
CROWD = Crowd([[5], [3 + 31 * i % 490 for i in range(14)], [9, 40, 7]])


@pytest.mark.sampled(2, first=1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sequence_has_the_same_logits_alone_and_among_others(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    near = 2e-3 if dtype == "float32" else None
    CROWD.check_alone(checkpoint(FAMILY, **LAYERS), monkeypatch, dtype=dtype, near=near)


def test_a_sequence_that_is_computed_anew(checkpoint: Checkpoint) -> None:
    CROWD.check_anew(checkpoint(FAMILY, **LAYERS), 1)


def test_recorded_steps_and_drafts_say_what_launched_ones_say(checkpoint: Checkpoint) -> None:
    CROWD.check_recorded(checkpoint(FAMILY, **LAYERS), 9)


@pytest.mark.parametrize(
    ("module", "reason"),
    [(alternating_updates, "hidden states are too large"), (gating, "torch cuts gates")],
)
def test_what_torch_computes_is_refused(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, module: ModuleType, reason: str
) -> None:
    monkeypatch.setattr(module, "_MOST", 64)
    CROWD.check_refused(checkpoint(FAMILY, **LAYERS), reason)
