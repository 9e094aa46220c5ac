"""Runs a batch over a runner as the worker does, step by step or one step ahead, and counts."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from tests.shard.torch_backend.device_kinds import SMALL
from tests.shard.torch_backend.models_support import BLOCK
from tgi_trio.ipc.messages import PrefillRow, SamplingParameters, StateGrant
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.shard.contract import (
    ShardSequence,
    StepPlan,
    StepResult,
)
from tgi_trio.shard.loop.batch import Batch
from tgi_trio.shard.runner import (
    Drafter,
    DraftRow,
    Pending,
    Runner,
)
from tgi_trio.shard.sampling.logits_processors import GrammarMasks
from tgi_trio.shard.speculation.sharing import share_drafts
from tgi_trio.shard.torch_backend.attention.paged import split_kv
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner
from tgi_trio.testing.stand_in_device import StandInDevice, current_device
from tgi_trio.testing.stand_in_driver import Counts

BLOCKS, SLOTS = 64, 16
REQUEST = WarmupRequest(24, 64, 4, (BLOCKS - 1) * BLOCK)


def start(
    folder: Path,
    where: str,
    graphs: tuple[int, ...] = (),
    grammars: GrammarMasks | None = None,
    request: WarmupRequest = REQUEST,
    **settings: Any,
) -> Runner:
    """Return a runner of a checkpoint, warmed up."""
    told = ShardSettings(model_path=folder, dtype="float32", **settings)
    runner = load_torch_runner(
        told, read_config(told.model_path), device=where, graph_sizes=graphs, grammars=grammars
    )
    real = where == "cpu" or torch.cuda.is_available()
    with contextlib.nullcontext() if real else current_device().idle():
        runner.warm_up(request)
    return runner


@contextlib.contextmanager
def small_device(checkpoint: Callable[..., Path]) -> Iterator[StandInDevice]:
    """Run on a stand-in that has few programs at once, since an interpreter has but one.

    The checkpoint of `SMALL` is made before: transformers makes it without a device.
    """
    checkpoint("llama", **SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split_kv, "_PROGRAMS", 4)
        with StandInDevice() as stand_in:
            yield stand_in


class FallingTimes:
    """What is measured later takes less: few rows are multiplied by our kernels."""

    def __init__(self, *_: object) -> None:
        self._last = 1.0

    def __call__(self, work: Callable[[], object]) -> float:
        work()
        self._last /= 2
        return self._last


def blinded(folder: Path, copy: Path) -> Path:
    """Return a copy of a checkpoint whose tokens follow from the ones before alone.

    What it says it says again, so that n-grams draft right.
    """
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    for name, tensor in tensors.items():
        if "o_proj" in name:
            tensor.zero_()
    save_file(tensors, copy / "new", {"format": "pt"})
    (copy / "new").replace(copy / "model.safetensors")
    return copy


class TakingTurns:
    """Grammars under which odd and even tokens take turns; a matcher is kept, as real ones are."""

    def start(self) -> None: ...

    def prepare(self, sequence: ShardSequence) -> bool:
        return True

    def drop(self, sequence: ShardSequence) -> None:
        sequence.state.pop("turns", None)

    def allowed(self, sequences: list[ShardSequence]) -> tuple[NDArray[np.uint8], dict[int, str]]:
        table = np.zeros((len(sequences), 512), np.bool_)
        for place, one in enumerate(sequences):
            said = one.token_ids[one.prompt_length : one.length].tolist()
            seen = one.state.setdefault("turns", [])
            assert isinstance(seen, list) and said[: len(seen)] == seen, "it saw other tokens"
            assert all(token % 2 == i % 2 for i, token in enumerate(said)), "it was not asked"
            seen[:] = said
            table[place, len(said) % 2 :: 2] = True
        return np.packbits(table, axis=1, bitorder="little"), {}

    def rewind(self, sequence: ShardSequence) -> None:
        seen = sequence.state["turns"]
        assert isinstance(seen, list)
        del seen[sequence.length - sequence.prompt_length :]

    def pieces(self, ids: NDArray[np.int64]) -> list[bytes]:
        return [str(each).encode() for each in ids.tolist()]


@dataclass
class Foretelling:
    """Drafts what will be said, but for every third draft, which is another token."""

    answers: list[list[int]]  # by sequence
    most: int = 2
    made: int = 0

    def draft_rows(self, rows: Sequence[DraftRow], spare: int) -> dict[int, int]:
        return share_drafts(rows, spare, trust=lambda _: 1, draft=self.draft)

    def draft(self, sequence: ShardSequence, room: int) -> int:
        said = sequence.length - sequence.prompt_length
        coming = self.answers[sequence.id][said : said + min(room, self.most)]
        for i, token in enumerate(coming):
            self.made += 1
            wrong = self.made % 3 == 0
            sequence.token_ids[sequence.length + i] = (token + 2) % 512 if wrong else token
        return len(coming)


@dataclass
class LayerOutput:
    """What the rows of a run got."""

    tokens: list[list[int]] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[tuple[int, float]] = field(default_factory=list)  # alternatives
    prompts: list[float] = field(default_factory=list)
    unpredicted: int = 0  # tokens of prompts that nothing predicts
    decodes: list[Counts] = field(default_factory=list)  # of steps without a prefill
    prefills: list[Counts] = field(default_factory=list)  # of the others
    steps: int = 0
    drafts: int = 0  # drafts that were computed
    moved: int = 0  # steps that followed drafts which nobody had read

    def note_step(self, plan: StepPlan, counts: Counts) -> None:
        """Take in a step that has been launched; its counts may go on."""
        self.steps += 1
        self.drafts += plan.counts.draft_tokens
        self.moved += bool(plan.moves)
        (self.prefills if plan.counts.prefill_tokens else self.decodes).append(counts)


def drive(
    runner: Runner,
    texts: list[list[int]],
    asked: list[dict[str, Any]],
    new: int = 4,
    *,
    device: StandInDevice | None = None,
    drafter: Drafter | None = None,
    late: int = 1,
    budget: int = 100,
    leaving: int | None = None,
) -> LayerOutput:
    """Run a row per text to its end; the last `late` join when the others decode.

    The row `leaving`, if any, is taken out when two steps with it have been launched, both unread.
    On `device` no step may make the host wait, but for its event.
    """
    batch = _make_batch(runner, drafter)
    said, rows = LayerOutput(), list[ShardSequence]()
    flying: list[tuple[StepPlan, Pending]] = []  # the step ahead, if there is one

    def add(i: int) -> None:
        rows.append(batch.add(_make_row(runner, i, texts[i], asked[i], new)))

    joining = list(range(len(texts)))
    while len(joining) > late:
        add(joining.pop(0))
    while True:
        if said.steps >= 2 and joining:
            add(joining.pop(0))
        counts = _count_anew(device)
        plan = batch.plan(budget)
        # Without a plan rows may be at the end of their blocks.
        if flying and (batch.rows if plan is None else not runner.runs_ahead(plan)):
            _settle(said, runner, batch, *flying.pop())
            continue
        read = len(flying)
        pending = None if plan is None else runner.launch(plan)
        if flying and leaving is not None and leaving in batch and said.steps >= 2:
            _drop(runner, batch.remove([leaving]))
        if flying:
            _settle(said, runner, batch, *flying.pop())
        if plan is None or pending is None:
            break
        said.note_step(plan, counts)
        if plan.moves:
            batch.settle_positions(plan)
        pending.proceed()
        if (drafter is None or batch.is_followed(plan)) and runner.runs_ahead(plan):
            batch.expect(plan)
            flying.append((plan, pending))
        else:
            _settle(said, runner, batch, plan, pending)
            read += 1
        if device is not None:
            assert not counts.waits and counts.event_waits <= max(1, read), counts
    said.tokens = [row.token_ids[row.prompt_length : row.length].tolist() for row in rows]
    return said


def _settle(
    said: LayerOutput, runner: Runner, batch: Batch, plan: StepPlan, pending: Pending
) -> None:
    result = pending.result()
    _note(said, result)
    _drop(runner, batch.settle(plan, result).dropped)


def _drop(runner: Runner, rows: Sequence[ShardSequence]) -> None:
    for row in rows:
        runner.drop(row)


def _count_anew(device: StandInDevice | None) -> Counts:
    """Return what counts the next step, on the device if there is one."""
    counts = Counts()
    if device is not None:
        device.counts = counts
    return counts


def _make_batch(runner: Runner, drafter: Drafter | None) -> Batch:
    return Batch(
        vocab_size=512,
        block_size=BLOCK,
        blocks=BLOCKS,
        eos_ids=(),
        state_slots=SLOTS if runner.info.state_bytes else 0,
        drafter=drafter,
        draft_budget=runner.info.draft_budget,
    )


def _make_row(
    runner: Runner, place: int, text: list[int], asked: dict[str, Any], new: int
) -> PrefillRow:
    """Return a row with blocks and slots of its own, by its place among all."""
    ids, settings = np.array(text, np.int32), SamplingParameters(seed=place, **asked)
    first = 1 + 4 * place
    blocks = range(first, first - (-(len(text) + new) // BLOCK))
    states = StateGrant((1 + 2 * place, 2 + 2 * place)) if runner.info.state_bytes else None
    return PrefillRow(place, ids, len(ids), 0, blocks, new, sampling=settings, states=states)


def _note(said: LayerOutput, result: StepResult) -> None:
    for row in result.rows:
        assert row.fault is None, row.fault
        said.logprobs += row.logprobs
        said.tops += [one for top in row.tops for one in top]
        predicted = [value for value in row.prompt_logprobs if value == value]
        said.prompts += predicted
        said.unpredicted += len(row.prompt_logprobs) - len(predicted)


def agree(ours: LayerOutput, theirs: LayerOutput) -> None:
    """Raise AssertionError unless two runs said the same."""
    assert ours.tokens == theirs.tokens
    np.testing.assert_allclose(sorted(ours.logprobs), sorted(theirs.logprobs), atol=2e-4)
    assert len(ours.tops) == len(theirs.tops)
    for (token, value), (other, wanted) in zip(sorted(ours.tops), sorted(theirs.tops), strict=True):
        assert token == other and abs(value - wanted) < 2e-4
    np.testing.assert_allclose(sorted(ours.prompts), sorted(theirs.prompts), atol=2e-4)
    assert ours.unpredicted == theirs.unpredicted
