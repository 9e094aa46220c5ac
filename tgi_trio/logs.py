"""Logging set-up: one line of text or one JSON object per record, on standard error."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from datetime import UTC, datetime

import orjson

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


def say(*lines: str) -> None:
    """Print lines for the person who started the server.

    On a full disk they are lost, as log records are: no reason not to serve.
    """
    with suppress(OSError):
        print(*lines, sep="\n", file=sys.stderr, flush=True)


def set_up_logging(*, json_output: bool, level: str = "INFO") -> None:
    """Send our records to standard error; other libraries speak from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if json_output else TextFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("tgi_trio").setLevel(level.upper())
