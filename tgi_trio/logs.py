"""Logging set-up: one line of text or one JSON object per record, on standard error."""

from __future__ import annotations

import io
import logging
import os
import select
import sys
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from types import TracebackType
from typing import TextIO
from urllib.parse import quote

import orjson

from tgi_trio.log_levels import LogLevels

log = logging.getLogger("tgi_trio")

_LONGEST_LINE = 65536  # characters of a line that a library prints
_PATIENCE_MS = 20  # for a reader that is behind, once until it has caught up
_PAUSE_MS = 1000  # that a person may make in reading: what they are told at the start matters more
_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class JsonFormatter(logging.Formatter):
    """One JSON object per record; what was passed as `extra` becomes fields of it."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(),
            "level": record.levelname,
            "message": record.getMessage(),
            "target": record.name,
        }
        fields.update({k: v for k, v in vars(record).items() if k not in _PLAIN})
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(fields, default=str).decode()


class TextFormatter(logging.Formatter):
    """`time level target: message key=value ...`"""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        extra = "".join(f" {k}={v}" for k, v in vars(record).items() if k not in _PLAIN)
        line = f"{time} {record.levelname:<7} {record.name}: {record.getMessage()}{extra}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class DescriptorHandler(logging.Handler):
    """Writes records to a file descriptor and never waits for whoever reads it.

    The router logs from its event loop: a pipe that nobody empties, or a terminal stopped with
    Ctrl-S, would hold every stream. Records that find no room are lost, counted, and reported when
    there is room again; so are those that a full disk refuses.
    """

    def __init__(self, descriptor: int, formatter: logging.Formatter) -> None:
        super().__init__()
        self.lost = 0  # records since the last report
        self._descriptor = descriptor
        self._torn = False  # the last line that was begun has no end
        self._room = select.poll()
        self._room.register(descriptor, select.POLLOUT)
        self.setFormatter(formatter)

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record, or count it as lost."""
        try:
            text = self.format(record)
        except Exception:
            self.handleError(record)  # as every handler of the standard library does
            return
        if self.lost:
            were = "record was" if self.lost == 1 else "records were"
            words = f"{self.lost} log {were} lost: nobody read them, or the disk was full"
            facts = {"name": record.name, "levelname": "WARNING", "msg": words}
            if not self._write(self.format(logging.makeLogRecord(facts))):
                self.lost += 1
                return
            self.lost = 0
        if not self._write(text):
            self.lost += 1

    def _write(self, text: str) -> bool:
        """Write a line and return whether all of it went out."""
        line = memoryview(("\n" * self._torn + f"{text}\n").encode(errors="replace"))
        patience = 0 if self.lost else _PATIENCE_MS
        left = len(line)
        with suppress(OSError):
            for left in _write_pieces(self._descriptor, self._room, line, patience):
                self._torn = left > 0
        return not left


class RecordStream(io.TextIOBase):
    """Stands in for `sys.stderr` where all output is JSON: each line becomes a record.

    Libraries have log handlers of their own, and some print.
    """

    def __init__(self, under: TextIO) -> None:
        self.under = under  # where records go as they are
        self._begun = ""  # of a line without its end so far

    def write(self, text: str) -> int:
        """Take text; nothing is printed until its line ends."""
        *lines, self._begun = (self._begun + text)[-_LONGEST_LINE:].split("\n")
        for line in filter(None, map(str.strip, lines)):
            say_record(line, "WARNING")
        return len(text)

    def fileno(self) -> int:
        """Return the descriptor below, for processes that inherit it."""
        return self.under.fileno()


def show_path(path: str) -> str:
    """Return a request's path for a line of the log, which it must neither end nor disguise.

    Whoever sends it chooses every character: one that is not printed is percent-encoded again.
    """
    return "".join(each if each.isprintable() else quote(each) for each in path)


def say(*lines: str) -> None:
    """Print lines for the person who started the server.

    What nobody reads within a second, and what a full disk refuses, is lost, as log records are: no
    reason not to serve, nor to be deaf to signals.
    """
    out = sys.stderr.under if isinstance(sys.stderr, RecordStream) else sys.stderr
    text = "\n".join((*lines, ""))
    with suppress(OSError):
        out.flush()
        try:
            descriptor = out.fileno()
        except io.UnsupportedOperation:  # in the place of standard error, in this process
            out.write(text)
            return
        room = select.poll()
        room.register(descriptor, select.POLLOUT)
        for _ in _write_pieces(
            descriptor, room, memoryview(text.encode(errors="replace")), _PAUSE_MS
        ):
            pass


def _write_pieces(
    descriptor: int, room: select.poll, data: memoryview, patience_ms: int
) -> Iterator[int]:
    """Write `data` until there is no room for so long; yields how many bytes are left each time.

    `room` polls the descriptor. Raises OSError.
    """
    while data and room.poll(patience_ms):
        # A pipe that has room at all takes this much without blocking.
        data = data[os.write(descriptor, data[: select.PIPE_BUF]) :]
        yield len(data)


def say_record(message: str, level: str = "INFO", **extra: object) -> None:
    """Print what a person is to know as a JSON record; no level of a logger silences it."""
    facts = {"name": "tgi_trio", "levelname": level, "msg": message, **extra}
    say(JsonFormatter().format(logging.makeLogRecord(facts)))


def set_up_logging(*, json_output: bool, levels: LogLevels) -> None:
    """Send the records of this process to standard error, from the given levels on.

    With `json_output`, what Python and libraries would print there becomes records as well, an
    exception that nobody caught a single one.
    """
    handler = DescriptorHandler(
        sys.stderr.fileno(), JsonFormatter() if json_output else TextFormatter()
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    levels.apply()
    if levels.unheard:
        names = ", ".join(levels.unheard)
        log.warning("LOG_LEVEL: nothing here answers to %s", names)
    if json_output:
        logging.captureWarnings(True)
        sys.stderr = RecordStream(sys.stderr)
        sys.excepthook = _log_uncaught
        sys.unraisablehook = _log_unraisable


def _log_uncaught(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    log.critical("the server ends by a defect", exc_info=(kind, error, traceback))


def _log_unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    error = unraisable.exc_value
    info = (unraisable.exc_type, error, unraisable.exc_traceback) if error is not None else None
    log.error("%s", unraisable.err_msg or "an exception was ignored", exc_info=info)
