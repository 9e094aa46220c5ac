"""Several layers in a row: what each holds of a token follows from known tokens in the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.ipc.startup import BLOCK_SIZE
from tgi_trio.shard.contract import Choices, ShardSequence, StepPlan
from tgi_trio.shard.speculation.drafter_plans import plan_rows
from tgi_trio.shard.speculation.mtp import MtpReader

LAYERS, PROMPT, NEW, WRONG = 3, 5, 7, 9999
Rows = NDArray[Any]


class Layer:
    """A layer that writes down what it reads of each token, and always drafts wrong."""

    max_positions = 0
    token_map: NDArray[np.int64] | None = None
    features = 1
    kv_bytes_per_token = 0
    caches = ()

    def __init__(self) -> None:
        self.held: dict[int, tuple[int, int]] = {}  # by slot: the token, and the state

    def nbytes(self) -> int:
        return 0

    def make_room(self, blocks: int) -> int:
        return 0

    def join(self, parts: Sequence[Rows]) -> Rows:
        return np.concatenate(parts)

    def pick(self, states: Rows, places: NDArray[np.int64]) -> Rows:
        return states[places]

    def fuse(self, states: Rows) -> Rows:
        return states

    def read(self, plan: StepPlan, states: Rows) -> Rows:
        reads = zip(plan.kv_slots.tolist(), plan.token_ids.tolist(), states.tolist(), strict=True)
        self.held |= {slot: (token, state) for slot, token, state in reads}
        return following_state(plan.token_ids, states)

    def draft(self, states: Rows) -> NDArray[np.int64]:
        return np.full(len(states), WRONG)

    def run(self, *_: object) -> Any:
        raise NotImplementedError


def following_state(token: Any, state: Any) -> Any:
    return (31 * state + token) % 1_000_003


def new_sequence(number: int, ids: list[int]) -> ShardSequence:
    known = np.array(ids, np.int32)
    return ShardSequence(
        number, known, PROMPT, PROMPT, 0, [number, number + 10], NEW, 0, SamplingParameters()
    )


def step(reader: MtpReader, rows: list[ShardSequence], first: list[int]) -> None:
    """Compute all tokens of rows from a position on; a token's state is the token."""
    counts = np.array([row.length - at for row, at in zip(rows, first, strict=True)])
    spans = [np.arange(at, row.length) for row, at in zip(rows, first, strict=True)]
    ids = np.concatenate([row.token_ids[span] for row, span in zip(rows, spans, strict=True)])
    plan = plan_rows(rows, counts, np.concatenate(spans), ids, samples=True)
    chosen = np.array([row.token_ids[row.length] for row in rows], np.int64)
    choices = Choices(np.ones(len(rows), np.int64), chosen, np.zeros(len(rows)))
    tokens = plan.token_ids.copy()
    reader.keep(plan, np.arange(len(rows)), choices, lambda places: tokens[places])
    for row in rows:
        row.length += 1


@pytest.mark.parametrize("every", [1, 2, 4])  # steps between two readings
def test_what_wrong_drafts_left_is_read_again(every: int) -> None:
    texts = [[100 * n + i for i in range(PROMPT + NEW)] for n in (1, 2)]
    rows = [new_sequence(n, text) for n, text in zip((1, 2), texts, strict=True)]
    layers = [Layer() for _ in range(LAYERS)]
    reader = MtpReader(layers)
    step(reader, rows, [0, 0])
    for number in range(NEW - 1):
        if number % every == 0:
            found = reader.read(rows[:1])
            assert found is not None and found[1].tolist() == [[WRONG] * LAYERS]
        step(reader, rows, [row.length - 1 for row in rows])
    reader.read(rows)
    for row, text in zip(rows, texts, strict=True):
        for position in range(row.length - 1 - LAYERS):
            state, slot = text[position], row.block_ids[0] * BLOCK_SIZE + position
            for k, layer in enumerate(layers):
                assert layer.held[slot] == (text[position + 1 + k], state)
                state = following_state(text[position + 1 + k], state)


def test_sequences_that_have_ended_are_forgotten() -> None:
    text = list(range(PROMPT + NEW))
    layers = [Layer() for _ in range(LAYERS)]
    reader = MtpReader(layers)
    for number in range(1, 4):
        row = new_sequence(number, text)
        step(reader, [row], [0])
        reader.read([row])
        step(reader, [row], [row.length - 1])
        reader.drop(row)  # whose last token is read before the next step
    assert reader.backlog.due
    reader.read([])
    assert not reader._tails and not reader.backlog.size
