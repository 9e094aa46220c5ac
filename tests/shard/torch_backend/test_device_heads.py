"""Trained heads draft on the device, in the recording of the step whose choices they follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.shard.speculation.heads_support import HEADS, Watched, medusa, mlp_speculator
from tests.shard.torch_backend.device_kinds import KINDS, REPLAYS, SMALL
from tests.shard.torch_backend.interpreter import need_triton
from tests.shard.torch_backend.models_support import prompts
from tgi_trio.shard.contract import StepPlan, StepResult
from tgi_trio.shard.runner import Pending, Runner
from tgi_trio.shard.speculation.draft_model import ModelDrafter
from tgi_trio.shard.speculation.payoff import Payoff
from tgi_trio.shard.torch_backend.drafting.device_drafting import DeviceDrafting

need_triton()

from tests.shard.torch_backend.stand_in_support import (  # noqa: E402  (it imports Triton)
    TakingTurns,
    agree,
    drive,
    small_device,
    start,
)
from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402
from tgi_trio.testing.stand_in_driver import Counts  # noqa: E402

TEXTS = prompts(3, longest=20)
HIDDEN, VOCAB, NEW = 64, 512, 12
WRITERS: dict[str, Callable[..., Path]] = {
    "medusa": partial(medusa, layers=1, own=True),
    "medusa with the model's head": partial(medusa, layers=2, own=False),
    "mlp": partial(mlp_speculator, tied=False),
}


@pytest.fixture
def device(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[StandInDevice]:
    # Whether drafting pays is a matter of time; what drafts are is not.
    monkeypatch.setattr(Payoff, "allows", lambda self, rows: True)
    monkeypatch.setattr(Payoff, "is_resting", lambda self, rows: False)
    with small_device(checkpoint) as stand_in:
        yield stand_in


def watched(runner: Runner) -> Watched:
    drafter = runner.drafter(HEADS)
    assert drafter is not None
    return Watched(drafter)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("writer", "kind", "graphs"),
    [
        ("medusa", "plain", (4, 12)),
        ("medusa with the model's head", "grammar", (12,)),
        ("mlp", "penalties", (12,)),
        ("mlp", "top tokens", ()),
    ],
)
def test_drafts_are_the_cpu_s_and_nothing_waits_for_them(
    checkpoint: Callable[..., Path],
    device: StandInDevice,
    tmp_path: Path,
    writer: str,
    kind: str,
    graphs: tuple[int, ...],
) -> None:
    """The same tokens have the same drafts."""
    folder, asked = checkpoint("llama", **SMALL), KINDS[kind]
    heads = WRITERS[writer](tmp_path / "heads", folder, HIDDEN, VOCAB)
    settings: dict[str, Any] = {"grammars": TakingTurns(), "draft_model": heads, "speculate": HEADS}
    host = start(folder, "cpu", **settings)
    theirs = watched(host)
    expected = drive(host, TEXTS, asked, 5, drafter=theirs)
    settings["grammars"] = TakingTurns()
    runner = start(folder, "cuda:0", graphs, **settings)
    mine = watched(runner)
    ours = drive(runner, TEXTS, asked, 5, device=device, drafter=mine)
    agree(ours, expected)
    assert ours.drafts > 5
    by_text = {tuple(known): own for known, own in theirs.drafted}
    both = [(own, by_text[tuple(known)]) for known, own in mine.drafted if tuple(known) in by_text]
    assert sum(bool(own) for own, _ in both) > 3
    for own, other in both:
        count = min(len(own), len(other))
        assert own[:count] == other[:count]
    for counts in ours.decodes if graphs else ():
        assert counts.replays == REPLAYS[kind] and not counts.launches, counts


class Noting:
    """A runner that notes when it is asked to launch, and when for what it found."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.host_inputs: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def launch(self, plan: StepPlan) -> Pending:
        self.host_inputs.append("launch")
        pending = self.runner.launch(plan)

        def result() -> StepResult:
            self.host_inputs.append("result")
            return pending.result()

        return cast("Pending", SimpleNamespace(result=result))


def test_a_smaller_model_goes_on_from_drafts_that_nobody_has_read(
    checkpoint: Callable[..., Path], device: StandInDevice
) -> None:
    folder, asked = checkpoint("llama", **SMALL), KINDS["penalties"]
    host = start(folder, "cpu")
    theirs = Watched(ModelDrafter(start(folder, "cpu"), 3, (), VOCAB))
    expected = drive(host, TEXTS, asked, 8, drafter=theirs)
    runner = start(folder, "cuda:0", (12,))
    small = Noting(start(folder, "cuda:0", (4,)))
    mine = Watched(ModelDrafter(cast("Runner", small), 3, (), VOCAB))
    device.counts = Counts()
    ours = drive(runner, TEXTS, asked, 8, drafter=mine)
    agree(ours, expected)
    assert not device.counts.waits and ours.drafts > 5
    told = " ".join(small.host_inputs)
    assert "launch launch launch result result result" in told and "result launch" in told
    by_text = {tuple(known): own for known, own in theirs.drafted}
    both = [(own, by_text[tuple(known)]) for known, own in mine.drafted if tuple(known) in by_text]
    for own, other in both:
        count = min(len(own), len(other))
        assert own[:count] == other[:count]
    assert sum(bool(own) for own, _ in both) > 3


def test_steps_follow_drafts_that_nobody_has_read(
    checkpoint: Callable[..., Path],
    device: StandInDevice,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device judges them, moves rows by what was right, and goes on from what it drafted."""
    folder, asked = checkpoint("llama", **SMALL), KINDS["plain"]
    expected = drive(start(folder, "cpu"), TEXTS, asked, NEW)
    heads = WRITERS["medusa"](tmp_path / "heads", folder, HIDDEN, VOCAB)
    told = torch.arange(VOCAB)  # what is said behind each token, but for every fourth
    behind = [pair for said in expected.tokens for pair in pairwise(said)]
    for i, (token, after) in enumerate(behind):
        told[token] = after if i % 4 else (after + 1) % VOCAB
    table = told.to("cuda:0")

    def draft(self: DeviceDrafting, hidden: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
        columns = [found[:, 0].nan_to_num().clamp(0, VOCAB - 1).long()]  # padding is arbitrary
        for _ in range(self.most):
            columns.append(table.index_select(0, columns[-1]))
        return torch.stack(columns[1:], dim=1)

    monkeypatch.setattr(DeviceDrafting, "draft", draft)
    runner = start(folder, "cuda:0", (4, 12), draft_model=heads, speculate=HEADS)
    ours = drive(runner, TEXTS, asked, NEW, device=device, drafter=runner.drafter(HEADS))
    assert ours.tokens == expected.tokens
    assert ours.moved >= 3 and ours.steps < expected.steps - 3
    for counts in ours.decodes:
        assert counts.replays == 1 and not counts.launches, counts
