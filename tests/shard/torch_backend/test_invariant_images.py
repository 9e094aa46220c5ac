"""Batch invariance with images, over the stand-in: bits alone and beside others' images.

What images are to the model, their features, is computed image by image before a step.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.shard.image_support import FAMILIES, Prompt, make_prompts, run
from tests.shard.torch_backend.interpreter import need_triton
from tests.shard.torch_backend.models_support import GreedyRecorder
from tgi_trio.shard.runner import Runner

need_triton()

from tests.shard.torch_backend.invariant_support import (  # noqa: E402  (it imports Triton)
    small_parts,  # noqa: F401  (a fixture)
    start_invariant,
)
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402
from tgi_trio.testing.wrapped_checkpoints import make_wrapped  # noqa: E402


def logits(
    runner: Runner, recorder: GreedyRecorder, family: str, prompts: list[Prompt], budget: int
) -> list[torch.Tensor]:
    """Return what the tokens of prompts that run together were chosen from."""
    recorder.by_place.clear()
    run(runner, family, prompts, budget=budget)
    return [recorder.logits(i) for i in range(len(prompts))]


@pytest.mark.sampled(2, first=1)
@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_a_prompt_has_the_same_logits_alone_and_beside_other_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Chunks of 8 tokens are cut inside images, unless their tokens attend to later ones."""
    monkeypatch.setattr(GreedyRecorder, "drop", lambda *_: None)
    folder = make_wrapped(tmp_path, family, **FAMILIES[family])
    one, several, *_ = make_prompts(family)
    with StandInDevice() as device:
        runner, recorder = start_invariant(folder, device)
        alone = [logits(runner, recorder, family, [each], 100)[0] for each in (one, several)]
        among = logits(runner, recorder, family, [one, several], 8)
    assert all(map(torch.equal, among, alone))
