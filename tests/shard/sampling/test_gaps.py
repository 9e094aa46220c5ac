"""Choosing in gaps, against llama.cpp's own sampler, and as both samplers do it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.shard.sampling.sampling_support import EOS, Logits, OnlyAfter, choose, normal, sequence
from tgi_trio.shard.contract import RowResult, ShardSequence
from tgi_trio.shard.cpu_backend.cpu_sampler import CpuSampler
from tgi_trio.shard.sampling.base import NO_PIECES
from tgi_trio.shard.sampling.gaps import keep_for_gap

# What `llama_sampler_init_infill` of llama.cpp v0.5.0 leaves of candidates from the vocabulary in
# its ggml-vocab-qwen2.gguf: [id, text, logit, whether it ends a text], and the ids left.
CASES = json.loads((Path(__file__).parent / "infill_cases.json").read_text())
FILLS: dict[str, Any] = {"sample": True, "top_k": 40, "top_p": 0.99, "gap_ends": (11, 12)}


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_what_is_left_is_what_llama_cpp_leaves(case: dict[str, Any]) -> None:
    ids, texts, logits, ends = zip(*case["candidates"], strict=True)
    pieces = [text.encode() for text in texts]
    left = keep_for_gap(np.array(logits, np.float64), np.array(ends, np.bool_), pieces)
    found = [ids[place] for place in np.flatnonzero(left)]
    others = {each for each, end in zip(ids, ends, strict=True) if not end}
    if not found:  # it takes an end, whether that was a candidate or not
        assert not others & set(case["left"])
    else:
        assert found == case["left"]


def test_the_cases_say_something() -> None:
    """Each rule decides some of them: nothing is left, one of several is, and several are."""
    ends = [{each[0] for each in case["candidates"] if each[3]} for case in CASES]
    endings = sum(set(case["left"]) <= own for case, own in zip(CASES, ends, strict=True))
    sizes = Counter(len(case["left"]) for case in CASES)
    assert endings > 10 and sizes[1] > 10 and sum(sizes[n] for n in (2, 3, 4)) > 30


class Words(OnlyAfter):
    """Token 5 is `pri`, 6 `print`, 7 `return`; 11 and 12 have no text."""

    def pieces(self, ids: NDArray[np.int64]) -> list[bytes]:
        texts = {5: b"pri", 6: b"print", 7: b"return", 11: b"", 12: b""}
        return [texts.get(each, b"%d." % each) for each in ids.tolist()]


def kernels(logits: Logits, rows: list[ShardSequence]) -> list[RowResult]:
    sampler = CpuSampler(logits.shape[1], [EOS], grammars=Words())
    return sampler.choose(logits.copy(), rows).rows


def both(logits: Logits, rows: list[ShardSequence]) -> list[RowResult]:
    """Return what both samplers of the host choose."""
    ours, theirs = kernels(logits, rows), choose(logits, rows, grammars=Words())
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids and one.fault == other.fault
        assert one.logprobs == pytest.approx(other.logprobs, abs=2e-6)
    return ours


def scores(*, size: int = 300, **likely: Any) -> Logits:
    """Return one row in which `t5=0.3` gives token 5 that probability, nearly."""
    row = np.full((1, size), -30, np.float32)
    for name, odds in likely.items():
        row[0, int(name[1:])] = np.log(odds)
    return row


def only(logits: Logits, **more: Any) -> tuple[int, float]:
    (result,) = both(logits, [sequence(**{**FILLS, **more})])
    (token,), (logprob,) = result.token_ids, result.logprobs
    return token, round(logprob, 6) + 0.0


@pytest.mark.parametrize("size", [40, 300, 3000])
def test_beginnings_of_one_another_count_together(size: int) -> None:
    # 0.15 and 0.1 are too little each, but the same text; 0.19 is too little.
    odds: dict[str, Any] = {f"t{i}": 0.08 for i in range(20, 27)}
    token, logprob = only(scores(size=size, t5=0.1, t6=0.15, t7=0.19, **odds))
    assert (token, logprob) == (6, 0.0)
    assert only(scores(size=size, t5=0.15, t6=0.1, t7=0.19, **odds)) == (5, 0.0)


def test_a_text_ends_where_no_token_is_likely_enough() -> None:
    doubtful: dict[str, Any] = {f"t{i}": 0.19 for i in range(20, 26)}
    assert only(scores(**doubtful)) == (11, 0.0)
    # Of those that end it, the likeliest candidate.
    assert only(scores(**doubtful, t12=0.001), top_p=1.0) == (12, 0.0)


def test_a_text_ends_where_an_end_is_at_all_likely() -> None:
    assert only(scores(t7=0.8, t12=0.2))[0] == 12
    assert only(scores(t7=0.8, t2=0.2))[0] == EOS  # the model's own
    assert only(scores(t7=0.9, t12=0.1))[0] == 7
    # The more candidates, the less is enough.
    assert only(scores(t7=0.82, t8=0.08, t12=0.1), top_p=0.999)[0] == 12


def test_what_is_left_is_drawn_by_its_own_probability() -> None:
    logits = scores(t6=0.3, t5=0.1, t7=0.4)
    rows = [sequence(**FILLS, seed=seed) for seed in range(2000)]
    drawn = Counter(r.token_ids[0] for r in both(np.repeat(logits, len(rows), axis=0), rows))
    assert set(drawn) == {6, 7}  # 5 was joined to 6, which is drawn by its own 0.3
    assert drawn[7] / len(rows) == pytest.approx(4 / 7, abs=0.04)
    assert only(logits, sample=False)[0] == 7


def test_rows_do_not_change_one_another() -> None:
    logits = normal(6, 700)
    settings = [FILLS, {"sample": True, "top_k": 7}, {**FILLS, "top_k": 512}, {}, FILLS]
    rows = [sequence(**each, seed=i) for i, each in enumerate([*settings, {**FILLS, "top_k": 0}])]
    together = both(logits, rows)
    for place, row in enumerate(rows):
        (alone,) = both(logits[place : place + 1], [row])
        assert alone == together[place]


def test_a_flat_row_ends() -> None:
    """More tokens than candidates are listed tie with the last one: any of them may be listed."""
    logits, rows = np.zeros((1, 2000), np.float32), [sequence(**FILLS)]
    for (result,) in (kernels(logits, rows), choose(logits, rows, grammars=Words())):
        assert result.fault is None and result.token_ids[0] in {EOS, 11, 12}


def test_without_texts_of_tokens_only_such_rows_fail() -> None:
    rows = [sequence(**FILLS), sequence()]
    failed, other = choose(normal(2, 100), rows)
    assert failed.fault == NO_PIECES and other.fault is None
    (result,) = both(np.full((1, 300), np.nan, np.float32), [sequence(**FILLS)])
    assert result.fault is not None and "NaN" in result.fault
