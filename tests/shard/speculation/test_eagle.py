"""EAGLE-3 drafters: they draft what the paper's formulas say, and change no token of anybody's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.shard.speculation.eagle_support import (
    EagleOneReference,
    EagleReference,
    eagle,
    eagle_one,
)
from tests.shard.speculation.heads_support import Watched, answer, counting_model
from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.shard.backend import load_runner
from tgi_trio.shard.runner import Runner
from tgi_trio.shard.speculation.backlog import MOST
from tgi_trio.testing.checkpoints import make_checkpoint

VOCAB = 512
PROMPTS = [
    [5, 6, 7, 8, 9],
    [40, 41, 42],
    [7, 300, 21, 22, 4, 9, 9, 3, 12, 90, 91, 14, 33, 8, 2, 6, 7],
]
GREEDY = SamplingParameters(ignore_eos=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base"), "llama", head_dim=32)


def load(base: Path, heads: Path, backend: str = "torch") -> Runner:
    return load_runner(
        ShardSettings(model_path=base, draft_model=heads, cpu_backend=backend, cpu_threads=1)
    )


@pytest.mark.parametrize("backend", ["torch", "kernels"])
@pytest.mark.parametrize(
    ("speculators", "budget", "newer"),
    [
        (False, 64, {}),
        (True, 6, {}),  # prompts in pieces
        (True, 64, {"newer": "norm_before_fc", "window": 7}),  # what speculators writes unasked
        (False, 64, {"newer": "fc_norm"}),
    ],
)
def test_it_drafts_what_its_format_says(
    speculators: bool, budget: int, newer: dict[str, Any], backend: str, base: Path, tmp_path: Path
) -> None:
    own_table = speculators and not newer
    folder = eagle(tmp_path, base, VOCAB, speculators=speculators, own_table=own_table, **newer)
    runner, reference = load(base, folder, backend), EagleReference(folder, base)
    for prompts in (PROMPTS, PROMPTS[:1]):
        check_drafts(runner, prompts, reference, budget)


@pytest.mark.parametrize("backend", ["torch", "kernels"])
@pytest.mark.parametrize(("biased", "budget"), [(False, 64), (True, 6)])
def test_eagle_s_first_drafters_draft_what_its_formulas_say(
    biased: bool, budget: int, backend: str, base: Path, tmp_path: Path
) -> None:
    folder = eagle_one(tmp_path, base, VOCAB, biased=biased)
    runner, reference = load(base, folder, backend), EagleOneReference(folder, base)
    check_drafts(runner, PROMPTS, reference, budget)


def test_what_follows_right_drafts_is_what_the_formulas_say(tmp_path: Path) -> None:
    base, folder = counting_model(tmp_path / "model", tmp_path / "unused"), tmp_path / "heads"
    eagle(folder, base, VOCAB, tokens=VOCAB)
    tensors = load_file(folder / "model.safetensors")
    # What leaves the model's last layer is the token's own row: the best of the head is the one
    # behind the next, as long as little is added to it.
    tensors["fc.weight"] = torch.cat([torch.zeros(64, 128), torch.eye(64)], dim=1)
    tensors["lm_head.weight"] = load_file(base / "model.safetensors")["lm_head.weight"].roll(1, 0)
    tensors["norm.weight"] = torch.ones(64)
    for name in ("midlayer.self_attn.o_proj.weight", "midlayer.mlp.down_proj.weight"):
        tensors[name] *= 0.1
    save_file(tensors, folder / "model.safetensors")
    right, steps = check_drafts(load(base, folder), PROMPTS[:1], EagleReference(folder, base), 64)
    assert right >= 3 and steps < 16


def test_a_prompt_longer_than_the_backlog_is_read_in_parts(base: Path, tmp_path: Path) -> None:
    folder = eagle(tmp_path, base, VOCAB)
    prompt = [i * 7919 % 500 + 3 for i in range(MOST + 90)]
    check_drafts(load(base, folder), [prompt], EagleReference(folder, base), 64)


def check_drafts(
    runner: Runner, prompts: list[list[int]], reference: EagleReference, budget: int
) -> tuple[int, int]:
    """Hold all drafts of a run to the formulas; return how many were right, and its steps."""
    drafter = runner.drafter(4)
    assert drafter is not None
    watched = Watched(drafter)
    asked = [GREEDY] * len(prompts)
    found = answer(runner, prompts, asked, 16, drafter=watched, budget=budget, longest=1024)
    assert found.tokens == answer(runner, prompts, asked, 16, budget=budget, longest=1024).tokens
    some = [(known, own) for known, own in watched.drafted if own]
    assert len(some) >= 3 and max(len(own) for _, own in some) >= 2 - (budget < 8)
    right = 0
    for known, own in some:
        for token, best in zip(own, reference.drafts(known, len(own)), strict=True):
            assert token in best
            if len(best) > 1:  # what follows depends on which it was
                break
        text = next(
            ids + found.tokens[i] for i, ids in enumerate(prompts) if known[: len(ids)] == ids
        )
        right += int(own[:1] == text[len(known) : len(known) + 1])
    return right, found.steps
