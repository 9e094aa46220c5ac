"""The device's sampler against the host's, for the same logits: on a GPU, else interpreted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.shard.sampling.sampling_support import (
    EOS,
    MIXED,
    PENALTIES,
    PROCESSORS,
    Logits,
    OnlyAfter,
    choose,
    normal,
    sequence,
)
from tests.shard.torch_backend.interpreter import DEVICE, need_triton
from tgi_trio.shard.contract import RowResult, ShardSequence
from tgi_trio.shard.sampling.logits_processors import GrammarMasks, Watermark
from tgi_trio.shard.torch_backend.sampling.choice_masks import ChoiceMasks
from tgi_trio.shard.torch_backend.sampling.choice_settings import Choosing, count_up
from tgi_trio.shard.torch_backend.sampling.torch_sampler import permutation

need_triton()

WHERE = torch.device(DEVICE)


def device_choice(
    logits: Logits,
    rows: list[ShardSequence],
    unknown: list[int] | None = None,
    grammars: GrammarMasks | None = None,
) -> list[RowResult]:
    """Choose on the device; `unknown`: the last tokens, which only the device knows."""
    from tgi_trio.shard.torch_backend.sampling.device_choices import list_best, read_choices
    from tgi_trio.shard.torch_backend.sampling.device_sampler import DeviceSampler

    count, vocab_size, watermark = len(rows), logits.shape[1], Watermark()
    sampler = DeviceSampler(vocab_size, [EOS], WHERE, most_rows=16, delta=watermark.delta)
    positions = np.array([row.length for row in rows], np.int64)
    sampler.make_room(count)
    inputs = None
    if unknown is not None:
        sampler.chosen[:count] = torch.tensor(unknown[::-1])
        inputs = np.arange(count, dtype=np.int32)[::-1].copy()
        positions += 1
    every, none = np.arange(count), np.zeros(count, np.int64)
    choosing = Choosing(rows, every, none, positions, every, inputs)
    maker = ChoiceMasks(vocab_size, grammars, watermark, permutation)
    masked = sampler.settings(rows).masked
    masks = maker.make(choosing) if masked else None
    scores = torch.tensor(logits, device=WHERE)
    here = None if masks is None else sampler.upload_masks(masks)
    found = sampler.choose(scores, sampler.upload(sampler.make_inputs(choosing)), here)
    assert found.listed is not None
    tops = list_best(sampler.settings(rows).top_counts, found.listed.cpu().numpy())
    faults = {} if masks is None else masks.faults
    refused = sampler.settings(rows).faults
    results = read_choices(choosing, found.tokens.cpu().numpy(), tops, faults, refused).rows
    for i, result in enumerate(results):
        if result.fault is None:
            assert sampler.chosen[i].item() == result.token_ids[0]
    return results


def agree(ours: list[RowResult], theirs: list[RowResult]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.fault == other.fault and list(one.token_ids) == list(other.token_ids)
        assert one.logprobs == pytest.approx(other.logprobs, abs=2e-6)
        for tops, wanted in zip(one.tops, other.tops, strict=True):
            assert [token for token, _ in tops] == [token for token, _ in wanted]
            assert [p for _, p in tops] == pytest.approx([p for _, p in wanted], abs=2e-6)


@pytest.mark.parametrize("kind", PROCESSORS.values(), ids=PROCESSORS)
def test_it_chooses_what_the_host_chooses(kind: dict[str, Any]) -> None:
    logits = normal(2, 50, 1.0, seed=5)

    def rows() -> list[ShardSequence]:
        asked: list[dict[str, Any]] = [{"sample": False}, {"sample": True, "seed": 3}]
        return [sequence(top_n=2, minimum=1, **one, **kind) for one in asked]

    agree(device_choice(logits, rows()), choose(logits, rows()))


@pytest.mark.parametrize("kind", [{"top_p": 0.97}, {"typical_p": 0.9}, {"top_k": 600}], ids=str)
def test_flat_rows_are_cut_exactly(kind: dict[str, Any]) -> None:
    """More survive than the host looks at before it looks at all."""
    logits = normal(1, 700, 0.2, seed=1)

    def rows() -> list[ShardSequence]:
        return [sequence(sample=True, seed=4, **kind)]

    agree(device_choice(logits, rows()), choose(logits, rows()))


@pytest.mark.parametrize("shortlist", [32, 8192])
@pytest.mark.parametrize("programs", [1, 1000])
def test_rows_that_programs_share_are_chosen_for_alike(
    monkeypatch: pytest.MonkeyPatch, shortlist: int, programs: int
) -> None:
    """Parts of 16 tokens, with shortlists that hold what survives, and some that do not."""
    from tgi_trio.shard.torch_backend.sampling import choice_kernels

    monkeypatch.setattr(choice_kernels, "PART", 16)
    monkeypatch.setattr(choice_kernels, "SHORTLIST", shortlist)
    monkeypatch.setattr(choice_kernels, "PROGRAMS", programs)
    kinds: list[dict[str, Any]] = [*MIXED, {"top_p": 0.6, "top_n": 3}, {"typical_p": 0.4}]
    kinds.append({"sample": True, "top_k": 20, "top_p": 0.9, "frequency_penalty": 0.4})
    logits = normal(len(kinds), 150, seed=11)
    logits[1, 32:48] = -np.inf  # a part of which nothing is left

    def rows() -> list[ShardSequence]:
        return [sequence(seed=i, **kind) for i, kind in enumerate(kinds)]

    agree(device_choice(logits, rows()), choose(logits, rows()))


def test_logits_of_half_precision_are_chosen_from_now_or_later() -> None:
    """Those that are kept for later are there as they were, and chosen from in their place."""
    from tgi_trio.shard.torch_backend.sampling.device_sampler import DeviceSampler

    rows = [sequence(sample=True, top_p=0.8, seed=i, repetition_penalty=1.5) for i in range(2)]
    logits = torch.from_numpy(normal(2, 50, seed=6)).bfloat16()
    expected = choose(logits.float().numpy(), rows)
    sampler = DeviceSampler(50, [EOS], WHERE, most_rows=8)
    sampler.make_room(2)
    every, none = np.arange(2), np.zeros(2, np.int64)
    told = sampler.make_inputs(Choosing(rows, every, none, np.array([5, 5]), every))
    here, scores = logits.to(WHERE), sampler.make_scores(2)
    sampler.choose(here, sampler.upload(sampler.ask_nothing(2)), scores=scores)
    assert torch.equal(scores[:, :50].cpu(), logits.float())
    for source, into in ((here, None), (scores, scores)):
        found = sampler.choose(source, sampler.upload(told), scores=into).tokens.cpu()
        assert found[:, 0].tolist() == [row.token_ids[0] for row in expected]
        told.arrays[16][:] = -1  # counted once
    assert torch.equal(here.cpu(), logits)


def test_rows_of_all_kinds_together() -> None:
    kinds = MIXED
    logits = normal(len(kinds), 90, seed=2)

    def rows() -> list[ShardSequence]:
        return [sequence(seed=i, **kind) for i, kind in enumerate(kinds)]

    agree(device_choice(logits, rows()), choose(logits, rows()))


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**63),
    top_k=st.integers(0, 9),
    top_p=st.floats(0.05, 1.0),
    typical_p=st.sampled_from([1.0, 0.3, 0.8]),
    min_p=st.sampled_from([0.0, 0.1]),
    # Not less: a surprise is a sum that rounds scores away that differ by less than that, and the
    # host's sum rounds otherwise.
    spread=st.just(0.0) | st.floats(0.01, 4.0),
    levels=st.integers(1, 40),
)
def test_whatever_is_asked_together(
    seed: int,
    top_k: int,
    top_p: float,
    typical_p: float,
    min_p: float,
    spread: float,
    levels: int,
) -> None:
    """Scores of few levels tie at every threshold."""
    logits = np.round(normal(1, 40, 1.0, seed=seed % 1000) * levels) / np.float32(levels) * spread
    kind: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "typical_p": typical_p, "min_p": min_p}

    def rows() -> list[ShardSequence]:
        return [sequence(sample=True, seed=seed, **kind)]

    agree(
        device_choice(logits.astype(np.float32), rows()), choose(logits.astype(np.float32), rows())
    )


@pytest.mark.parametrize("kind", [{}, *PENALTIES.values()], ids=["none", *PENALTIES])
def test_a_row_s_own_ends_are_held_back(kind: dict[str, Any]) -> None:
    """The best two tokens, of which a bias favours one."""
    logits = normal(3, 30, seed=5)
    logits[:, [5, 9]] = [8.0, 9.0]

    def rows() -> list[ShardSequence]:
        own = [sequence(minimum=m, ends=(9, 5, 40), top_n=3, **kind) for m in (1, 0)]
        return [*own, sequence(minimum=1, **kind)]

    found = device_choice(logits, rows())
    agree(found, choose(logits, rows()))
    assert found[0].token_ids[0] not in (5, 9)


def test_own_ends_are_released_while_the_rows_stay_the_same() -> None:
    from tgi_trio.shard.torch_backend.sampling.device_sampler import DeviceSampler

    sampler = DeviceSampler(30, [EOS], WHERE, most_rows=4, delta=2.0)
    sampler.make_room(1)
    row = sequence([5, 6, 7, 5], minimum=2, ends=(9,))
    row.token_ids = np.resize(row.token_ids, 20)
    scores = torch.tensor(normal(1, 30, seed=5), device=WHERE)
    scores[0, 9] = 30.0
    every, said = count_up(1), list[int]()  # as decodes have it: most is that of the step before
    for _ in range(4):
        positions = np.array([row.length], np.int64)
        choosing = Choosing([row], every, np.zeros(1, np.int64), positions, every, None)
        told = sampler.upload(sampler.make_inputs(choosing))
        said.append(int(sampler.choose(scores.clone(), told).tokens[0, 0]))
        row.length += 1
        row.min_remaining = max(0, row.min_remaining - 1)
    assert [token == 9 for token in said] == [False, False, True, True]


@pytest.mark.parametrize("kind", PENALTIES.values(), ids=PENALTIES)
@pytest.mark.parametrize("last", [5, 21])  # one that has been said before, one that has not
def test_a_token_that_only_the_device_knows_counts(kind: dict[str, Any], last: int) -> None:
    logits = np.abs(normal(2, 30, seed=3))
    tokens = [5, 6, 7, 5, 8]
    early = [sequence(tokens, top_n=5, minimum=m, **kind) for m in (1, 2)]
    later = [sequence([*tokens, t], top_n=5, minimum=m, **kind) for m, t in ((0, last), (1, 9))]
    agree(device_choice(logits, early, [last, 9]), choose(logits, later))


def test_rows_that_have_nothing_to_choose_from_fail_alone() -> None:
    logits = normal(4, 20)
    logits[0, 3], logits[1, 4], logits[2] = np.nan, np.inf, -np.inf

    def rows() -> list[ShardSequence]:
        return [sequence(top_p=0.5, sample=True) for _ in range(4)]

    ours = device_choice(logits, rows())
    agree(ours, choose(logits, rows()))
    assert [bool(row.fault) for row in ours] == [True, True, True, False]


def test_a_biased_token_that_does_not_exist_is_a_fault() -> None:
    logits = normal(2, 20)

    def rows() -> list[ShardSequence]:
        return [sequence(logit_bias=((20, 1.0),)), sequence(logit_bias=((19, 1.0),))]

    agree(device_choice(logits, rows()), choose(logits, rows()))


def test_a_grammar_and_a_watermark_mask_their_own_rows() -> None:
    """Also where a grammar leaves nothing, has no mask, or nobody serves grammars."""
    logits = normal(6, 50, seed=4)

    def rows() -> list[ShardSequence]:
        return [
            sequence(grammar="20", repetition_penalty=1.3),
            sequence(watermark=True, sample=True, seed=6, top_n=3),
            sequence(grammar="broken"),
            sequence(),
            sequence(grammar="30", watermark=True),
            sequence(grammar="2", logit_bias=((4, -float("inf")),)),  # 4 alone is allowed
        ]

    for grammars in (OnlyAfter(), None):
        agree(
            device_choice(logits, rows(), grammars=grammars),
            choose(logits, rows(), grammars=grammars),
        )


def test_the_words_of_a_mask_end_where_they_must() -> None:
    """A vocabulary that fills no whole word, and wider grammars than it."""
    logits = normal(2, 45, seed=8)

    def rows() -> list[ShardSequence]:
        return [sequence(grammar="41"), sequence(watermark=True)]

    agree(
        device_choice(logits, rows(), grammars=OnlyAfter()),
        choose(logits, rows(), grammars=OnlyAfter()),
    )


def test_biases_go_up_when_the_rows_change() -> None:
    from tgi_trio.shard.torch_backend.sampling.device_sampler import DeviceSampler

    sampler = DeviceSampler(30, [EOS], WHERE, most_rows=8)
    reserved = sampler.reserve(2)
    logits = normal(2, 30, seed=4)

    def chosen(rows: list[ShardSequence]) -> list[int]:
        count, none = np.arange(len(rows)), np.zeros(len(rows), np.int64)
        positions = np.array([row.length for row in rows])
        told = sampler.make_inputs(Choosing(rows, count, none, positions, count), 2)
        sampler.refill(reserved, told)
        found = sampler.choose(torch.tensor(logits, device=WHERE), reserved.device_inputs).tokens
        expected = choose(logits[: len(rows)], rows)
        assert found[: len(rows), 0].tolist() == [row.token_ids[0] for row in expected]
        return found[:, 0].tolist()

    rows = [sequence(logit_bias=((n, 50.0),)) for n in (11, 12)]
    assert chosen(rows) == [11, 12]
    reserved.device_inputs.entries[:, 0] += 10  # nobody writes there again
    kept = reserved.device_inputs.entries.clone()
    two, none = np.arange(2), np.zeros(2, np.int64)
    told = sampler.make_inputs(Choosing(rows, two, none, np.full(2, 5), two), 2)
    sampler.refill(reserved, told)
    assert torch.equal(reserved.device_inputs.entries, kept)
    assert chosen(rows[::-1]) == [12, 11]
    assert chosen(rows[:1])[0] == 11


@pytest.mark.parametrize(("levels", "most"), [(1, 64), (3, 300), (10**6, 64), (10**6, 300)])
def test_the_best_tokens_are_the_host_s(levels: int, most: int) -> None:
    """Of more tokens than are listed, tied or not, cut or not; 64 are what a recording lists."""
    logits = np.round(normal(5, 900, 1.0, seed=9) * levels) / np.float32(levels)

    def rows() -> list[ShardSequence]:
        cuts: list[dict[str, Any]] = [{"top_k": 30}, {"top_p": 0.9}, {}, {"typical_p": 0.5}, {}]
        wanted = (5, 20, 64, 3, most)
        return [
            sequence(sample=True, seed=i, top_n=n, **cut)
            for i, (n, cut) in enumerate(zip(wanted, cuts, strict=True))
        ]

    ours, theirs = device_choice(logits, rows()), choose(logits, rows())
    for one, other in zip(ours, theirs, strict=True):
        assert list(one.token_ids) == list(other.token_ids)
        (tops,), (wanted,) = one.tops, other.tops
        # Which of those that tie with the last are listed is open; their number is limited.
        assert sorted(p for _, p in tops) == pytest.approx(
            sorted(p for _, p in wanted)[-len(tops) :], abs=2e-6
        )
        least = tops[-1][1]
        assert [t for t, p in tops if p > least + 1e-5] == [
            t for t, p in wanted if p > least + 1e-5
        ]
        assert len(tops) == len({token for token, _ in tops})
