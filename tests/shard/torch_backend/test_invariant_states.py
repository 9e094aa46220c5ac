"""Batch invariance where layers keep states, over the stand-in: bits alone and in a crowd.

A state is moved token by token, so it is the same wherever a step ends. What layers without states
are held to: `test_batch_invariance.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.shard.torch_backend.interpreter import need_triton
from tests.shard.torch_backend.models_support import GreedyRecorder, advance, load, run, sequence

need_triton()

from tests.shard.torch_backend.invariant_support import (  # noqa: E402  (it imports Triton)
    forbid_library,
    run_anew,
    small_parts,  # noqa: F401  (a fixture)
    start_invariant,
)
from tests.shard.torch_backend.stand_in_ranks import two_ranks  # noqa: E402
from tests.shard.torch_backend.stand_in_support import (  # noqa: E402
    Foretelling,
    Said,
    agree,
    drive,
    start,
)
from tgi_trio.errors import ConfigurationError  # noqa: E402
from tgi_trio.ipc.shard_settings import ShardSettings  # noqa: E402
from tgi_trio.shard.torch_backend.states import mamba2_layer  # noqa: E402
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402

Checkpoint = Callable[..., Path]

# A lone token; more and fewer than a convolution reads.
TEXTS = [[5], [3 + 31 * i % 500 for i in range(7)], [9, 40, 7]]
NEW = 2
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


def logits(runner: Any, recorder: GreedyRecorder, **how: Any) -> list[torch.Tensor]:
    """Return what tokens were chosen from, for each text; `how`: see `run`, alone without."""
    rows = [sequence(i, text, [1 + i], NEW) for i, text in enumerate(TEXTS)]
    return run_anew(runner, recorder, rows, **how)


def differs(runner: Any, recorder: GreedyRecorder) -> bool:
    """Whether a bit differs where prompts are cut and have decodes beside them."""
    alone = logits(runner, recorder)
    return not all(map(torch.equal, logits(runner, recorder, joins=2, chunk=5), alone))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_has_the_same_logits_alone_and_among_others(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    changes, dtype = FAMILIES[family]
    folder = checkpoint(family, **changes)
    host = logits(*load(folder, 64, dtype="float32"))
    with StandInDevice() as device:
        runner, recorder = start_invariant(folder, device, dtype=dtype)
        forbid_library(runner, monkeypatch)
        assert not differs(runner, recorder)
    if dtype == "float32":  # of rounding, delta rules make more
        found = [recorder.logits(i) for i in range(len(TEXTS))]
        torch.testing.assert_close(torch.cat(found), torch.cat(host), atol=2e-3, rtol=0)


def test_without_the_flag_bits_differ(checkpoint: Checkpoint) -> None:
    folder = checkpoint("bamba", **MAMBA2)
    with StandInDevice() as device:
        assert differs(*start_invariant(folder, device, batch_invariant=False))


def test_two_ranks(checkpoint: Checkpoint) -> None:
    folder, recorder = checkpoint("jamba", num_hidden_layers=2), GreedyRecorder()
    with (
        StandInDevice() as device,
        two_ranks(folder, device, sampler=recorder, batch_invariant=True) as (runner, _),
    ):
        assert not differs(runner, recorder)


def test_a_sequence_that_is_computed_anew(checkpoint: Checkpoint) -> None:
    """After a preemption or a crash, what has been said comes back as a part of the prompt."""
    folder = checkpoint("qwen3_5_text", **DELTA)
    with StandInDevice() as device:
        runner, recorder = start_invariant(folder, device)
        whole, broken = (sequence(i, TEXTS[1], [1 + i], 4) for i in (0, 1))
        run(runner, [whole])
        advance(runner, [broken], [broken.length])
        advance(runner, [broken], [1])
        broken.computed, broken.states = 0, None
        run(runner, [broken], chunk=7)
        assert torch.equal(recorder.logits(1), recorder.logits(0))


@pytest.mark.parametrize(
    ("family", "changes"), [("qwen3_5_text", DELTA), ("bamba", MAMBA2)], ids=["delta", "mamba2"]
)
def test_recorded_steps_and_guesses_say_what_launched_ones_say(
    checkpoint: Checkpoint, family: str, changes: dict[str, Any]
) -> None:
    """Drawn tokens and log-probabilities; a wrong guess is followed by what was before it."""
    folder = checkpoint(family, **changes)
    asked: list[dict[str, Any]] = [{"sample": True}, {"prompt_logprobs": True}, {}]
    host = drive(start(folder, "cpu"), TEXTS, asked, 5)
    said: list[Said] = []
    with StandInDevice() as device:
        for graphs, late, budget in (((), 0, 100), ((1, 4), 1, 9)):
            runner = start(folder, "cuda:0", graphs, batch_invariant=True)
            drafter = Foretelling(said[0].tokens) if said else None
            how: dict[str, Any] = {"late": late, "budget": budget, "drafter": drafter}
            said.append(drive(runner, TEXTS, asked, 5, device=device, **how))
    plain, ours = said
    agree(plain, host)
    assert ours.drafts > 2 and any(counts.replays for counts in ours.decodes)
    assert ours.tokens == plain.tokens and plain.logprobs and plain.prompts
    assert sorted(ours.logprobs) == sorted(plain.logprobs)
    assert sorted(ours.prompts) == sorted(plain.prompts)


@pytest.mark.parametrize(
    ("limit", "reason"),
    [("_MOST_STATE", "states are too large"), ("_MOST_GROUP", "torch normalises groups of heads")],
)
def test_what_torch_computes_is_refused(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, limit: str, reason: str
) -> None:
    monkeypatch.setattr(mamba2_layer, limit, 8)
    told = ShardSettings(model_path=checkpoint("bamba", **MAMBA2), batch_invariant=True)
    with (
        StandInDevice(),
        pytest.raises(ConfigurationError, match=f"--batch-invariant cannot be kept: .*{reason}"),
    ):
        load_torch_runner(told, device="cuda:0")
