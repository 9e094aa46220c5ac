"""Tokens that a device has chosen count for its next choice, before the host has read them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.shard.sampling.sampling_support import EOS, PENALTIES, choose, normal, sequence
from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.torch_backend.sampling.choice_settings import Choosing

need_triton()

WHERE = torch.device(DEVICE)


class Following:
    """Rows that a device's sampler chooses for step after step, a step ahead of what they know."""

    def __init__(self, vocab_size: int, slots: int) -> None:
        from tgi_trio.shard.torch_backend.sampling.device_sampler import DeviceSampler

        self.sampler = DeviceSampler(vocab_size, [EOS], WHERE, most_rows=8)
        self.sampler.make_room(slots)
        self.vocab_size = vocab_size
        self.last: list[ShardSequence] = []  # of the step before, in its order
        self.chosen: dict[int, int] = {}  # what it chose for whom, and nobody has read
        self.sent = 0  # entries that went up in the last step

    def choose(self, rows: list[ShardSequence]) -> tuple[list[float], list[list[int]]]:
        """Return log-probabilities of the next tokens, and the tokens so far that they follow."""
        unknown = [self.last.index(row) if row.id in self.chosen else -1 for row in rows]
        count = len(rows)
        known = np.array([row.length for row in rows])
        positions = known + np.array([place >= 0 for place in unknown])
        every, none = np.arange(count), np.zeros(count, np.int64)
        inputs = np.array(unknown, np.int32)
        choosing = Choosing(rows, every, none, positions, every, inputs)
        told = self.sampler.make_inputs(choosing)
        self.sent = len(told.entries)
        logits = normal(count, self.vocab_size, seed=int(positions.sum()))
        scores = torch.tensor(logits, device=WHERE)
        found = self.sampler.choose(scores, self.sampler.upload(told)).tokens.cpu().numpy()
        self.settle()
        self.last = rows
        texts = [row.token_ids[: row.length].tolist() for row in rows]
        expected = choose(logits, [self.copy(row) for row in rows])
        assert [int(token) for token in found[:, 0]] == [row.token_ids[0] for row in expected]
        assert found[:, 1] == pytest.approx([row.logprobs[0] for row in expected], abs=2e-6)
        self.chosen = {row.id: int(token) for row, token in zip(rows, found[:, 0], strict=True)}
        return found[:, 1].tolist(), texts

    def settle(self) -> None:
        """Let the rows know what was chosen for them."""
        for row in self.last:
            if row.id in self.chosen:
                row.token_ids = np.append(row.token_ids[: row.length], self.chosen[row.id])
                row.token_ids, row.length = row.token_ids.astype(np.int32), row.length + 1
        self.chosen = {}

    def copy(self, row: ShardSequence) -> ShardSequence:
        """Return a row of the same tokens that nobody has counted."""
        asked = {name: getattr(row.sampling, name) for name in COUNTED}
        text = row.token_ids[: row.length].tolist()
        return sequence(text, prompt=row.prompt_length, **asked)


COUNTED = (
    *("repetition_penalty", "frequency_penalty", "presence_penalty", "absolute_penalties"),
    "logit_bias",
)


def followed() -> list[ShardSequence]:
    kinds = [*PENALTIES.values(), {}]
    rows = [sequence([5, 6, 7 + i, 5, 8], **kind) for i, kind in enumerate(kinds)]
    for i, row in enumerate(rows):
        row.id = i
    return rows


def test_counts_move_with_the_tokens_that_the_device_chose() -> None:
    """Rows change places, come, leave and come back; the last of them sit a step out."""
    following, rows = Following(12, slots=4), followed()
    batches = [rows, rows, rows[::-1], rows[1:], [rows[2], rows[0], rows[3]], rows[2:], rows, rows]
    for batch in batches:
        following.choose(batch)
    assert len({token for row in rows for token in row.token_ids[3:].tolist()}) > 3
    biases = len(rows[3].sampling.logit_bias)
    assert following.sent == biases  # nothing of what was counted


def test_a_step_that_is_repeated_counts_nothing_twice() -> None:
    following, rows = Following(12, slots=4), followed()
    following.choose(rows)
    void = dict(following.chosen)
    following.choose(rows)  # launched upon tokens that turn out to be void
    for row in rows:
        row.token_ids, row.length = row.token_ids[:5], 5
    following.last, following.chosen = [], {}
    again = following.choose(rows)
    assert following.chosen == void and again[1] == [row.token_ids.tolist() for row in rows]
    following.choose(rows)
    following.settle()
    following.choose(rows)  # whose tokens the host knows


def test_slots_are_taken_from_those_who_are_not_there() -> None:
    following, rows = Following(12, slots=2), followed()
    for batch in (rows[:2], rows[2:4], rows[1:3], [rows[0]], rows[:2], rows[3:]):
        following.choose(batch)
    following.sampler.drop(rows[3])
    following.choose(rows[:2])
    with pytest.raises(RuntimeError, match="more than 2 rows of a step have penalties"):
        following.choose(rows[:3])


def test_nothing_is_counted_of_a_row_that_has_left() -> None:
    """It has no last token, so memory that nobody wrote was counted as one, beyond the table."""
    following, rows = Following(12, slots=4), followed()
    following.choose(rows[:2])
    following.settle()
    gone, stays = rows[0], rows[1]
    following.sampler.drop(gone)
    gone.token_ids[gone.length - 1] = 32_761
    every, none = np.arange(2), np.zeros(2, np.int64)
    positions = np.array([gone.length, stays.length])
    choosing = Choosing([gone, stays], every, none, positions, every, gone=[0])
    told = following.sampler.make_inputs(choosing)
    assert told.entries[:, 0].tolist() == [stays.token_ids[stays.length - 1]]
    following.sampler.choose(torch.zeros((2, 12), device=WHERE), following.sampler.upload(told))
    following.last, following.chosen = [], {}
    following.choose([rows[1], rows[2], rows[3]])  # nobody holds the slot of the row that left


def test_a_repeated_step_counts_what_its_rows_have() -> None:
    """A step in flight is repeated with a row that has left since, and lacks its last token."""
    following, rows = Following(12, slots=4), followed()[:2]
    short = rows[0].length - 1
    rows[0].token_ids[short] = 32_761  # memory that nobody wrote
    rows[0].length = short
    every, none = np.arange(2), np.zeros(2, np.int64)
    positions = np.array([short + 1, rows[1].length])
    told = following.sampler.make_inputs(Choosing(rows, every, none, positions, every))
    assert set(told.entries[:, 0].tolist()) == {5, 6, 7, 8}


def test_drafts_of_a_row_that_has_left_are_not_counted() -> None:
    from tgi_trio.shard.torch_backend.sampling.choice_settings import ChoiceSettings
    from tgi_trio.shard.torch_backend.sampling.edits import list_edits
    from tgi_trio.shard.torch_backend.sampling.resident_counts import NONE, ResidentCounts

    rows = followed()[:2]
    owners, aheads = np.array([0, 0, 1]), np.array([0, 1, 0])
    positions = np.array([rows[0].length, rows[0].length + 1, rows[1].length])
    choosing = Choosing(rows, owners, aheads, positions, np.arange(3), gone=[0])
    edits = list_edits(choosing, ChoiceSettings.of(rows, 12), ResidentCounts(1))
    assert edits.slots.tolist() == [-1, -1, 0] and edits.moves.tolist()[:2] == [NONE, NONE]
    assert edits.starts[:2].max() == len(set(rows[1].token_ids.tolist()))
