"""Rows that fill gaps, over a stand-in device: they say what they say on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.shard.torch_backend.device_kinds import KINDS, SMALL
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
from tgi_trio.shard.runner import Runner  # noqa: E402
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402

TEXTS: Final = prompts(4, longest=20)
END: Final = 3
SHARP: Final[dict[str, Any]] = {"sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.99}
FILLS: Final[dict[str, Any]] = {**SHARP, "gap_ends": (END,)}
# A row that fills none is in the same step, and one that has a grammar as well.
ASKED: Final = [FILLS, SHARP, {**FILLS, "repetition_penalty": 1.3}, KINDS["grammar"][0]]


@pytest.fixture(scope="module")
def device(checkpoint: Callable[..., Path]) -> Iterator[StandInDevice]:
    with small_device(checkpoint) as stand_in:
        yield stand_in


@pytest.fixture(scope="module")
def host(checkpoint: Callable[..., Path], device: StandInDevice) -> Runner:
    return start(checkpoint("llama", **SMALL), "cpu", grammars=TakingTurns())


@pytest.mark.parametrize("graphs", [(), (4, 12)])
def test_tokens_are_the_cpu_s(
    checkpoint: Callable[..., Path], host: Runner, device: StandInDevice, graphs: tuple[int, ...]
) -> None:
    expected = drive(host, TEXTS, ASKED, 6)
    plain = drive(host, TEXTS, [{**each, "gap_ends": ()} for each in ASKED], 6)
    first, other, third, _ = expected.tokens
    assert END in first + third and {*first, *third} - {END}  # some are doubtful, some are not
    assert plain.tokens[0] != first and plain.tokens[1] == other
    folder = checkpoint("llama", **SMALL)
    runner = start(folder, "cuda:0", graphs, grammars=TakingTurns())
    agree(drive(runner, TEXTS, ASKED, 6), expected)


def test_drafts_are_judged_by_the_same_tokens(
    checkpoint: Callable[..., Path], host: Runner, device: StandInDevice
) -> None:
    expected = drive(host, TEXTS, ASKED, 6)
    folder = checkpoint("llama", **SMALL)
    runner = start(folder, "cuda:0", (4, 12), grammars=TakingTurns(), speculate=2)
    ours = drive(runner, TEXTS, ASKED, 6, drafter=Foretelling(expected.tokens))
    agree(ours, expected)
    assert ours.drafts > 5 and ours.steps < expected.steps
