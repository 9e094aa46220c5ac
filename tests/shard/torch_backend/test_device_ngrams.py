"""N-grams are looked up on the device, in the recording of the step whose choices they follow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.shard.torch_backend.interpreter import need_triton
from tgi_trio.shard.runner import Runner
from tgi_trio.shard.speculation.payoff import Payoff

need_triton()

from tests.shard.torch_backend.stand_in_support import (  # noqa: E402  (it imports Triton)
    LayerOutput,
    blinded,
    drive,
    start,
)
from tgi_trio.shard.torch_backend.drafting import device_texts  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402

MOST, NEW = 3, 12
# What is sampled so coldly is mostly the best token, so it is said again as well.
PLAIN: list[dict[str, Any]] = [{}, {"sample": True, "temperature": 0.01}]


@pytest.fixture
def made(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], Path]:
    """Return checkpoints whose tokens follow from the ones before alone: what is said is known."""

    def make(family: str) -> Path:
        return blinded(checkpoint(family, num_hidden_layers=1), tmp_path / family)

    from tgi_trio.shard.torch_backend.attention.paged import split_kv

    monkeypatch.setattr(split_kv, "_PROGRAMS", 4)  # an interpreter has but one
    # Whether drafting pays is a matter of time; what is drafted is not.
    monkeypatch.setattr(Payoff, "allows", lambda self, rows: True)
    monkeypatch.setattr(Payoff, "is_resting", lambda self, rows: False)
    return make


def repeating(host: Runner) -> list[list[int]]:
    """Return texts that hold most of what comes behind them."""
    begins = [[7], [50]]
    walks = drive(host, begins, [{}] * 2, 20, late=0).tokens
    texts = []
    for begin, walk in zip(begins, walks, strict=True):
        said = [token if i % 7 else (token + 1) % 512 for i, token in enumerate(walk, start=1)]
        texts.append([*begin, *said, *begin, *walk[:2]])
    return texts


def chained(said: LayerOutput) -> list[Any]:
    """Return the counts of steps of decodes to which no text had to be sent."""
    return [counts for counts in said.decodes if not counts.launches["write_texts"]]


@pytest.mark.parametrize(("family", "budget"), [("llama", 13), ("mixtral", 100)])
def test_steps_follow_drafts_of_n_grams_that_nobody_has_read(
    made: Callable[[str], Path], family: str, budget: int
) -> None:
    """Rows come in chunks and leave; the tokens are those of the CPU, with and without drafts."""
    folder = made(family)
    host = start(folder, "cpu")
    texts = repeating(host)
    expected = drive(host, texts, PLAIN, NEW, budget=budget)
    theirs = drive(host, texts, PLAIN, NEW, budget=budget, drafter=host.drafter(MOST))
    with StandInDevice() as device:
        runner = start(folder, "cuda:0", (8,), speculate=MOST)
        drafter = runner.drafter(MOST)
        ours = drive(runner, texts, PLAIN, NEW, budget=budget, device=device, drafter=drafter)
    assert ours.tokens == expected.tokens == theirs.tokens
    assert ours.moved >= 5 and ours.steps < expected.steps - 3
    assert ours.steps <= theirs.steps + 3
    quiet = chained(ours)
    assert len(quiet) >= ours.moved
    for counts in quiet:
        assert counts.replays == 1 and not counts.launches, counts


def test_texts_that_grow_out_of_their_room_are_read_first(
    made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their drafts are the host's from there on."""
    folder = made("llama")
    host = start(folder, "cpu")
    texts, asked = [text[6:] for text in repeating(host)], PLAIN
    expected = drive(host, texts, asked, NEW, drafter=host.drafter(MOST), late=0)
    room = len(texts[0]) + 14
    assert room % 16 == 0  # as rooms are
    monkeypatch.setattr(device_texts, "MOST_TOKENS", 4 * room)
    with StandInDevice() as device:
        runner = start(folder, "cuda:0", (8,), speculate=MOST)
        drafter = runner.drafter(MOST)
        ours = drive(runner, texts, asked, NEW, device=device, drafter=drafter, late=0)
    assert ours.tokens == expected.tokens
    assert 0 < ours.moved < ours.steps - 3 and ours.drafts > 3
