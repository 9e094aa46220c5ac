"""Runs sequences alone and in a crowd, for tests that no bit differs.

`small_parts` is a fixture for every test of a module that imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.shard.torch_backend.interpreter import sum_in_order
from tests.shard.torch_backend.models_support import GreedyRecorder, load, run
from tgi_trio.shard.contract import ShardSequence
from tgi_trio.shard.runner import Runner
from tgi_trio.shard.torch_backend.attention import spans
from tgi_trio.shard.torch_backend.layers import coded_linear, plain_product
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


def run_anew(
    runner: Runner, recorder: GreedyRecorder, rows: list[ShardSequence], **how: Any
) -> list[torch.Tensor]:
    """Return what the tokens of each row were chosen from; `how`: see `run`, alone without."""
    recorder.by_place.clear()
    for together in [rows] if how else [[row] for row in rows]:
        run(runner, together, **how)
    return [recorder.logits(row.id) for row in rows]
