"""From argv and the environment to a command and its `Options`."""

from __future__ import annotations

import argparse
import difflib
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tgi_trio import __version__
from tgi_trio.cli.commands import COMMANDS, SERVE, Command, command_named
from tgi_trio.cli.flags import REFUSED, Flag, Refused
from tgi_trio.cli.help import command_help
from tgi_trio.errors import ConfigurationError
from tgi_trio.settings import Options, check


class UsageError(Exception):
    """The command line or the environment is wrong; its text is one sentence naming the flag."""


@dataclass(frozen=True)
class Invocation:
    """What to do."""

    command: str  # the name of a row of `COMMANDS`, or "print"
    options: Any = field(default_factory=Options)  # of the row's type
    text: str = ""  # "print": what to print before exiting with 0
    warnings: tuple[str, ...] = ()


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Invocation:
    """Return what `argv` (without the program's name) and `environ` ask for.

    Raises UsageError for unknown or refused flags and for values that cannot be read.
    """
    rest = list(argv)
    name = rest.pop(0) if rest and not rest[0].startswith("-") else SERVE.name
    command = command_named(name)
    if command is None:
        names = ", ".join(known.name for known in COMMANDS)
        raise UsageError(f"unknown command {name!r}: there are {names}")
    namespace, unknown = _parser(command).parse_known_args(rest)
    if unknown:
        raise UsageError(_unknown(unknown[0], command))
    given = vars(namespace)
    if given["version"]:
        return Invocation("print", text=f"tgi-trio {__version__}\n")
    if given["help"]:
        return Invocation("print", text=command_help(command))
    if command is SERVE:
        _refuse(given, environ)
    warnings: list[str] = []
    values: dict[str, Any] = {}
    for flag in command.flags:
        found = _value(flag, given[flag.field], environ, warnings)
        if found is not None:
            values[flag.field] = found
    if command.operand:
        if given["operand"] is None:
            raise UsageError(f"{name} needs the {command.operand} {command.operand_help}")
        values[command.operand_field] = given["operand"]
    options = command.options(**values)
    if isinstance(options, Options):
        try:
            check(options)
        except ConfigurationError as error:
            raise UsageError(str(error)) from None
    return Invocation(name, options, warnings=tuple(warnings))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


def _parser(command: Command) -> argparse.ArgumentParser:
    """argparse only splits the words here: `Flag.parse` reads values of both sources alike."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-V", "--version", action="store_true")
    for flag in command.flags:
        names = [f"--{flag.name}", *([flag.short] if flag.short else [])]
        if flag.kind == "switch":
            parser.add_argument(*names, action="append_const", const="true")
        else:
            parser.add_argument(*names, action="append")
    if command.operand:
        parser.add_argument("operand", nargs="?")
    if command is SERVE:
        for refused in REFUSED:
            names = [f"--{refused.name}", *([refused.short] if refused.short else [])]
            parser.add_argument(*names, nargs="?", action="append", const="true")
    return parser


def _unknown(word: str, command: Command) -> str:
    if not word.startswith("-"):
        hint = "; the model is given with --model-id" if not command.operand else ""
        return f"{word!r} is not a flag of {command.name}{hint}"
    name = word.split("=")[0]
    near = difflib.get_close_matches(name, [f"--{flag.name}" for flag in command.flags], n=1)
    hint = f"did you mean {near[0]}?" if near else "see --help"
    return f"{name} is not a flag of {command.name}: {hint}"


def _refuse(given: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Raise UsageError when a flag of another build asks for something we do not do."""
    for refused in REFUSED:
        name = refused.name.replace("-", "_")
        variable = name.upper()
        for text in given[name] or ():
            _check_refused(refused, f"--{refused.name}", text)
        if refused.env and environ.get(variable):
            _check_refused(refused, f"environment variable {variable}", environ[variable])


def _check_refused(refused: Refused, source: str, text: str) -> None:
    if text.strip().lower() not in refused.same:
        only = f" (only {' or '.join(refused.same)} is accepted)" if refused.same else ""
        raise UsageError(f"{source} cannot be used: {refused.why}{only}")


def _value(
    flag: Flag, texts: list[str] | None, environ: Mapping[str, str], warnings: list[str]
) -> Any:
    """Return a flag's value, None when it is given nowhere."""
    if texts:
        if len(texts) > 1 and not flag.many and flag.kind != "switch":
            raise UsageError(f"--{flag.name} is given {len(texts)} times: give it once")
        values = [_read(flag, f"--{flag.name}", text) for text in texts]
        return tuple(values) if flag.many else values[0]
    text = environ.get(flag.env, "").strip() if flag.env else ""
    if not text:
        return None
    if flag.kind == "ip" and not _is_ip(text):
        # shells and containers set HOSTNAME to the machine's name
        warnings.append(
            f"HOSTNAME={text} is no IP address: listening on {flag.default} "
            f"(--{flag.name} sets another)"
        )
        return None
    source = f"environment variable {flag.env}"
    if flag.many:
        return tuple(_read(flag, source, part) for part in text.split(",") if part.strip())
    return _read(flag, source, text)


def _read(flag: Flag, source: str, text: str) -> Any:
    try:
        return flag.parse(text)
    except ValueError as error:
        raise UsageError(f"{source}: {error}, got {text!r}") from None


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
