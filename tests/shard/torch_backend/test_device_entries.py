"""DeepSeek V4 over the stand-in device says what it says on the CPU, recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest

from tests.shard.torch_backend.interpreter import need_triton
from tests.shard.torch_backend.models_support import plan, prompts, sequences

need_triton()

from tests.shard.torch_backend.stand_in_ranks import two_ranks  # noqa: E402  (it imports Triton)
from tests.shard.torch_backend.stand_in_support import (  # noqa: E402
    REQUEST,
    FallingTimes,
    Foretelling,
    agree,
    drive,
    start,
)
from tgi_trio.shard.torch_backend import device_parts  # noqa: E402
from tgi_trio.shard.torch_backend.attention.paged import split_kv  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402
from tgi_trio.testing.stand_in_driver import Counts  # noqa: E402

# Of 44 and 22 tokens: 11 entries and 5 where five are chosen. New ones end runs of either kind.
TEXTS = prompts(8)[6:]
ASKED: list[dict[str, Any]] = [{}, {}]
NEW: Final = 6
CHUNKS: Final = 20  # tokens of a step, fewer than a prompt has
Checkpoint = Callable[..., Path]
WINDOW, SPARSE, HEAVY = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)


@pytest.fixture
def folder(checkpoint: Checkpoint) -> Path:
    """A model of one layer of each kind."""
    kinds = [WINDOW, SPARSE, HEAVY]
    experts = ["hash_moe", "moe", "moe"]
    return checkpoint(
        "deepseek_v4", num_hidden_layers=3, layer_types=kinds, mlp_layer_types=experts
    )


@pytest.fixture
def device(
    folder: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StandInDevice]:
    """`folder` and all others are made before: transformers makes them without a device."""
    for kind in (WINDOW, SPARSE, HEAVY):
        for more in (1, 2):
            checkpoint("deepseek_v4", **layers_of(kind, more))
    monkeypatch.setattr(split_kv, "_PROGRAMS", 4)  # an interpreter has but one
    monkeypatch.setattr(device_parts, "RecordedTime", FallingTimes)
    with StandInDevice() as stand_in:
        yield stand_in


def layers_of(kind: str, count: int) -> dict[str, Any]:
    """Return fields of a model of one layer in windows, and `count` of a kind behind it."""
    every = [WINDOW, *[kind] * count]
    return {
        "num_hidden_layers": len(every),
        "layer_types": every,
        "mlp_layer_types": ["hash_moe", *["moe"] * count],
    }


@pytest.fixture
def expected(folder: Path) -> Any:
    return drive(start(folder, "cpu"), TEXTS, ASKED, NEW, budget=CHUNKS)


def test_decodes_and_chunks_of_prompts_are_recorded(
    folder: Path, expected: Any, device: StandInDevice
) -> None:
    """Experts are the kernels', whatever chooses them."""
    runner: Any = start(folder, "cuda:0", (1, 2))
    ours = drive(runner, TEXTS, ASKED, NEW, device=device, budget=CHUNKS)
    agree(ours, expected)
    for counts in (*ours.decodes, *ours.prefills):
        assert counts.replays == 1 and not counts.launches, counts
    assert len(ours.decodes) > 2 and len(ours.prefills) > 3
    assert all(layer.mlp.grouped for layer in runner.model.layers)


@pytest.mark.thorough
def test_launched_steps_wait_for_nothing(
    folder: Path, expected: Any, device: StandInDevice
) -> None:
    ours = drive(start(folder, "cuda:0"), TEXTS, ASKED, NEW, device=device, budget=CHUNKS)
    agree(ours, expected)
    assert all(counts.launches["attend_entries"] for counts in (*ours.decodes, *ours.prefills))


def test_drafts_end_runs_that_others_end_again(
    folder: Path, expected: Any, device: StandInDevice
) -> None:
    """Every third one is wrong; each is a decode of its own in a recording."""
    runner = start(folder, "cuda:0", (2, 6), speculate=2)
    drafter = Foretelling(expected.tokens)
    ours = drive(runner, TEXTS, ASKED, NEW, device=device, drafter=drafter, budget=CHUNKS)
    agree(ours, expected)
    assert ours.drafts > 3 and ours.steps < expected.steps
    assert all(counts.replays == 1 for counts in ours.decodes)


@pytest.mark.thorough
def test_two_ranks_have_the_same_entries(
    folder: Path, expected: Any, device: StandInDevice
) -> None:
    small = replace(REQUEST, max_prefill_tokens=CHUNKS)
    with two_ranks(folder, device, (2,), request=small) as (runner, steps):
        ours = drive(runner, TEXTS, ASKED, NEW, device=device, budget=CHUNKS)
    agree(ours, expected)
    for counts in (*ours.decodes, *ours.prefills):
        assert counts.replays == 1 and not counts.launches, counts
    assert steps and not any(counts.waits for counts in steps)


@pytest.mark.parametrize(("kind", "most"), [(WINDOW, 13), (HEAVY, 13), (SPARSE, 15)])
def test_launches_of_a_layer_are_few(
    checkpoint: Checkpoint,
    device: StandInDevice,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    most: int,
) -> None:
    """Of a prefill too long to be divided: what one layer more takes."""
    monkeypatch.setattr(split_kv, "_PROGRAMS", 1)
    launched = []
    for more in (1, 2):
        runner = start(checkpoint("deepseek_v4", **layers_of(kind, more)), "cuda:0")
        (row, *_) = sequences(TEXTS, new=NEW)
        device.counts = Counts()
        with device.idle():
            runner.launch(plan([row], [row.length])).result()
        launched.append(Counter(device.counts.launches))
    assert (launched[1] - launched[0]).total() == most, launched[1] - launched[0]
