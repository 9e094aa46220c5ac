"""What each budget flag does here, as one table; `docs/scheduling.md` draws its picture from it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from tools.docs.markdown import code, table


class Stage(enum.Enum):
    """What a request passes, in this order."""

    VALIDATION = "validation"
    QUEUE = "queue"
    ADMISSION = "admission to the batch"
    STEP = "each step of the shard"


@dataclass(frozen=True, slots=True)
class Budget:
    """One row: the flag, the stage that looks at it, and what it decides there."""

    flag: str
    stage: Stage
    short: str  # for the picture
    meaning: str


BUDGETS: Final[tuple[Budget, ...]] = (
    Budget(
        "max-input-tokens",
        Stage.VALIDATION,
        "prompt",
        "a longer prompt is refused (422)",
    ),
    Budget(
        "max-total-tokens",
        Stage.VALIDATION,
        "prompt + new tokens",
        "a request for more is refused (422); no sequence ever grows beyond it",
    ),
    Budget(
        "max-queued-tokens",
        Stage.QUEUE,
        "prompt tokens waiting",
        "what would make the queue longer is refused (429, with `Retry-After`)",
    ),
    Budget(
        "target-ttft",
        Stage.QUEUE,
        "who is late",
        "who has waited for half of it lets those go first that can still be in time, "
        "64 times at most; unset, 3 times what prompts take here, at least 1 s",
    ),
    Budget(
        "max-batch-size",
        Stage.ADMISSION,
        "sequences",
        "nobody is admitted while so many are in the batch",
    ),
    Budget(
        "max-batch-total-tokens",
        Stage.ADMISSION,
        "KV tokens in use",
        "nobody is admitted without blocks for its prompt and its first tokens; more blocks come "
        "as it grows, and when there are none the youngest goes back to the queue",
    ),
    Budget(
        "max-batch-prefill-tokens",
        Stage.ADMISSION,
        "prompt tokens in hand",
        "a prompt waits while so many tokens of others, that would be computed before it, are in "
        "the batch; also the largest step there can be",
    ),
    Budget(
        "step-token-budget",
        Stage.STEP,
        "tokens of a step",
        "decode rows first, then prompts, shortest first, in chunks that fit. While somebody "
        "generates, only as many prompt tokens as make the step at most twice as long; where the "
        "fewest take longer than that already, as many as take hardly longer than those",
    ),
    Budget(
        "waiting-served-ratio",
        Stage.STEP,
        "waiting / generating",
        "while as many wait behind prompts, for each one that generates, a step takes as many "
        "prompt tokens as fit into `--target-itl`",
    ),
    Budget(
        "max-waiting-tokens",
        Stage.STEP,
        "steps waited",
        "while fewer wait, one such step comes after every so many others",
    ),
    Budget(
        "target-itl",
        Stage.STEP,
        "seconds of a step",
        "how long a step with prompts may take while requests wait",
    ),
)


def render() -> str:
    """Return what each budget flag does, as a picture and as a table."""
    rows = ((f"`--{b.flag}`", b.stage.value, b.meaning) for b in BUDGETS)
    return f"{draw_stages()}\n{table(('flag', 'looked at by', 'what it does'), rows)}"


def draw_stages() -> str:
    """Return the stages, with the flags they look at, as a Mermaid flowchart."""
    lines = ["flowchart LR", "    request([request])"]
    for stage in Stage:
        flags = "<br/>".join(
            f"{budget.flag}: {budget.short}" for budget in BUDGETS if budget.stage is stage
        )
        lines.append(f'    {stage.name}["<b>{stage.value}</b><br/>{flags}"]')
    names = [stage.name for stage in Stage]
    lines.append("    request --> " + " --> ".join(names) + " --> tokens([tokens])")
    lines.append("    STEP -. no blocks left: the youngest .-> QUEUE")
    return code(lines, "mermaid")
