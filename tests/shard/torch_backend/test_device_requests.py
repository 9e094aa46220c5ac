"""Every kind of request over a stand-in device: tokens of the CPU, nothing that the host waits for,
and one launch for a step of decodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.shard.torch_backend.device_kinds import KINDS, REPLAYS, SMALL
from tests.shard.torch_backend.interpreter import need_triton
from tests.shard.torch_backend.models_support import prompts

need_triton()

from tests.shard.torch_backend.stand_in_support import (  # noqa: E402  (it imports Triton)
    Foretelling,
    TakingTurns,
    agree,
    drive,
    small_device,
    start,
)
from tgi_trio.shard.contract import ShardSequence  # noqa: E402
from tgi_trio.shard.runner import Runner  # noqa: E402
from tgi_trio.shard.torch_backend.sampling.resident_counts import ResidentCounts  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402

TEXTS = prompts(3, longest=20)


def test_a_device_without_our_kernels_says_the_same(checkpoint: Callable[..., Path]) -> None:
    """Intel's, through torch's own operations and the host's sampler."""
    folder, asked = checkpoint("llama", **SMALL), KINDS["penalties"]
    expected = drive(start(folder, "cpu"), TEXTS, asked)
    with StandInDevice("xpu:0") as device:
        runner = start(folder, "xpu:0")
        assert runner.info.device == "xpu:0" and runner.info.device_name
        agree(drive(runner, TEXTS, asked), expected)
        assert not device.counts.replays and not device.counts.launches["attend_tile"]


@pytest.fixture(scope="module")
def device(checkpoint: Callable[..., Path]) -> Iterator[StandInDevice]:
    with small_device(checkpoint) as stand_in:
        yield stand_in


@pytest.fixture(scope="module")
def host(checkpoint: Callable[..., Path], device: StandInDevice) -> Runner:
    return start(checkpoint("llama", **SMALL), "cpu", grammars=TakingTurns())


@pytest.fixture(scope="module")
def recorded(checkpoint: Callable[..., Path], device: StandInDevice) -> Runner:
    """A runner for all tests: kinds of requests follow one another on it, as on a server."""
    folder = checkpoint("llama", **SMALL)
    return start(folder, "cuda:0", (4, 12), grammars=TakingTurns(), speculate=2)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_waits_and_the_tokens_are_the_cpu_s(
    host: Runner, recorded: Runner, device: StandInDevice, kind: str
) -> None:
    asked = KINDS[kind]
    expected = drive(host, TEXTS, asked)
    ours = drive(recorded, TEXTS, asked, device=device)
    agree(ours, expected)
    assert ours.decodes and bool(ours.prompts) == (kind == "prompt logprobs")
    for counts in ours.decodes:
        assert counts.replays == REPLAYS[kind] and not counts.launches, counts


def test_a_prompt_of_one_token_that_joins_decodes_has_its_value(
    host: Runner, recorded: Runner, device: StandInDevice
) -> None:
    """Its step is a recording of decodes. Nothing predicts the token, which is said."""
    texts, asked = [[7, 8, 9], [5]], [{}, {"prompt_logprobs": True}]
    ours = drive(recorded, texts, asked, device=device)
    agree(ours, drive(host, texts, asked))
    assert ours.unpredicted == 1 and not ours.prompts


@pytest.mark.parametrize("kind", ["penalties", "grammar", "watermark"])
def test_drafts_are_decodes_of_a_recording(
    host: Runner, recorded: Runner, device: StandInDevice, kind: str
) -> None:
    asked = KINDS[kind]
    expected = drive(host, TEXTS, asked, 6)
    drafter = Foretelling(expected.tokens)
    ours = drive(recorded, TEXTS, asked, 6, device=device, drafter=drafter)
    agree(ours, expected)
    assert ours.drafts > 5 and ours.steps < expected.steps
    for counts in ours.decodes:
        assert counts.replays == REPLAYS[kind] and not counts.launches, counts


@pytest.mark.parametrize("graphs", [(), (4, 12)])
@pytest.mark.parametrize("beside", ["grammar", "watermark"])
def test_a_row_that_leaves_while_its_token_waits_for_a_mask_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
    checkpoint: Callable[..., Path],
    host: Runner,
    device: StandInDevice,
    beside: str,
    graphs: tuple[int, ...],
) -> None:
    """Its last token was never written: as an address it lay beyond the table of counts."""
    asked = [KINDS["penalties"][0], KINDS[beside][0], KINDS["penalties"][1]]
    expected = drive(host, TEXTS, asked, 6, late=0)
    runner = start(checkpoint("llama", **SMALL), "cuda:0", graphs, grammars=TakingTurns())
    counted, advance = list[tuple[int, int]](), ResidentCounts.advance

    def spy(own: ResidentCounts, row: ShardSequence, length: int, unknown: bool, *rest: Any) -> Any:
        assert length - unknown <= row.length, "it counts a token that is not there"
        counted.append((row.id, length))
        return advance(own, row, length, unknown, *rest)

    monkeypatch.setattr(ResidentCounts, "advance", spy)
    ours = drive(runner, TEXTS, asked, 6, device=device, late=0, leaving=0)
    assert ours.tokens[0] == expected.tokens[0][: len(ours.tokens[0])]
    assert ours.tokens[1:] == expected.tokens[1:]
    first, third = (max(length for row, length in counted if row == own) for own in (0, 2))
    assert len(ours.tokens[0]) < 6 and first < third


@pytest.mark.parametrize("graphs", [(), (8,)])
def test_rows_that_share_a_step_may_ask_for_anything(
    checkpoint: Callable[..., Path], host: Runner, device: StandInDevice, graphs: tuple[int, ...]
) -> None:
    """Without recordings, too, and prefilled in chunks."""
    asked = [kind[i % 3] for i, kind in enumerate(KINDS.values())]
    texts = prompts(len(asked), longest=20)
    expected = drive(host, texts, asked, budget=11)
    folder = checkpoint("llama", **SMALL)
    runner = start(folder, "cuda:0", graphs, grammars=TakingTurns())
    agree(drive(runner, texts, asked, device=device, budget=11), expected)
