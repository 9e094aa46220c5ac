"""Models that choose blocks of tokens, over the stand-in device: what the CPU says, recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.shard.adapters.peft_support import install, write_adapter
from tests.shard.loop.scripted_router import row
from tests.shard.torch_backend.interpreter import need_triton

need_triton()

from tests.shard.torch_backend.stand_in_ranks import two_ranks  # noqa: E402  (it imports Triton)
from tests.shard.torch_backend.stand_in_shard import device_shard  # noqa: E402
from tests.shard.torch_backend.stand_in_support import (  # noqa: E402
    REQUEST,
    Foretelling,
    agree,
    drive,
    start,
)
from tgi_trio.ipc.messages import PrefillRow, StateGrant  # noqa: E402
from tgi_trio.shard.torch_backend.attention.paged import split_kv  # noqa: E402
from tgi_trio.shard.torch_backend.states import delta_rule  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402

# A choice for each KV head, of 3 blocks of 4 tokens; one for all, of as many whole blocks, beside
# states of linear attention and of n-grams.
BY_HEAD, POOLED = "minimax_m3_vl_text", "qwen4_exp_text"
SIZES: dict[str, dict[str, Any]] = {
    BY_HEAD: {
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    POOLED: {
        "indexer_budget": 12,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "indexed_attention"],
        "ple_layer_ids": [1],
    },
}
BUDGET = 12  # tokens of a step with prompts
SMALL_STEPS = replace(REQUEST, max_prefill_tokens=BUDGET)
# Contexts below what is chosen, around it and far beyond.
TEXTS = [[3 + (31 * i + 7 * j) % 500 for j in range(n)] for i, n in enumerate((27, 2, 14, 10))]
GREEDY: list[dict[str, Any]] = [{}] * len(TEXTS)


@pytest.fixture(autouse=True)
def small_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_kv, "_PROGRAMS", 4)  # an interpreter has but one
    monkeypatch.setattr(delta_rule, "_CHUNK", 4)


@pytest.fixture(params=[BY_HEAD, POOLED])
def folder(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(request.param, **SIZES[request.param])  # transformers makes it on a CPU


@pytest.mark.sampled(2)  # of the other, two ranks' steps are in the suite
def test_steps_are_one_launch_with_prompts_or_without(folder: Path) -> None:
    expected = drive(start(folder, "cpu"), TEXTS, GREEDY, 6, budget=BUDGET)
    with StandInDevice() as device:
        runner = start(folder, "cuda:0", (1, 4), request=SMALL_STEPS)
        ours = drive(runner, TEXTS, GREEDY, 6, device=device, budget=BUDGET)
    agree(ours, expected)
    assert len(ours.prefills) > 3 and len(ours.decodes) > 3
    for counts in (*ours.prefills, *ours.decodes):
        assert counts.replays == 1 and not counts.launches, counts


@pytest.mark.sampled(2)
def test_steps_that_are_launched_say_the_same(folder: Path) -> None:
    """Those with short contexts launch nothing that chooses."""
    expected = drive(start(folder, "cpu"), TEXTS, GREEDY, 3, budget=BUDGET)
    with StandInDevice() as device:
        runner = start(folder, "cuda:0", request=SMALL_STEPS)
        ours = drive(runner, TEXTS, GREEDY, 3, device=device, budget=BUDGET)
        short = drive(runner, [[5, 6, 7]], [{}], 3, device=device, late=0)
    agree(ours, expected)
    chosen = [counts.launches["select_best"] for counts in (*ours.decodes, *ours.prefills)]
    assert max(chosen) == 1  # in the one layer that chooses
    assert not any(counts.launches["select_best"] for counts in (*short.decodes, *short.prefills))


@pytest.mark.sampled(2)
def test_drafts_choose_for_themselves(folder: Path) -> None:
    """Each the blocks before it, through states one after another, and wrong ones are undone."""
    expected = drive(start(folder, "cpu"), TEXTS[:3], GREEDY[:3], 8)
    with StandInDevice() as device:
        runner = start(folder, "cuda:0", (4, 12), speculate=2)
        drafter = Foretelling(expected.tokens)
        ours = drive(runner, TEXTS[:3], GREEDY[:3], 8, device=device, drafter=drafter)
    agree(ours, expected)
    assert ours.drafts > 5 and ours.steps < expected.steps
    assert all(counts.replays == 1 for counts in ours.decodes)


@pytest.mark.sampled(2, first=1)
def test_a_preempted_sequence_goes_on_where_it_was(folder: Path) -> None:
    """Its blocks' keys are made anew, in other places."""
    new, length = 8, len(TEXTS[0])
    expected = drive(start(folder, "cpu"), TEXTS[:2], GREEDY[:2], new).tokens

    def prompt(sequence: int, ids: list[int], left: int, length: int) -> PrefillRow:
        first, slots = 1 + 4 * sequence, (1 + 2 * sequence, 2 + 2 * sequence)
        states = StateGrant(slots) if POOLED in folder.name else None
        blocks = range(first, first + 4)
        return row(sequence, ids, left, blocks=blocks, prompt_length=length, states=states)

    with device_shard(folder, (1, 2)) as (router, shard):
        router.prefill(prompt(0, TEXTS[0], new, length))
        router.prefill(prompt(1, TEXTS[1], new, len(TEXTS[1])))
        router.until(lambda _: len(router.tokens(0)) >= 3)
        router.acknowledged(router.filter(0))
        said = router.tokens(0)
        router.prefill(prompt(5, [*TEXTS[0], *said], new - len(said), length))
        router.finished(1, 5)
        assert [said + router.tokens(5), router.tokens(1)] == expected
        assert len(said) < new and not router.faults and not shard.device.counts.waits
    assert shard.error is None


@pytest.mark.sampled(2, first=1)
def test_keys_of_eight_bits_are_chosen_from(folder: Path) -> None:
    codes = "fp8_e4m3fn"
    expected = drive(start(folder, "cpu", kv_cache_dtype=codes), TEXTS, GREEDY, 3)
    with StandInDevice() as device:
        runner = start(folder, "cuda:0", (4,), kv_cache_dtype=codes)
        ours = drive(runner, TEXTS, GREEDY, 3, device=device)
    agree(ours, expected)
    assert all(counts.replays == 1 for counts in ours.decodes)


def test_rows_may_have_adapters(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Whose projections, those of the index among them, are one linear."""
    folder = checkpoint(BY_HEAD, **SIZES[BY_HEAD])
    adapter = write_adapter(folder, tmp_path / "adapter", target_modules=["q_proj", "k_proj"])
    served: dict[str, Any] = {"max_lora_rank": 4, "max_loaded_adapters": 1}
    asked = [{"adapter": number} for number in (1, 0, 1, 0)]
    cpu = start(folder, "cpu", **served)
    install(cpu, 1, adapter)
    expected = drive(cpu, TEXTS, asked, 3)
    with StandInDevice() as device:
        runner = start(folder, "cuda:0", (4,), **served)
        install(runner, 1, adapter)
        ours = drive(runner, TEXTS, asked, 3, device=device)
    agree(ours, expected)
    assert all(counts.replays == 1 for counts in ours.decodes)
    assert expected.tokens != drive(start(folder, "cpu"), TEXTS, GREEDY, 3).tokens


@pytest.fixture
def two_places(folder: Path) -> Iterator[StandInDevice]:
    with StandInDevice() as device:
        yield device


@pytest.mark.sampled(2, first=1)
def test_two_ranks_choose_alike(folder: Path, two_places: StandInDevice) -> None:
    expected = drive(start(folder, "cpu"), TEXTS, GREEDY, 4, budget=BUDGET)
    with two_ranks(folder, two_places, (4,), request=SMALL_STEPS) as (runner, steps):
        ours = drive(runner, TEXTS, GREEDY, 4, device=two_places, budget=BUDGET)
    agree(ours, expected)
    assert all(counts.replays == 1 for counts in (*ours.decodes, *ours.prefills))
    assert not any(counts.waits for counts in steps), steps
