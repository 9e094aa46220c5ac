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
        "a request that would make the queue longer is refused (429, with `Retry-After`)",
    ),
    Budget(
        "target-ttft",
        Stage.QUEUE,
        "who is late",
        "a request that has waited for half of it is late: those that can still be in time go "
        "first, 64 times at most. If unset: 3 times what prompts take here, at least 1 s",
    ),
    Budget(
        "max-batch-size",
        Stage.ADMISSION,
        "sequences",
        "no sequence is admitted while so many are in the batch",
    ),
    Budget(
        "max-batch-total-tokens",
        Stage.ADMISSION,
        "KV tokens in use",
        "no sequence is admitted without blocks for its prompt and its first tokens. It gets more "
        "as it grows; when there are none, the youngest sequence goes back to the queue",
    ),
    Budget(
        "max-batch-prefill-tokens",
        Stage.ADMISSION,
        "prompt tokens in hand",
        "a prompt waits while the prompts that would be computed before it have so many tokens "
        "left; also the most tokens that a step can have",
    ),
    Budget(
        "step-token-budget",
        Stage.STEP,
        "tokens of a step",
        "decode rows come first, then prompts, shortest first, in chunks that fit. While any "
        "sequence generates, prompt tokens may make a step at most twice as long. Where even the "
        "smallest chunk takes longer than that, a step has as many as take hardly longer than it",
    ),
    Budget(
        "waiting-served-ratio",
        Stage.STEP,
        "waiting / generating",
        "while at least this many requests wait for each sequence that generates, steps are long: "
        "each has as many prompt tokens as fit into `--target-itl`",
    ),
    Budget(
        "max-waiting-tokens",
        Stage.STEP,
        "steps waited",
        "while fewer wait, one long step comes after this many ordinary ones",
    ),
    Budget(
        "target-itl",
        Stage.STEP,
        "seconds of a step",
        "how long a long step may take",
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
