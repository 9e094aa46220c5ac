"""Retries a step whose launch or computation has raised, by bisection.

The step is computed in halves until the rows that raise alone are known. They fail, and the others
get their tokens. `soundness.py` decides whether the rows are at fault at all. With several ranks
nothing is retried (`GroupBroken`), since the other ranks may be in the middle of the step.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable

from tgi_trio.shard.contract import (
    Choices,
    StepPlan,
    StepResult,
)
from tgi_trio.shard.loop.soundness import RunnerBroken, prove_sound
from tgi_trio.shard.plan_parts import fill_inputs, slice_plan
from tgi_trio.shard.runner import (
    GroupBroken,
    Pending,
    Runner,
)


def try_launch(runner: Runner, plan: StepPlan) -> Pending | None:
    """Launch a step; None if that has raised: it is computed when it is settled."""
    try:
        return runner.launch(plan)
    except GroupBroken:
        raise
    except Exception:
        traceback.print_exc(file=sys.stderr)
        return None


def try_proceed(pending: Pending) -> bool:
    """Let a step go on, now that the one before is settled; return whether nothing was raised."""
    try:
        pending.proceed()
    except GroupBroken:
        raise
    except Exception:
        traceback.print_exc(file=sys.stderr)
        return False
    return True


def compute(
    runner: Runner,
    plan: StepPlan,
    pending: Pending | None,
    report_progress: Callable[[], None],
    *,
    followed: bool,
) -> StepResult:
    """Run a step to its end; where it raises, find the rows that fail alone and fault only those.

    `pending`: it has been launched. `report_progress` is called before each pair of halves.
    `followed`: the next step has been launched on top of it and writes the states that this one
    read, so that it cannot be run again. Raises RunnerBroken when it is not the rows.
    """
    found = _attempt(runner, plan, pending)
    if isinstance(found, StepResult):
        return found
    if followed and plan.state_reads is not None:
        raise RunnerBroken(
            "a step failed when the next had written over the states that it began with: " + found
        )
    prove_sound(runner)
    fill_inputs(plan)
    return _compute_halves(runner, plan, found, report_progress)


def _attempt(runner: Runner, plan: StepPlan, pending: Pending | None = None) -> StepResult | str:
    """Return the result of a step, or why there is none.

    The exception ends here: its traceback holds what the step had allocated.
    """
    try:
        result = (pending or runner.launch(plan)).result()
        if (found := len(result.choices.counts)) != len(plan.rows):
            raise RuntimeError(f"{found} results for {len(plan.rows)} rows")
        return result
    except GroupBroken:
        raise
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        text = str(error).strip() or "no message"
        return f"the model failed on this sequence: {type(error).__name__}: {text}"


def _compute_halves(
    runner: Runner, plan: StepPlan, why: str, report_progress: Callable[[], None]
) -> StepResult:
    """Return the result of a step that has raised `why`, from its halves or their halves."""
    if len(plan.rows) == 1:
        return StepResult(Choices.failed(why), 0, 0, raised=True)
    report_progress()
    middle = len(plan.rows) // 2
    results = []
    for half in (slice_plan(plan, 0, middle), slice_plan(plan, middle, len(plan.rows))):
        found = _attempt(runner, half)
        if isinstance(found, str):
            found = _compute_halves(runner, half, found, report_progress)
        results.append(found)
    first, second = results
    prompts = {middle + row: values for row, values in second.prompts.items()}
    return StepResult(
        Choices.concatenate([first.choices, second.choices]),
        forward_ns=first.forward_ns + second.forward_ns,
        sample_ns=first.sample_ns + second.sample_ns,
        prompts=first.prompts | prompts,
        raised=True,
    )
