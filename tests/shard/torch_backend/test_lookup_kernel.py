"""What a device finds in texts that it keeps itself, against the host's drafts of n-grams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tests.shard.torch_backend.models_support import sequence
from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.speculation.ngram import NgramDrafter
from tgi_trio.shard.torch_backend.sampling.choice_settings import Choosing

need_triton()

from tgi_trio.shard.torch_backend.drafting import device_texts  # noqa: E402  (it imports Triton)
from tgi_trio.shard.torch_backend.drafting.device_texts import DeviceTexts, Judged  # noqa: E402

EOS, MOST, ROOM = 3, 4, 48
WHERE = torch.device(DEVICE)


class Walk:
    """Rows whose tokens come from nowhere, step after step, and the texts that a device keeps."""

    def __init__(self, texts: list[list[int]], ignoring: int) -> None:
        self.texts = DeviceTexts(MOST, [EOS, 9], WHERE, rows=8)
        self.texts.make_room(len(texts), ROOM)
        self.rows = [
            sequence(i, text, [1], ROOM, ignore_eos=i == ignoring) for i, text in enumerate(texts)
        ]
        self.output = [list(text) for text in texts]  # what the device has computed and chosen

    def step(
        self, chosen: list[list[int]], *, ahead: bool = False, moves: bool = False
    ) -> list[list[int]]:
        """Choose tokens for every row, all but the last of which were drafted; return drafts.

        `ahead`: behind a step of which the rows know nothing yet; they know of it afterwards. That
        it `moves` may be left out where each got a single token.
        """
        wrong = [min(i % 3, MOST + 1 - len(own)) for i, own in enumerate(chosen)]
        counts = [len(own) + more for own, more in zip(chosen, wrong, strict=True)]
        owners = np.repeat(np.arange(len(self.rows)), counts)
        aheads = np.concatenate([np.arange(count) for count in counts])
        places = np.array([len(said) - 1 for said in self.output])[owners] + aheads
        known = np.array([row.length - 1 + ahead for row in self.rows])[owners] + aheads
        ids = [
            token
            for said, own, more in zip(self.output, chosen, wrong, strict=True)
            for token in (said[-1], *own[:-1], *[7] * more)
        ]
        found = np.full((len(owners), 3), 8.0)
        for row, own in enumerate(chosen):
            found[np.flatnonzero(owners == row)[: len(own)], 0] = own
        choosing = Choosing(self.rows, owners, aheads, known + 1, owners)
        plan: Any = SimpleNamespace(
            rows=self.rows, positions=known, rotary_positions=None, moves=moves
        )
        slots, ends = self.texts.arrays(plan, choosing)
        moved = np.array([len(own) - 1 for own in chosen], np.int32)
        arrays = (found, np.array(ids), places, owners, aheads.astype(np.int32), moved, slots, ends)
        judged = Judged(*(torch.tensor(array, device=WHERE) for array in arrays))
        drafted = torch.full((len(self.rows), MOST), -5, device=WHERE)
        behind = self.texts.look_up(judged, drafted).cpu().numpy()
        lasts = np.searchsorted(owners, np.arange(len(self.rows))) + moved
        assert behind[lasts].tolist() == drafted.tolist()
        if ahead:
            self.read()
        for said, own in zip(self.output, chosen, strict=True):
            said += own
        return [[token for token in own if token >= 0] for own in drafted.tolist()]

    def read(self) -> None:
        """Let the rows know all that has been chosen."""
        for row, said in zip(self.rows, self.output, strict=True):
            row.token_ids[: len(said)], row.length = said, len(said)

    def expected(self) -> list[list[int]]:
        """Return what the host drafts behind all that has been chosen."""
        found = []
        for row, said in zip(self.rows, self.output, strict=True):
            ignores = row.sampling.ignore_eos
            own = sequence(0, said, [1], ROOM, ignore_eos=ignores)
            count = NgramDrafter(MOST, [EOS, 9]).draft(own, MOST)
            found.append(own.token_ids[len(said) : len(said) + count].tolist())
        return found


ids = st.integers(3, 5)
steps = st.tuples(
    st.sampled_from(["moves", "plain", "known", "unseen"]),
    st.lists(st.lists(ids, min_size=1, max_size=MOST + 1), min_size=3, max_size=3),
)


@settings(max_examples=8)
@given(
    st.lists(st.lists(ids, min_size=1, max_size=20), min_size=3, max_size=3),
    st.lists(steps, min_size=3, max_size=4),
    st.sampled_from([16, 64]),
    st.integers(0, 3),
)
def test_the_device_drafts_what_the_host_drafts(
    texts: list[list[int]], walk: list[tuple[str, list[list[int]]]], block: int, ignoring: int
) -> None:
    """Texts shared by programs or not, of steps read first, of others, and with some left out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_texts, "_BLOCK", block)
        patch.setattr(device_texts, "_MOST_PIECES", 3)
        rows, before = Walk(texts, ignoring), 0  # the most tokens that a row got in the last step
        for kind, chosen in walk:
            if kind == "unseen":  # computed where nothing is kept
                rows.read()
                for said, own in zip(rows.output, chosen, strict=True):
                    said += own
                before = 0
                continue
            ahead = bool(before) if kind == "moves" else kind == "plain" and before == 1
            if not ahead:
                rows.read()
            found = rows.step(chosen, ahead=ahead, moves=ahead and kind == "moves")
            assert found == rows.expected()
            before = max(map(len, chosen))


def test_a_step_that_is_repeated_is_written_again() -> None:
    rows = Walk([[5, 6, 7, 8], [4, 4, 4]], ignoring=2)
    rows.step([[5], [4]])
    rows.output = [said[:-1] for said in rows.output]  # it has failed, and chooses something else
    rows.step([[6], [5]])
    rows.read()
    assert rows.step([[7], [4]]) == rows.expected() == [[8, 6, 7, 8], []]


def test_what_is_too_long_or_comes_too_late_is_nobody_s() -> None:
    rows = Walk([[4, 5] * 4], ignoring=1)
    row = rows.rows[0]

    def arrays(place: int, *, moves: bool) -> list[int]:
        one = np.zeros(1, np.int64)
        plan: Any = SimpleNamespace(
            rows=[row], positions=one + place, rotary_positions=None, moves=moves
        )
        if not rows.texts.holds(plan):
            return []
        slots, _ = rows.texts.arrays(plan, Choosing([row], one, one, one + place + 1, one))
        return slots.tolist()

    assert arrays(7, moves=True) == [-1]  # a step behind one that kept nothing
    assert arrays(7, moves=False) == [0] == arrays(8, moves=True)
    longest = rows.texts.room - MOST - 2
    assert longest >= ROOM and arrays(longest, moves=True) == [0]
    assert arrays(longest + 1, moves=True) == []


def test_all_texts_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_texts, "MOST_TOKENS", 128)
    texts = DeviceTexts(MOST, [], WHERE, rows=8)
    texts.make_room(4, 1 << 20)
    assert texts.room == 32
    rows: list[ShardSequence] = [sequence(i, [5], [1]) for i in range(5)]
    plan: Any = SimpleNamespace(rows=rows, positions=np.zeros(5), rotary_positions=None)
    assert not texts.holds(plan)
    plan.rows = rows[:4]
    assert texts.holds(plan)
