"""`completion`: scripts by which shells complete commands and flags, made from the tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from tgi_trio.cli.commands import COMMANDS, SERVE, Command
from tgi_trio.cli.options import CompletionOptions

PROGRAM: Final = "tgi-trio"


def _names(command: Command) -> list[str]:
    flags = [f"--{name}" for flag in command.flags for name in flag.names]
    return [*flags, *(flag.short for flag in command.flags if flag.short), "--help"]


def _bash() -> str:
    cases = "\n".join(
        f'        {command.name}) words="{" ".join(_names(command))}" ;;'
        for command in COMMANDS
        if command is not SERVE
    )
    commands = " ".join(command.name for command in COMMANDS)
    return f"""\
_tgi_trio() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} words
    case ${{COMP_WORDS[1]}} in
{cases}
        *) words="{" ".join(_names(SERVE))} --version" ;;
    esac
    [[ $COMP_CWORD == 1 ]] && words="{commands} $words"
    [[ $word == -* || $COMP_CWORD == 1 ]] && COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
complete -o default -F _tgi_trio {PROGRAM}
"""


def _zsh() -> str:
    return f"autoload -U +X bashcompinit && bashcompinit\n{_bash()}"


def _fish() -> str:
    others = " ".join(command.name for command in COMMANDS if command is not SERVE)
    lines = []
    for command in COMMANDS:
        lines.append(
            f"complete -c {PROGRAM} -n __fish_use_subcommand -a {command.name} "
            f"-d {_quote(command.summary)}"
        )
        seen = (
            f"'not __fish_seen_subcommand_from {others}'"
            if command is SERVE
            else f"'__fish_seen_subcommand_from {command.name}'"
        )
        for flag in command.flags:
            short = f" -s {flag.short[1:]}" if flag.short else ""
            takes = " -r" if flag.takes_value else ""
            lines += [
                f"complete -c {PROGRAM} -n {seen} -l {name}{short}{takes} -d {_quote(flag.help)}"
                for name in flag.names
            ]
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


_SCRIPTS: Final[Mapping[str, Callable[[], str]]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}


def completion(shell: str) -> str:
    """Return the script for one of `values.SHELLS`."""
    return _SCRIPTS[shell]()


def run_completion(options: CompletionOptions) -> int:
    """Print the script that is asked for; the exit code is 0."""
    print(completion(options.shell), end="")
    return 0
