"""Batch invariance where layers keep states, over the stand-in: bits alone and in a crowd.

A state is moved token by token, so it is the same wherever a step ends. What layers without states
are held to: `test_batch_invariance.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.shard.torch_backend.interpreter import need_triton
from tests.shard.torch_backend.models_support import GreedyRecorder

need_triton()

from tests.shard.torch_backend.invariant_support import (  # noqa: E402  (it imports Triton)
    Crowd,
    small_parts,  # noqa: F401  (a fixture)
    start_invariant,
)
from tests.shard.torch_backend.stand_in_ranks import two_ranks  # noqa: E402
from tgi_trio.shard.torch_backend.states import mamba2_layer  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402

Checkpoint = Callable[..., Path]

# A lone token; more and fewer than a convolution reads.
CROWD = Crowd([[5], [3 + 31 * i % 500 for i in range(7)], [9, 40, 7]])
DELTA = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
MAMBA2 = {"num_hidden_layers": 2}  # both kinds of layers
# One for each kind of layer: convolutions; delta rules with a decay a head, a channel, and such a
# one that is bounded; Mamba-2 with norms, without norms but multipliers, in front of shared blocks;
# gates. Whole models of states alone; Mamba beside attention: with two ranks.
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "lfm2": ({"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, "float32"),
    "qwen3_5_text": (DELTA, "bfloat16"),
    "kimi_linear": (DELTA | {"mlp_layer_types": ["sparse"] * 2}, "float32"),
    "bailing_hybrid": ({"num_hidden_layers": 2}, "float32"),
    "bamba": (MAMBA2, "bfloat16"),
    "falcon_h1": ({"num_hidden_layers": 1}, "float32"),
    "zamba2": (
        {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
        "float32",
    ),
    "recurrent_gemma": ({}, "float32"),
    "mamba2": ({"num_hidden_layers": 1}, "float32"),
    "mamba": ({"num_hidden_layers": 1}, "float32"),
    "qwen3_next": (DELTA, "bfloat16"),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_has_the_same_logits_alone_and_among_others(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    changes, dtype = FAMILIES[family]
    # Of rounding, delta rules make more.
    near = 2e-3 if dtype == "float32" else None
    CROWD.check_alone(checkpoint(family, **changes), monkeypatch, dtype=dtype, near=near)


def test_without_the_flag_bits_differ(checkpoint: Checkpoint) -> None:
    folder = checkpoint("bamba", **MAMBA2)
    with StandInDevice() as device:
        assert CROWD.differing(*start_invariant(folder, device, batch_invariant=False))


def test_two_ranks(checkpoint: Checkpoint) -> None:
    folder, recorder = checkpoint("jamba", num_hidden_layers=2), GreedyRecorder()
    with (
        StandInDevice() as device,
        two_ranks(folder, device, sampler=recorder, batch_invariant=True) as (runner, _),
    ):
        assert not CROWD.differing(runner, recorder)


def test_a_sequence_that_is_computed_anew(checkpoint: Checkpoint) -> None:
    CROWD.check_anew(checkpoint("qwen3_5_text", **DELTA), 1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("family", "changes"), [("qwen3_5_text", DELTA), ("bamba", MAMBA2)], ids=["delta", "mamba2"]
)
def test_recorded_steps_and_drafts_say_what_launched_ones_say(
    checkpoint: Checkpoint, family: str, changes: dict[str, Any]
) -> None:
    CROWD.check_recorded(checkpoint(family, **changes), 9)


@pytest.mark.parametrize(
    ("limit", "reason"),
    [("_MOST_STATE", "states are too large"), ("_MOST_GROUP", "torch normalises groups of heads")],
)
def test_what_torch_computes_is_refused(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, limit: str, reason: str
) -> None:
    monkeypatch.setattr(mamba2_layer, limit, 8)
    CROWD.check_refused(checkpoint("bamba", **MAMBA2), reason)
