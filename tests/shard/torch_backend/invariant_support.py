"""Runs sequences alone and in a crowd, for tests that no bit differs (`Crowd`).

`small_parts` is a fixture for every test of a module that imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.shard.torch_backend.interpreter import sum_in_order
from tests.shard.torch_backend.models_support import (
    GreedyRecorder,
    advance,
    load,
    run,
    sequences,
)
from tests.shard.torch_backend.stand_in_support import (
    Foretelling,
    LayerOutput,
    agree,
    drive,
    start,
)
from tgi_trio.errors import ConfigurationError
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.config import read_config
from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.runner import Runner
from tgi_trio.shard.torch_backend.attention.paged import spans
from tgi_trio.shard.torch_backend.layers.linears import coded_linear, plain_product
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner
from tgi_trio.testing.stand_in_device import StandInDevice


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have contexts and inputs of tests divided, as those of large models are."""
    sum_in_order(monkeypatch)
    monkeypatch.setattr(spans, "SPAN", 32)
    monkeypatch.setattr(plain_product, "_LEAST_PART", 32)
    monkeypatch.setattr(plain_product, "_FEW_ROWS", 4)
    monkeypatch.setattr(coded_linear, "_ROWS_AT_ONCE", 16)


def start_invariant(folder: Path, device: StandInDevice, **options: Any) -> tuple[Any, Any]:
    """Return a runner on the stand-in and its sampler, warmed up."""
    told: dict[str, Any] = {"dtype": "float32", "batch_invariant": True} | options
    with device.idle():
        return load(folder, 64, device="cuda:0", **told)


class NoLibrary(TorchFunctionMode):
    """Raises where torch adds up numbers of tokens, whose order would follow the step's size."""

    sums = frozenset(
        (
            *(
                "linear",
                "matmul",
                "__matmul__",
                "mm",
                "bmm",
                "addmm",
                "baddbmm",
                "einsum",
                "conv1d",
            ),
            *("sum", "mean", "cumsum", "norm", "softmax", "log_softmax", "logsumexp", "rms_norm"),
            *("layer_norm", "group_norm", "scaled_dot_product_attention", "index_add_"),
            *("std", "var"),
        )
    )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.__name__ not in self.sums, f"torch computes {func.__name__}"
        return func(*args, **(kwargs or {}))


def forbid_library(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a runner's model fail where a library computes any sum of its."""

    def watched(compute: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with NoLibrary():
                return compute(*args, **kwargs)

        return call

    for name in ("forward", "logits"):
        monkeypatch.setattr(runner.model, name, watched(getattr(runner.model, name)))


@dataclass(frozen=True)
class Crowd:
    """Texts that a model goes on with, each alone and all together."""

    texts: list[list[int]]
    new: int = 2  # tokens that are said of each
    chunk: int = 5  # tokens of a prompt in a step, at most, where prompts are cut
    joins: int | None = None  # rows that begin at each step of one more run, which cuts none
    prepare: Callable[[list[ShardSequence]], object] | None = None  # called with the rows

    def logits(
        self, runner: Runner, recorder: GreedyRecorder, shuffle: int | None = None, **how: Any
    ) -> list[torch.Tensor]:
        """Return what tokens were chosen from, for each text.

        `shuffle`: of blocks; `how`: see `run`, each alone without.
        """
        rows = sequences(self.texts, shuffle, new=self.new)
        if self.prepare is not None:
            self.prepare(rows)
        recorder.by_place.clear()
        for together in [rows] if how else [[row] for row in rows]:
            run(runner, together, **how)
        return [recorder.logits(row.id) for row in rows]

    def differing(self, runner: Runner, recorder: GreedyRecorder) -> list[dict[str, Any]]:
        """Return the ways to run all texts together in which a bit differs from each text alone.

        Prompts are cut, and have decodes beside them.
        """
        ways = [{"joins": 2, "chunk": self.chunk}]
        if self.joins is not None:
            ways.append({"joins": self.joins})
        alone = self.logits(runner, recorder)
        found = [(how, self.logits(runner, recorder, 5, **how)) for how in ways]
        return [how for how, among in found if not all(map(torch.equal, among, alone))]

    def check_alone(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        dtype: str = "float32",
        near: float | None = None,
    ) -> None:
        """Compare a model's sequences alone and together, without sums of a library's.

        `near`: how far the CPU's logits may be; None: they are not compared.
        """
        host = None if near is None else self.logits(*load(folder, 64, dtype="float32"))
        with StandInDevice() as device:
            runner, recorder = start_invariant(folder, device, dtype=dtype)
            forbid_library(runner, monkeypatch)
            assert not self.differing(runner, recorder)
        if host is not None and near is not None:
            found = [recorder.logits(i) for i in range(len(self.texts))]
            torch.testing.assert_close(torch.cat(found), torch.cat(host), atol=near, rtol=0)

    def check_anew(self, folder: Path, place: int, new: int = 4) -> None:
        """After a preemption or a crash, what has been said comes back as a part of the prompt.

        `place`: of the text among all; `new`: tokens that are said, about half of them before.
        """
        text = self.texts[place]
        with StandInDevice() as device:
            runner, recorder = start_invariant(folder, device)
            whole, broken, elsewhere = sequences([text] * 3, new=new)
            run(runner, [whole])
            advance(runner, [broken], [broken.length])
            for _ in range(new // 2 - 1):
                advance(runner, [broken], [1])
            broken.computed, broken.states = 0, None
            broken.block_ids = elsewhere.block_ids[::-1]
            run(runner, [broken], chunk=self.chunk)
            assert torch.equal(recorder.logits(broken.id), recorder.logits(whole.id))

    def check_recorded(self, folder: Path, budget: int) -> None:
        """Compare recorded steps with launched ones: drawn tokens and log-probabilities.

        A wrong draft is followed by what was before it. `budget`: of recorded steps, in tokens.
        """
        asked: list[dict[str, Any]] = [{"sample": True}, {"prompt_logprobs": True}, {}]
        host = drive(start(folder, "cpu"), self.texts, asked, 5)
        said: list[LayerOutput] = []
        with StandInDevice() as device:
            for graphs, late, most in (((), 0, 100), ((1, 4), 1, budget)):
                runner = start(folder, "cuda:0", graphs, batch_invariant=True)
                drafter = Foretelling(said[0].tokens) if said else None
                how: dict[str, Any] = {"late": late, "budget": most, "drafter": drafter}
                said.append(drive(runner, self.texts, asked, 5, device=device, **how))
        plain, ours = said
        agree(plain, host)
        assert ours.drafts > 2 and any(counts.replays for counts in ours.decodes)
        assert ours.tokens == plain.tokens and plain.logprobs and plain.prompts
        assert sorted(ours.logprobs) == sorted(plain.logprobs)
        assert sorted(ours.prompts) == sorted(plain.prompts)

    @staticmethod
    def check_refused(folder: Path, reason: str, **options: Any) -> None:
        """Check that a model is refused for a `reason`, with these fields of ShardSettings."""
        told = ShardSettings(model_path=folder, batch_invariant=True, **options)
        said = f"--batch-invariant cannot be kept: .*{reason}"
        with StandInDevice(), pytest.raises(ConfigurationError, match=said):
            load_torch_runner(told, read_config(told.model_path), device="cuda:0")
