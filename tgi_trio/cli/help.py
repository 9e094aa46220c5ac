"""`--help`: flags in groups, one line per flag with its environment variable and default."""

from __future__ import annotations

from tgi_trio.cli.commands import COMMANDS, SERVE, Command
from tgi_trio.cli.flags import Flag
from tgi_trio.cli.values import KINDS

_PROGRAM = "python -m tgi_trio"
_SOURCES = "A flag wins over its environment variable, named in brackets; (=X) is the default.\n"


def serve_help() -> str:
    """Return the help of `serve`, which is also that of the program."""
    lines = [f"Usage: {_PROGRAM} [COMMAND] [FLAGS]", "", "Commands:"]
    lines += [f"  {command.usage:<33} {command.summary}" for command in COMMANDS]
    lines += [f"  {'--version':<33} print the version", "", _SOURCES]
    return "\n".join([*lines, *_groups(SERVE)])


def command_help(command: Command) -> str:
    """Return the help of one command."""
    if command is SERVE:
        return serve_help()
    summary = command.summary[0].upper() + command.summary[1:] + "."
    usage = f"Usage: {_PROGRAM} {command.usage}"
    return "\n".join([usage, "", summary, "", *_groups(command)])


def _groups(command: Command) -> list[str]:
    lines = []
    for group, rows in command.groups:
        lines += [f"{group}:", *map(_line, rows), ""]
    return lines


def describe_default(flag: Flag) -> str:
    """Return a flag's default for display; behind a 0 that decides nothing, what applies then."""
    default = flag.default
    if default is None or default == ():
        return flag.unset or "none"
    if isinstance(default, tuple):
        return ",".join(f"{value:g}" for value in default)
    if isinstance(default, bool):
        return str(default).lower()
    shown = f"{default:g}" if isinstance(default, float) else str(default)
    return f"{shown}, {flag.unset}" if flag.unset else shown


def _line(flag: Flag) -> str:
    names = " / ".join(f"--{name}" for name in flag.names)
    if flag.short:
        names = f"{flag.short}, {names}"
    left = f"  {names} {KINDS[flag.kind][0]}".rstrip()
    variable = f" [{flag.env}]" if flag.env else ""
    return f"{left:<46} {flag.help}{variable} (={describe_default(flag)})"
