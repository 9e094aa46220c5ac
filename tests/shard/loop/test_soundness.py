"""Every runner proves that it computes, without a trace, and does not when it cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.shard.cpu_backend.kernel_support import FITTING
from tests.shard.torch_backend.models_support import (
    BLOCK,
    advance,
    generated,
    prompts,
    sequences,
)
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.shard.backend import load_runner
from tgi_trio.shard.loop.soundness import PROOF_TOKENS, RunnerBroken, prove_sound
from tgi_trio.shard.runner import Runner

PROMPTS = prompts(7)[4:]
NEW = 12
pytestmark = pytest.mark.usefixtures("one_thread")

# family, backend, the part whose failure is to be noticed
KINDS = [
    ("llama", "kernels", "_forward.run"),
    ("llama", "torch", "model.forward"),
    ("t5", "torch", "model.forward"),
    ("jetmoe", "torch", "way.model.forward"),
    ("codegen", "torch", "way.model.forward"),
    ("mamba2", "torch", "model.forward"),
    ("bart", "torch", "way.model.forward"),
]


@pytest.fixture(params=KINDS, ids=lambda kind: "-".join(kind[:2]))
def case(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> tuple[Runner, str]:
    family, backend, part = request.param
    folder = checkpoint(family, **(FITTING["llama"] if backend == "kernels" else {}))
    runner = load_runner(
        ShardSettings(model_path=folder, dtype="float32", cpu_threads=1, cpu_backend=backend)
    )
    runner.warm_up(WarmupRequest(256, 256, 16, 63 * BLOCK))
    return runner, part


def texts(runner: Runner, *, proving: bool) -> list[list[int]]:
    """Run sequences together to their ends, with a proof between any two steps."""
    rows = sequences(PROMPTS, new=NEW, ignore_eos=True)
    counts = [row.length for row in rows]
    for _ in range(NEW):
        advance(runner, rows, counts)
        counts = [1] * len(rows)
        if proving:
            prove_sound(runner)
    for row in rows:
        runner.drop(row)
    return [generated(row) for row in rows]


def test_a_proof_leaves_no_trace(case: tuple[Runner, str]) -> None:
    runner, _ = case
    expected = texts(runner, proving=False)
    assert texts(runner, proving=True) == expected
    assert len({tuple(text) for text in expected}) > 1


def test_a_runner_that_cannot_compute_says_so(
    case: tuple[Runner, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, part = case
    *path, name = part.split(".")
    holder = runner
    for each in path:
        holder = getattr(holder, each)

    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    prove_sound(runner)
    monkeypatch.setattr(holder, name, broken)
    with pytest.raises(RunnerBroken, match=r"any more: RuntimeError: .*illegal memory"):
        prove_sound(runner)


@pytest.mark.parametrize("nan_steps", [1, PROOF_TOKENS])
def test_a_runner_that_computes_nothing_but_nan_says_so(
    case: tuple[Runner, str], monkeypatch: pytest.MonkeyPatch, nan_steps: int
) -> None:
    """And one that does so for a token or two does not: they may be the checkpoint's."""
    runner, part = case
    *path, name = part.split(".")
    holder = runner
    for each in path:
        holder = getattr(holder, each)
    original, calls = getattr(holder, name), list[int]()

    def silent(*args: object, **options: object) -> object:
        out = original(*args, **options)
        calls.append(1)
        if len(calls) > nan_steps:
            return out
        numbers = getattr(out, "logits", out)
        numbers[:] = float("nan")
        return out

    monkeypatch.setattr(holder, name, silent)
    if nan_steps < PROOF_TOKENS:
        prove_sound(runner)
    else:
        with pytest.raises(RunnerBroken, match=r"any more: RuntimeError: .*logits contain NaN"):
            prove_sound(runner)
    assert len(calls) == min(nan_steps + 1, PROOF_TOKENS)
