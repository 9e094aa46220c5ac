"""The real sampler, one position after the other: drafts change how many, never which."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.shard.torch_backend.models_support import plan, sequence
from tgi_trio.shard.contract import RowResult, ShardSequence
from tgi_trio.shard.cpu_backend.cpu_sampler import CpuSampler
from tgi_trio.shard.sampling import choosing
from tgi_trio.shard.sampling.base import RowSampler
from tgi_trio.shard.sampling.logits_processors import TokenCounts
from tgi_trio.shard.torch_backend.sampling.torch_sampler import Sampler

VOCAB = 40
EOS = 2

SETTINGS: dict[str, dict[str, object]] = {
    "greedy": {},
    "sampled": {"sample": True, "seed": 11, "temperature": 1.3},
    "cut": {"sample": True, "seed": 5, "top_k": 9, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    "absolute": {"absolute_penalties": True, "frequency_penalty": 0.9, "sample": True, "seed": 3},
    "tops": {"top_n": 3},
    "watermark": {"watermark": True, "sample": True, "seed": 8},
    "grammar": {"grammar": "odd then even", "sample": True, "seed": 4},
}


class OddThenEven:
    """Grammars of one kind: odd and even tokens take turns."""

    def start(self) -> None: ...

    def prepare(self, sequence: ShardSequence) -> bool:
        return True

    def drop(self, sequence: ShardSequence) -> None:
        return None

    def rewind(self, sequence: ShardSequence) -> None: ...

    def pieces(self, ids: NDArray[np.int64]) -> list[bytes]:
        raise ValueError("no row fills a gap here")

    def allowed(self, sequences: list[ShardSequence]) -> tuple[np.ndarray, dict[int, str]]:
        said = [row.length - row.prompt_length for row in sequences]
        rows = np.stack([np.arange(VOCAB) % 2 != count % 2 for count in said])
        return np.packbits(rows, axis=1, bitorder="little"), {}


def new_sampler(kind: str = "torch") -> RowSampler:
    if kind == "kernels":
        return CpuSampler(VOCAB, [EOS], grammars=OddThenEven())
    return Sampler(VOCAB, [EOS], torch.device("cpu"), grammars=OddThenEven())


def scores(token_ids: np.ndarray) -> torch.Tensor:
    """A model: logits [vocab] as a function of the last two tokens."""
    seed = int(token_ids[-1]) * 101 + int(token_ids[-2])
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def one_by_one(rows: list[ShardSequence], count: int) -> dict[int, list[RowResult]]:
    """Choose `count` tokens for every row without drafts."""
    sampler = new_sampler()
    found: dict[int, list[Any]] = {row.id: [] for row in rows}
    for _ in range(count):
        logits = torch.stack([scores(row.token_ids[: row.length]) for row in rows])
        for row, result in zip(rows, sampler.choose(logits, rows).rows, strict=True):
            assert result.fault is None
            found[row.id].append(result)
            row.token_ids[row.length] = result.token_ids[0]
            row.length += 1
            row.min_remaining = max(0, row.min_remaining - 1)
    return found


def rows_of(names: list[str], min_new: int = 0) -> list[ShardSequence]:
    rows = [sequence(i, [3, 9, 4, 9], [1], new=12, **SETTINGS[n]) for i, n in enumerate(names)]
    for row in rows:
        row.min_remaining = min_new
    return rows


def with_drafts(row: ShardSequence, drafts: list[int]) -> int:
    row.token_ids[row.length : row.length + len(drafts)] = drafts
    return len(drafts)


@pytest.mark.parametrize("kind", ["torch", "kernels"])
@pytest.mark.parametrize("min_new", [0, 3])
@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), min_size=8, max_size=8))
def test_any_drafts_give_the_tokens_of_decoding_one_by_one(
    kind: str, min_new: int, cases: list[tuple[int, int]]
) -> None:
    """Per row: how many drafts, and which of them is the first that is wrong."""
    names = list(SETTINGS)
    expected = one_by_one(rows_of(names, min_new), 6)
    rows, counts = rows_of(names, min_new), []
    for row, (count, wrong) in zip(rows, cases, strict=True):
        row.computed = row.length - 1
        drafts = [result.token_ids[0] for result in expected[row.id]][:count]
        drafts[wrong : wrong + 1] = [(g + 1) % VOCAB for g in drafts[wrong : wrong + 1]]
        counts.append(with_drafts(row, drafts))
    step = plan(rows, [1 + count for count in counts])
    step.samples[:] = True
    step.drafts = np.array(counts, np.int32)
    sampled = np.arange(len(rows))
    places = choosing.choice_positions(step, sampled)
    logits = torch.stack(
        [
            scores(row.token_ids[: row.length + ahead])
            for row, count in zip(rows, counts, strict=True)
            for ahead in range(count + 1)
        ]
    )
    assert places.tolist() == list(range(len(logits)))
    given_logits = logits.numpy() if kind == "kernels" else logits
    results = choosing.choose_tokens(new_sampler(kind), given_logits, step, sampled).rows
    for row, result, (count, wrong) in zip(rows, results, cases, strict=True):
        right = min(count, wrong) + 1
        wanted = expected[row.id][:right]
        assert list(result.token_ids) == [w.token_ids[0] for w in wanted]
        assert list(result.logprobs) == pytest.approx([w.logprobs[0] for w in wanted], abs=1e-5)
        assert [[t for t, _ in top] for top in result.tops] == [
            [t for t, _ in w.tops[0]] for w in wanted
        ]
        assert row.length == 4  # the worker moves it, not the runner


def test_without_drafts_the_last_token_of_each_row_is_wanted() -> None:
    rows = rows_of(["greedy", "tops", "cut"])
    step = plan(rows, [4, 2, 4])
    assert choosing.choice_positions(step, np.array([0, 2])).tolist() == [3, 9]


def test_a_fault_after_a_right_draft_waits_for_its_own_step() -> None:
    (row,) = rows_of(["greedy"])
    row.computed = row.length - 1
    first = int(scores(row.token_ids[: row.length]).argmax())
    with_drafts(row, [first])
    step = plan([row], [2])
    step.samples[:] = True
    step.drafts = np.array([1], np.int32)
    logits = torch.stack([scores(row.token_ids[: row.length]), torch.full((VOCAB,), torch.nan)])
    (result,) = choosing.choose_tokens(new_sampler(), logits, step, np.array([0])).rows
    assert result.fault is None and result.token_ids == (first,)


def test_counts_of_a_step_that_is_repeated_are_taken_back() -> None:
    (row,) = rows_of(["penalties"])
    counts = TokenCounts(0)
    with_drafts(row, [9, 9])
    row.length += 2
    counts.update(row)
    row.length -= 2
    ids, found = counts.update(row)
    assert dict(zip(ids.tolist(), found.tolist(), strict=True)) == {3: 1, 9: 2, 4: 1}
