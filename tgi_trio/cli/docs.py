"""Writes what the code knows into the documents: `python -m tgi_trio.cli.docs --write`.

A document marks where a table goes with `<!-- generated: name -->` and `<!-- end -->`; `SECTIONS`
says what `name` stands for. Everything outside of the markers is written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from tgi_trio.cli.commands import COMMANDS
from tgi_trio.cli.environment import SAGEMAKER, SAGEMAKER_PORT
from tgi_trio.cli.flags import FLAGS, Flag
from tgi_trio.cli.foreign import IDLE, REFUSED, Idle, RefusedFlag
from tgi_trio.cli.help import default_text
from tgi_trio.cli.values import KINDS
from tgi_trio.router.http.wire import states
from tgi_trio.router.shards import group_states
from tgi_trio.router.telemetry import metrics

DOCUMENTS: Final = ("docs/operations.md", "docs/architecture.md", "docs/scheduling.md")

_BLOCK: Final = re.compile(
    r"(?P<open><!-- generated: (?P<name>[\w-]+) -->\n)(?P<old>.*?)(?P<close><!-- end -->)",
    re.DOTALL,
)


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    names = list(header)
    lines = [names, ["---"] * len(names), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)


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
    return [f"`{names}`{short}", f"`{flag.env}`" if flag.env else "", default_text(flag), flag.help]


def refused_flags() -> str:
    """Return the flags of text-generation-inference that are refused, and why."""
    return table(("flag", "why", "let through"), map(_refused_row, REFUSED))


def _refused_row(refused: RefusedFlag) -> list[str]:
    short = f", `{refused.short}`" if refused.short else ""
    same = ", ".join(f"`{str(value).lower()}`" for value in refused.same)
    return [f"`--{refused.name}`{short}", refused.why, same]


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


def shard_lifecycle() -> str:
    """Return the states of a shard group as a Mermaid diagram."""
    states = group_states.ShardState
    lines = [f"[*] --> {states.SPAWNED.name}"]
    for (state, event), target in group_states.TRANSITIONS.items():
        lines.append(f"{state.name} --> {target.name}: {event.value}")
    body = "".join(f"    {line}\n" for line in lines)
    return f"```mermaid\nstateDiagram-v2\n{body}```\n"


def sequence_lifecycle() -> str:
    """Return the states of a sequence as a Mermaid diagram and as a table."""
    # Imported here: its package brings numpy, which nothing else in cli needs.
    from tgi_trio.router.scheduling import lifecycle

    return f"```mermaid\n{lifecycle.mermaid()}```\n\n{lifecycle.markdown()}"


def wire_states() -> str:
    """Return the states of an HTTP/1.1 connection as a Mermaid diagram and as a table."""
    return f"```mermaid\n{states.mermaid()}```\n\n{states.markdown()}"


def budgets() -> str:
    """Return what each budget flag does, as a Mermaid flowchart and as a table."""
    from tgi_trio.router.scheduling import budgets as table_of_budgets

    return f"```mermaid\n{table_of_budgets.mermaid()}```\n\n{table_of_budgets.markdown()}"


SECTIONS: Final[Mapping[str, Callable[[], str]]] = {
    "commands": commands,
    "flags": flags,
    "refused-flags": refused_flags,
    "idle-flags": idle_flags,
    "sagemaker-variables": sagemaker_variables,
    "metrics": metrics.as_markdown,
    "shard-lifecycle": shard_lifecycle,
    "sequence-lifecycle": sequence_lifecycle,
    "wire-states": wire_states,
    "budgets": budgets,
}


def refresh_tables(text: str) -> str:
    """Return a document with every marked section written anew.

    Raises ValueError for a name that `SECTIONS` does not have.
    """

    def section(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in SECTIONS:
            raise ValueError(f"no section is called {name!r}: there are {', '.join(SECTIONS)}")
        return f"{match['open']}{SECTIONS[name]()}{match['close']}"

    return _BLOCK.sub(section, text)


def main() -> int:
    """Write the documents, or only name those that are out of date; run where docs/ is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {', '.join(DOCUMENTS)}")
    write = parser.parse_args().write
    stale = []
    for path in map(Path, DOCUMENTS):
        old = path.read_text()
        new = refresh_tables(old)
        if old != new:
            stale.append(path)
            if write:
                path.write_text(new)
    for path in stale:
        print(f"{path} {'is written anew' if write else 'is out of date'}")
    return 1 if stale and not write else 0


if __name__ == "__main__":
    sys.exit(main())
