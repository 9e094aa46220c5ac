"""Decides after a failed step whether its rows are at fault or the device is broken.

A row that makes a step raise fails alone, and the others go on. But if the device is broken for
good (CUDA errors persist for the process, or all results are NaN), every row of every step fails. A
shard that blamed the rows would then fail each request while it looks healthy. So:

- A runner whose step has raised, or has failed each row that was to get a token, has to compute a
  token of its own (`Runner.prove_sound`). If it cannot, or gets nothing but NaN, the shard ends.
- That test does not find everything: memory may suffice for a single token. If all of several rows
  have each raised alone, or `IN_A_ROW` steps in a row have raised, the shard ends as well.

No work is lost: the router starts another shard, replays every sequence, and finds the one that is
really at fault (`router/scheduling/isolation.py`). Every shard runs the test before it is ready:
with a broken device restarts end at `--shard-restart-limit`, and a checkpoint with which nothing
can be computed ends the start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from tgi_trio.errors import PeerError, TgiTrioError
from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.shard.contract import (
    ShardSequence,
    StepPlan,
    StepResult,
)
from tgi_trio.shard.runner import Runner

IN_A_ROW: Final = 8  # steps of one row that raise, without one in between that does not
PROOF_TOKENS: Final = 4  # ids that are tried: a sound checkpoint may hold NaN for one of them


class RunnerBroken(TgiTrioError):
    """The runner is broken, so its process has to end."""


class Judge:
    """Decides after each step whether to go on with a runner."""

    def __init__(self, runner: Runner) -> None:
        """Judge the results of `runner`."""
        self._runner = runner
        self._raised = 0  # steps in a row that raised and of which no row came out

    def examine(self, result: StepResult) -> None:
        """Raise RunnerBroken when the faults of `result` cannot be blamed on its rows.

        Where the step has raised, the runner has proved itself since.
        """
        faults, count = result.choices.faults, len(result.choices.counts)
        if len(faults) < count or not result.raised:
            self._raised = 0
            if faults and not result.raised and not result.choices.counts.any():
                prove_sound(self._runner)
            return
        self._raised += 1
        last = faults[count - 1]
        if count > 1:
            raise RunnerBroken(
                f"each of {count} rows of a step failed alone, the last with: {last}"
            )
        if self._raised >= IN_A_ROW:
            raise RunnerBroken(f"{self._raised} steps in a row failed, the last with: {last}")


def prove_sound(runner: Runner, *, first: bool = False) -> None:
    """Have the runner compute a token of its own; raises RunnerBroken when it cannot.

    `first`: nothing has been computed with this model before, so that it may be at fault itself.
    """
    try:
        runner.prove_sound()
    except PeerError:
        raise  # it is another process that has failed
    except Exception as error:
        fault = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
        if first:
            raise RunnerBroken(
                f"the model cannot compute a single token: {fault}. Its weights may be damaged, or "
                "made for another dtype (--dtype): float16 overflows where bfloat16 does not"
            ) from error
        raise RunnerBroken(f"the model cannot compute a single token any more: {fault}") from error


def prove_by_step(step: Callable[[StepPlan], StepResult], vocab_size: int) -> None:
    """Have `step` compute a made-up token and choose the next; raises RuntimeError when it cannot.

    Raises whatever `step` raises, too.
    """
    fault = ""
    for token in range(min(PROOF_TOKENS, vocab_size)):
        faults = step(proof_plan(token)).choices.faults
        if not faults:
            return
        fault = faults[0]
    raise RuntimeError(fault)


def proof_plan(token: int = 0) -> StepPlan:
    """Return a step of one made-up token, in the null block, that chooses the next."""
    ids = np.full(1, token, dtype=np.int32)
    row = ShardSequence(-1, ids, 1, 1, 0, [0], 0, 0, SamplingParameters())
    return StepPlan(
        rows=[row],
        token_ids=np.full(1, token, dtype=np.int64),
        positions=np.zeros(1, dtype=np.int64),
        kv_slots=np.zeros(1, dtype=np.int64),
        query_starts=np.array([0, 1], dtype=np.int32),
        context_lengths=np.ones(1, dtype=np.int32),
        block_tables=np.zeros((1, 1), dtype=np.int32),
        samples=np.ones(1, dtype=np.bool_),
    )
