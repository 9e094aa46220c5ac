"""Newer families of attention alone, in the batch that a shard runs, against transformers.

Sixteen at once in steps of any size, some of them computed twice; with drafts; behind a cached
prefix; again after they were pushed out: what tokens are chosen from is what transformers says in
one pass over each text. Over two ranks: `tests/shard/ranks/test_ranks.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests.shard.torch_backend.golden import Golden
from tests.shard.torch_backend.models_support import BLOCK, NEWER, GreedyRecorder, load
from tests.shard.torch_backend.states.test_hybrid_models import TextDrafter
from tests.shard.torch_backend.test_kv_groups import BLOCKS, NEW, PROMPTS, batch_of, row, run
from tgi_trio.testing.wrapped_checkpoints import make_wrapped

Checkpoint = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("one_thread")

LONGEST = max(range(len(PROMPTS)), key=lambda i: len(PROMPTS[i]))
DRAFTED = (LONGEST, 0, 3)  # sequences that are run again with drafts


def logits(recorder: GreedyRecorder, id: int, first: int, last: int) -> torch.Tensor:
    """Return what the tokens at the places from `first` to `last` were chosen from."""
    return torch.stack([recorder.by_place[id][place] for place in range(first, last)])


def assert_near(found: torch.Tensor, wanted: torch.Tensor) -> None:
    # Rounding is relative to what is added up: logits of 8 differ by more than those of 1.
    most = max(1e-4, 5e-5 * float(wanted.abs().max()))
    torch.testing.assert_close(found, wanted, atol=most, rtol=0.0)


WRAPPED = ("mistral_large4",)  # the text of models that see images as well


@pytest.mark.sampled(11)
@pytest.mark.parametrize("family", [*NEWER, *WRAPPED])
def test_whatever_happens_to_a_sequence_it_says_the_same(
    checkpoint: Checkpoint, tmp_path: Path, family: str
) -> None:
    folder = make_wrapped(tmp_path, family) if family in WRAPPED else checkpoint(family)
    runner, recorder = load(folder, BLOCKS)
    golden = Golden(folder)
    assert runner.info.prefix_reuse and runner.info.speculates
    batch = batch_of()
    for id, prompt in enumerate(PROMPTS):
        batch.add(row(id, prompt, len(prompt)))
    said = run(batch, runner, seed=5)
    wanted: dict[int, torch.Tensor] = {}
    for id, prompt in enumerate(PROMPTS):
        wanted[id] = golden.logits(prompt, said[id])
        assert wanted[id].argmax(-1).tolist() == said[id]
        assert_near(logits(recorder, id, len(prompt), len(prompt) + NEW), wanted[id])
    texts: dict[int, Sequence[int]] = {i: [*PROMPTS[i], *said[i]] for i in said}

    prompt, whole = PROMPTS[LONGEST], texts[LONGEST]
    assert len(prompt) > 3 * BLOCK
    other = [*prompt[: 2 * BLOCK], 9, 8, 7]
    # The first run's blocks are what is cached. The last comes back with four tokens, and none.
    batch.add(row(20, other, len(other), cached=2 * BLOCK, like=LONGEST))
    batch.add(row(21, prompt, len(prompt), cached=3 * BLOCK, like=LONGEST))
    batch.add(row(22, whole[: len(prompt) + 4], len(prompt)))
    again = run(batch, runner, seed=2)
    assert again[21] == said[LONGEST] and again[22] == said[LONGEST][4:]
    assert_near(logits(recorder, 21, len(prompt), len(whole)), wanted[LONGEST])
    assert_near(logits(recorder, 22, len(prompt) + 4, len(whole)), wanted[LONGEST][4:])
    found = golden.logits(other, again[20])
    assert found.argmax(-1).tolist() == again[20]
    assert_near(logits(recorder, 20, len(other), len(other) + NEW), found)

    drafting = batch_of(TextDrafter(texts))
    for id in DRAFTED:
        drafting.add(row(id, PROMPTS[id], len(PROMPTS[id])))
        recorder.by_place.pop(id)
    drafted = run(drafting, runner, seed=7)
    for id in DRAFTED:
        assert drafted[id] == said[id]
        first = len(PROMPTS[id])
        assert_near(logits(recorder, id, first, first + NEW), wanted[id])
