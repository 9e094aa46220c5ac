"""Parses argv and the environment into a command and its options."""

from __future__ import annotations

import argparse
import difflib
import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NoReturn

from tgi_trio import __version__
from tgi_trio.cli.commands import COMMANDS, SERVE, Command, find_command
from tgi_trio.cli.device_count import choose_num_shard
from tgi_trio.cli.environment import Environment, idle_notes, read_environment
from tgi_trio.cli.flags import Flag
from tgi_trio.cli.foreign import IDLE, REFUSED, Idle, RefusedFlag
from tgi_trio.cli.help import command_help
from tgi_trio.cli.values import BOOLEANS, read_bool, read_value
from tgi_trio.errors import ConfigurationError
from tgi_trio.settings.records import Options

_FOUND: Final = "each gets an address of its own, and fronts ask it by plain HTTP"
_RANKS: Final = "--nodes-per-replica says over how many machines their ranks are divided"
# Flags of `serve` for the place of one server or of its parts, and why servers of a cluster cannot
# have them.
_PLACED: Final = {
    **dict.fromkeys(("hostname", "port", "ssl_certfile", "ssl_keyfile"), _FOUND),
    **dict.fromkeys(("remote_ranks", "rank_address", "shard"), _RANKS),
}

_NUMBERS: Final = ("int", "number")  # kinds whose values have no commas


class UsageError(Exception):
    """The command line or the environment is wrong; the text is a sentence that names the flag."""


@dataclass(frozen=True)
class Invocation:
    """The command to run."""

    command: str  # the name of a row of `COMMANDS`, or "print"
    options: Any = field(default_factory=Options)  # of the row's type
    text: str = ""  # "print": what to print before exiting with 0
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # for the log


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Invocation:
    """Return the invocation for `argv` (without the program's name) and `environ`.

    Raises UsageError for unknown or refused flags and for unreadable values.
    """
    command, rest = _command(argv)
    namespace, others = _parser(command).parse_known_args(_add_truth_values(rest, command))
    served: list[str] = []
    if command.serve_field:
        served, others = others, []
    operands = [word for word in others if not word.startswith("-")]
    most = 2 if command.target_field else 1
    if unknown := [word for word in others if word.startswith("-")] or operands[most:]:
        raise UsageError(_explain_unknown(unknown[0], command))
    given = vars(namespace)
    if given["version"]:
        return Invocation("print", text=f"tgi-trio {__version__}\n")
    if given["help"]:
        return Invocation("print", text=command_help(command))
    reader = _Reader(command, given, operands, environ)
    options = reader.options()
    if command.serve_field:
        _check_served(served)
        options = replace(options, **{command.serve_field: tuple(served)})
    return Invocation(
        command.name,
        options,
        warnings=tuple(reader.warnings),
        notes=tuple(reader.notes),
    )


def _check_served(words: Sequence[str]) -> None:
    """Raise UsageError for words that `serve` would refuse on any machine, and for `_PLACED`.

    What depends on the machine, such as the number of devices, is checked where the server starts.
    """
    namespace, others = _parser(SERVE).parse_known_args(_add_truth_values(words, SERVE))
    given = vars(namespace)
    operands = [word for word in others if not word.startswith("-")]
    if unknown := [word for word in others if word.startswith("-")] or operands[1:]:
        raise UsageError(_explain_unknown(unknown[0], SERVE))
    for name, why in _PLACED.items():
        if given[name]:
            raise UsageError(f"--{name.replace('_', '-')} is not for servers of a cluster: {why}")
    reader = _Reader(SERVE, given, operands, {})
    try:
        reader.refuse()
        reader.read_flags()
    except (ValueError, ConfigurationError) as error:
        raise UsageError(str(error)) from None


def asks_for_json(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Return whether even errors in `argv` are to be shown as JSON (`--json-output`)."""
    texts = [word.partition("=")[2] or "true" for word in argv if _name_of(word) == "--json-output"]
    text = (texts or [environ.get("JSON_OUTPUT", "")])[-1].strip().lower()
    return text in BOOLEANS and read_bool(text)


def _command(argv: Sequence[str]) -> tuple[Command, list[str]]:
    """Return the command and its words: `serve` if there is none, or a model's path comes first."""
    words = list(argv)
    if not words or words[0].startswith("-"):
        return SERVE, words
    if (command := find_command(words[0])) is not None:
        return command, words[1:]
    if "/" in words[0] or words[0].startswith(("~", ".")):
        return SERVE, words
    names = ", ".join(known.name for known in COMMANDS)
    raise UsageError(
        f"unknown command {words[0]!r}: there are {names}; a model is served with "
        f"`serve {words[0]}`"
    )


class _FlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))


def _parser(command: Command) -> argparse.ArgumentParser:
    """Return a parser that only splits words; `read_value` reads flags and variables alike."""
    parser = _FlagParser(add_help=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("-V", "--version", action="store_true")
    for flag in command.flags:
        names = [f"--{flag.name}", *([flag.short] if flag.short else [])]
        parser.add_argument(*names, action="append")
    if command is SERVE:
        for refused in REFUSED:
            names = [f"--{refused.name}", *([refused.short] if refused.short else [])]
            if refused.kind == "switch":
                parser.add_argument(*names, action="append")
            else:
                parser.add_argument(*names, action="append", nargs="?", const="")
        for idle in IDLE:
            if idle.flag:
                parser.add_argument(f"--{idle.name}", action="append")
    return parser


def _add_truth_values(words: Sequence[str], command: Command) -> list[str]:
    """Return the words with `=true` added to each switch without a value.

    A truth value may also follow as a separate word; any other word is not its value.
    """
    rows: list[Flag | RefusedFlag | Idle] = [*command.flags]
    if command is SERVE:
        rows += [*REFUSED, *IDLE]
    switches = {f"--{row.name}" for row in rows if row.kind in ("switch", "toggle")}
    denied = {f"--no-{row.name}": f"--{row.name}" for row in rows if row.kind == "toggle"}
    short = {flag.short: f"--{flag.name}" for flag in command.flags if flag.short}
    result: list[str] = []
    for word in words:
        name = short.get(word, word)
        if name in switches:
            result.append(f"{name}=true")
        elif name in denied:
            result.append(f"{denied[name]}=false")
        elif result and word.lower() in BOOLEANS and result[-1].removesuffix("=true") in switches:
            result[-1] = result[-1].removesuffix("true") + word
        else:
            result.append(word)
    return result


def _name_of(word: str) -> str:
    return word.partition("=")[0]


def _explain_unknown(word: str, command: Command) -> str:
    if not word.startswith("-"):
        only = f": it takes one {command.operand}" if command.operand else ""
        if any("url" in flag.names for flag in command.flags):
            only = ": the server is given with --url"
        return f"{word!r} is not a flag of {command.name}{only}"
    name = _name_of(word)
    known = [f"--{name}" for flag in command.flags for name in flag.names]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "see --help"
    return f"{name} is not a flag of {command.name}: {hint}"


class _Reader:
    """Reads the values of one command line, and collects warnings and notes."""

    def __init__(
        self,
        command: Command,
        given: Mapping[str, Any],
        operands: Sequence[str],
        environ: Mapping[str, str],
    ) -> None:
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self._command = command
        self._given = given
        self._operands = operands
        self._system = environ  # all variables, unchanged
        self._environ = Environment(environ)

    def options(self) -> Any:
        """Return the command's options. Raises UsageError."""
        try:
            return self._options()
        except (ValueError, ConfigurationError) as error:
            raise UsageError(str(error)) from None

    def _options(self) -> Any:
        command = self._command
        if command is SERVE:
            model_is_given = bool(self._operands or self._given["model_id"])
            self._environ = read_environment(self._system, model_is_given)
            self.notes += self._environ.notes
            self.refuse()
            self.notes += idle_notes(self._given, self._environ)
        values = self.read_flags()
        self._read_operand(values)
        options = command.options(**values)
        if command is SERVE:
            options = choose_num_shard(options, self._system)
        command.check(options)
        return options

    def read_flags(self) -> dict[str, Any]:
        """Return the given values by field. Raises UsageError and ValueError."""
        values = {flag.field: self._value(flag) for flag in self._command.flags}
        return {field: value for field, value in values.items() if value is not None}

    def _read_operand(self, values: dict[str, Any]) -> None:
        command = self._command
        if len(self._operands) < (2 if command.target_field else 1):
            if command.operand and command.operand_needed:
                raise UsageError(
                    f"{command.name} needs the {command.operand} {command.operand_help}"
                )
            return
        word = self._operands[0]
        if not command.operand:
            raise UsageError(_explain_unknown(word, command))
        if self._given.get(command.operand_field):
            name = command.operand_field.replace("_", "-")
            raise UsageError(f"the {command.operand} is given twice: as {word!r} and with --{name}")
        value = read_value(command.operand_kind, command.operand, word)
        values[command.operand_field] = value
        if command.target_field:
            values[command.target_field] = read_value("path", "OUTPUT", self._operands[1])

    def refuse(self) -> None:
        """Raise UsageError if a flag of TGI asks for something that is not done here."""
        for refused in REFUSED:
            name = refused.name.replace("-", "_")
            variable = name.upper()
            for text in self._given[name] or ():
                _check_refused(refused, f"--{refused.name}", text)
            text = self._environ.get(variable)
            if refused.env and text.strip():
                _check_refused(refused, self._environ.source(variable), text)

    def _value(self, flag: Flag) -> Any:
        """Return a flag's value, None if it is not given."""
        texts = self._given[flag.field]
        if texts:
            if len(texts) > 1 and not flag.many and flag.kind != "switch":
                raise UsageError(f"--{flag.name} is given {len(texts)} times: give it once")
            if flag.many and flag.kind in _NUMBERS:  # as the help shows those that are the default
                texts = [part for text in texts for part in text.split(",")]
            values = [read_value(flag.kind, f"--{flag.name}", text) for text in texts]
            return tuple(values) if flag.many else values[-1]
        text = self._environ.get(flag.env)
        if not (text if flag.secret else text.strip()):
            if flag.secret and flag.env in self._system:
                self.warnings.append(
                    f"{flag.env} is empty, which counts as not set: without another key the "
                    "server is open to everybody"
                )
            return None
        return self._read_variable(flag, text)

    def _read_variable(self, flag: Flag, text: str) -> Any:
        source = self._environ.source(flag.env)
        if flag.kind == "ip" and not _is_ip(text.strip()):
            # Shells and containers set HOSTNAME to the machine's name.
            self.warnings.append(
                f"HOSTNAME={text} is no IP address: listening on {flag.default} "
                f"(--{flag.name} sets another)"
            )
            return None
        if flag.many and not flag.secret:
            parts = [part for part in text.split(",") if part.strip()]
            return tuple(read_value(flag.kind, source, part) for part in parts)
        try:
            value = read_value(flag.kind, source, text)
        except ValueError as error:
            if flag.kind != "levels":
                raise
            # Other programs in a container use such variables, too; TGI continues as well.
            self.warnings.append(f"{error}: logging at {flag.default}")
            return None
        return (value,) if flag.many else value


def _check_refused(refused: RefusedFlag, source: str, text: str) -> None:
    try:
        value = read_value(refused.kind, source, text)
    except ValueError:
        value = None
    if value is None or value not in refused.same:
        same = [str(each).lower() for each in refused.same]
        only = f" (only {' or '.join(same)} is accepted)" if same else ""
        raise UsageError(f"{source} cannot be used: {refused.why}{only}")


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
