"""Models behind prefixes that another shard has kept: the same logits, to the bit, and drafts.

Those of Qwen 4 and GLM 5.3, whose prefixes are more than K and V: keys of an index and the turns of
its tokens, states of layers and of n-grams, and what layers keep that draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.shard.moved_tokens import tokens_of
from tests.shard.speculation.eagle_support import eagle
from tests.shard.speculation.heads_support import Watched
from tests.shard.speculation.mtp_support import mtp_checkpoint
from tests.shard.speculation.test_mtp import WIDER
from tests.shard.torch_backend.models_support import BLOCK, GreedyRecorder
from tgi_trio.ipc.messages import PrefillRow, SamplingParameters, StateGrant
from tgi_trio.ipc.prefixes import KeepOrder, RestoreOrder
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.shard.backend import load_runner
from tgi_trio.shard.loop.batch import Batch
from tgi_trio.shard.runner import Runner
from tgi_trio.testing.checkpoints import make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

KEY, MOST, NEW = bytes(range(16)), 3, 12
GREEDY = SamplingParameters(ignore_eos=True)
# Nothing that comes again: of tokens as good as others either may be chosen.
PROMPT: list[int] = np.random.default_rng(9).integers(3, 500, 90).tolist()
OTHER = [*PROMPT[:80], 9, 8, 7]
# Indexes have keys of runs of tokens, which the ends of what is kept must cut in two.
FAMILIES: dict[str, tuple[str, dict[str, int]]] = {
    "qwen4": ("qwen4_exp_text", {"indexer_compress_ratio": 12, "indexer_budget": 24}),
    "glm5": ("glm5_next_text", {"index_kpool": 7, "index_topk": 21}),
}
BLOCKS, SLOTS = (7, 3, 12, 19, 5), (9, 4)  # what PROMPT has; its states behind 32 and 80 tokens


@dataclass
class Answer:
    """What a row brought."""

    tokens: list[int]
    logits: torch.Tensor  # that they were chosen from, float32 [tokens, vocabulary]
    drafts: list[tuple[list[int], list[int]]] = field(default_factory=list)  # behind what


class Shard:
    """A runner with a batch; every row is alone in its steps."""

    def __init__(self, settings: ShardSettings) -> None:
        runner: Any = load_runner(settings)
        self._recorder = runner.sampler = GreedyRecorder()
        room = runner.warm_up(WarmupRequest(64, 256, 8, 64 * BLOCK))
        drafter = runner.drafter(MOST) if settings.speculate else None
        self._watched = None if drafter is None else Watched(drafter)
        self.runner: Runner = runner
        self.stateful = bool(runner.info.state_bytes)
        self._batch = Batch(
            vocab_size=runner.info.vocab_size,
            block_size=BLOCK,
            blocks=room.blocks,
            eos_ids=(),
            state_slots=room.state_slots,
            drafter=self._watched,
            draft_budget=8,
        )

    def answer(
        self,
        id: int,
        prompt: Sequence[int],
        held: Sequence[int],
        states: StateGrant,
        *,
        cached: int = 0,
        new: int = NEW,
    ) -> Answer:
        """Answer a prompt that begins in the blocks `held`, and goes on in blocks of its own."""
        need = -(-(len(prompt) + new + MOST) // BLOCK) - len(held)
        table = [*held, *range(20 + 4 * id, 20 + 4 * id + need)]
        row = PrefillRow(id, np.array(prompt, np.int32), len(prompt), cached, table, new, 0, GREEDY)
        self._batch.add(replace(row, states=states) if self.stateful else row)
        tokens: list[int] = []
        places = self._recorder.by_place.setdefault(id, {})
        drafts = [] if self._watched is None else self._watched.drafted
        drafts.clear()
        while (plan := self._batch.plan(64)) is not None:
            result = replace(self.runner.step(plan), forward_ns=0, sample_ns=0, processor_ns=0)
            moved = self._batch.settle(plan, result)
            assert not moved.faults
            for _, found in tokens_of(moved):
                tokens += found
            for gone in moved.dropped:
                self.runner.drop(gone)
        logits = torch.stack([places[at] for at in range(len(prompt), len(prompt) + new)])
        return Answer(tokens, logits, list(drafts))

    def begin(self, blocks: Sequence[int], slots: Sequence[int]) -> list[Answer]:
        """Answer behind all that is kept, then where states have to be computed from 32 on."""
        whole = StateGrant((11, 12), source=slots[1])
        part = StateGrant((13, 14), source=slots[0], held_length=80)
        return [
            self.answer(1, OTHER, blocks, whole, cached=80),
            self.answer(2, PROMPT, blocks, part, cached=32 if self.stateful else 80),
        ]


CASES = [
    *((family, "kernels", kind) for family in FAMILIES for kind in ("", "mtp")),
    *((family, "torch", kind) for family in FAMILIES for kind in ("", "mtp")),
    *(("llama", backend, "eagle") for backend in ("kernels", "torch")),
]


@pytest.fixture
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> ShardSettings:
    family, backend, kind = request.param
    folder, drafter = tmp_path / "model", None
    if family == "llama":
        make_checkpoint(folder, family, head_dim=32)
        drafter = eagle(tmp_path / "drafter", folder, 512)
    else:
        name, runs = FAMILIES[family]
        mtp_checkpoint(folder, name, **WIDER[name] | runs)
    return ShardSettings(
        model_path=folder,
        cpu_backend=backend,
        cpu_threads=1,
        drafter="mtp" if kind == "mtp" else None,
        draft_model=drafter,
        speculate=MOST if kind else 0,
    )


@pytest.mark.sampled(3)
@pytest.mark.parametrize("settings", CASES, ids="-".join, indirect=True)
def test_another_shard_goes_on_to_the_bit(settings: ShardSettings, tmp_path: Path) -> None:
    old, new = Shard(settings), Shard(settings)
    saves = tuple(zip((32, 80), SLOTS, strict=True))
    # One token: what drafts has read nothing of it when it ends.
    old.answer(0, PROMPT, BLOCKS, StateGrant((1, 2), saves=saves), new=1)
    order = KeepOrder(tmp_path, KEY, BLOCKS, SLOTS if old.stateful else ())
    assert not old.runner.prefixes.keep(order).error
    expected = old.begin(BLOCKS, SLOTS)
    report = new.runner.prefixes.restore(
        RestoreOrder(tmp_path, KEY, len(order.blocks), len(order.slots))
    )
    assert not report.error
    found = new.begin((1, 2, 3, 4, 5), (1, 2))
    alone = Shard(settings).answer(2, PROMPT, (), StateGrant((1, 2)))
    assert found[1].tokens == alone.tokens
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.tokens == theirs.tokens
        assert torch.equal(ours.logits, theirs.logits)
        assert ours.drafts == theirs.drafts
        assert any(drafted for _, drafted in ours.drafts) == bool(settings.speculate)
