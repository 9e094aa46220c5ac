"""API keys: those of flags, and those of a file, which may change at run time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tgi_trio.errors import ConfigurationError
from tgi_trio.whole_files import SMALL, read_text_file


def check_key(text: str) -> str:
    """Return a key unchanged; it may contain commas and spaces. Raises ValueError.

    The error is the end of a sentence and does not contain the key.
    """
    if not text:
        raise ValueError("expected a key")
    if text != text.rstrip() or not text.isprintable():
        raise ValueError(
            "expected a key that a header can carry: no control characters, no space at its end"
        )
    return text


@dataclass(frozen=True, slots=True)
class Keys:
    """The sources of keys."""

    given: tuple[str, ...] = ()  # from flags and environment variables
    file: Path | None = None  # of `--api-key-file`

    def read(self) -> tuple[str, ...]:
        """Return all keys, with the present ones of the file. Raises ConfigurationError."""
        return self.given if self.file is None else self.given + read_key_file(self.file)


def read_key_file(path: Path) -> tuple[str, ...]:
    """Return the keys of a file, one per line, without white space around them.

    They are never shown. Raises ConfigurationError, also for a file without keys, as that would
    leave the server open to everybody.
    """
    try:
        lines = read_text_file(path, SMALL).splitlines()
    except OSError as error:
        raise ConfigurationError(
            f"--api-key-file {path} cannot be read: {error.strerror}"
        ) from error
    except UnicodeError:
        raise ConfigurationError(f"--api-key-file {path} cannot be read: it is no UTF-8") from None
    try:
        keys = tuple(check_key(key) for line in lines if (key := line.strip()))
    except ValueError as error:
        raise ConfigurationError(f"--api-key-file {path}: {error}") from None
    if not keys:
        raise ConfigurationError(f"--api-key-file {path} holds no key: write one per line")
    return keys
