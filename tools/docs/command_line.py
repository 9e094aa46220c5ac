"""Commands, flags and variables, from the tables that the command line is made of."""

from __future__ import annotations

from typing import Final

from tgi_trio.cli.commands import COMMANDS
from tgi_trio.cli.environment import SAGEMAKER, SAGEMAKER_PORT
from tgi_trio.cli.flags import FLAGS, Flag
from tgi_trio.cli.foreign import IDLE, REFUSED, Idle, RefusedFlag
from tgi_trio.cli.help import describe_default
from tgi_trio.cli.values import KINDS
from tools.docs.markdown import Sections, table


def commands() -> str:
    """Return every command; what each takes is in its `--help`."""
    return table(("command", "what it does"), ((f"`{c.usage}`", c.summary) for c in COMMANDS))


def flags() -> str:
    """Return every flag, one table per group of --help."""
    parts = []
    for group, rows in FLAGS:
        header = ("flag", "variable", "default", "meaning")
        parts.append(f"**{group}**\n\n{table(header, map(_flag_row, rows))}")
    return "\n".join(parts)


def _flag_row(flag: Flag) -> list[str]:
    names = f"--{flag.name} {KINDS[flag.kind][0]}".rstrip()
    short = f", `{flag.short}`" if flag.short else ""
    return [
        f"`{names}`{short}",
        f"`{flag.env}`" if flag.env else "",
        describe_default(flag),
        flag.help,
    ]


def refused_flags() -> str:
    """Return the flags of text-generation-inference that are refused, and why."""
    return table(("flag", "its variable", "why", "let through"), map(_refused_row, REFUSED))


def _refused_row(refused: RefusedFlag) -> list[str]:
    short = f", `{refused.short}`" if refused.short else ""
    same = ", ".join(f"`{str(value).lower()}`" for value in refused.same)
    variable = "refused" if refused.env else "named in the log"
    return [f"`--{refused.name}`{short}", variable, refused.why, same]


def idle_flags() -> str:
    """Return the flags and variables of text-generation-inference that make no difference."""
    return table(("flag", "variable", "why"), map(_idle_row, IDLE))


def _idle_row(idle: Idle) -> list[str]:
    variable = f"`{idle.name.replace('-', '_').upper()}`"
    return [f"`--{idle.name}`" if idle.flag else "", variable, idle.why]


def sagemaker_variables() -> str:
    """Return the variables of SageMaker that act, and what each stands for."""
    rows = [[f"`{theirs}`", f"`{ours}`"] for theirs, ours in SAGEMAKER.items()]
    return table(("variable", "stands for"), [*rows, ["", f"`PORT`: {SAGEMAKER_PORT}"]])


SECTIONS: Final[Sections] = {
    "commands": commands,
    "flags": flags,
    "refused-flags": refused_flags,
    "idle-flags": idle_flags,
    "sagemaker-variables": sagemaker_variables,
}
