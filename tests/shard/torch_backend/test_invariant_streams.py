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
from tests.shard.torch_backend.stand_in_support import (  # noqa: E402
    Foretelling,
    Said,
    agree,
    drive,
    start,
)
from tgi_trio.errors import ConfigurationError  # noqa: E402
from tgi_trio.ipc.shard_settings import ShardSettings  # noqa: E402
from tgi_trio.shard.torch_backend.layers import gating, streams  # noqa: E402
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402

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
TEXTS = [[5], [3 + 31 * i % 490 for i in range(14)], [9, 40, 7]]
NEW = 2


def logits(runner: Any, recorder: GreedyRecorder, **how: Any) -> list[torch.Tensor]:
    """Return what tokens were chosen from, for each text; `how`: see `run`, alone without."""
    rows = [sequence(i, text, [1 + i], NEW) for i, text in enumerate(TEXTS)]
    return run_anew(runner, recorder, rows, **how)


def differs(runner: Any, recorder: GreedyRecorder) -> bool:
    """Whether a bit differs where prompts are cut and have decodes beside them."""
    alone = logits(runner, recorder)
    return not all(map(torch.equal, logits(runner, recorder, joins=2, chunk=5), alone))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_sequence_has_the_same_logits_alone_and_among_others(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    folder = checkpoint(FAMILY, **LAYERS)
    host = logits(*load(folder, 64, dtype="float32"))
    with StandInDevice() as device:
        runner, recorder = start_invariant(folder, device, dtype=dtype)
        forbid_library(runner, monkeypatch)
        assert not differs(runner, recorder)
    if dtype == "float32":
        found = [recorder.logits(i) for i in range(len(TEXTS))]
        torch.testing.assert_close(torch.cat(found), torch.cat(host), atol=2e-3, rtol=0)


def test_a_sequence_that_is_computed_anew(checkpoint: Checkpoint) -> None:
    """After a preemption or a crash, what has been said comes back as a part of the prompt."""
    folder = checkpoint(FAMILY, **LAYERS)
    with StandInDevice() as device:
        runner, recorder = start_invariant(folder, device)
        whole, broken = (sequence(i, TEXTS[1], [1 + 2 * i, 2 + 2 * i], 4) for i in (0, 1))
        run(runner, [whole])
        advance(runner, [broken], [broken.length])
        advance(runner, [broken], [1])
        broken.computed, broken.block_ids = 0, [5, 6]
        run(runner, [broken], chunk=7)
        assert torch.equal(recorder.logits(1), recorder.logits(0))


def test_recorded_steps_and_guesses_say_what_launched_ones_say(checkpoint: Checkpoint) -> None:
    """Drawn tokens and log-probabilities, of prompts as well."""
    folder = checkpoint(FAMILY, **LAYERS)
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
    ("module", "reason"), [(streams, "hidden states are too large"), (gating, "torch cuts gates")]
)
def test_what_torch_computes_is_refused(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, module: ModuleType, reason: str
) -> None:
    monkeypatch.setattr(module, "_MOST", 64)
    told = ShardSettings(model_path=checkpoint(FAMILY, **LAYERS), batch_invariant=True)
    with (
        StandInDevice(),
        pytest.raises(ConfigurationError, match=f"--batch-invariant cannot be kept: .*{reason}"),
    ):
        load_torch_runner(told, device="cuda:0")
