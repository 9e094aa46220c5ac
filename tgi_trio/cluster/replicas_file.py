"""The file of replicas' addresses, one a line, which is watched for changes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from tgi_trio.cluster.replica_http import check_address
from tgi_trio.errors import ConfigurationError
from tgi_trio.file_watch import watch_files
from tgi_trio.whole_files import SMALL, read_text_file

log = logging.getLogger(__name__)


def read_replicas(path: Path) -> list[str]:
    """Return the addresses in a file; empty lines and comments (`#`) are skipped.

    Raises ConfigurationError, which names the line.
    """
    try:
        lines = read_text_file(path, SMALL).splitlines()
    except OSError as error:
        raise ConfigurationError(
            f"--replicas-file {path} cannot be read: {error.strerror}"
        ) from error
    except UnicodeError:
        raise ConfigurationError(f"--replicas-file {path} cannot be read: it is no UTF-8") from None
    names = []
    for number, line in enumerate(lines, 1):
        name = line.partition("#")[0].strip()
        if name:
            try:
                check_address(name)
            except ValueError as error:
                raise ConfigurationError(
                    f"--replicas-file {path}, line {number}: {error}"
                ) from None
            names.append(name)
    return names


async def watch_replicas(path: Path, take: Callable[[list[str]], None]) -> None:
    """Call `take` with the addresses whenever the file has changed, until cancelled.

    While the file cannot be read, or has a bad line, the replicas stay as they are.
    """

    def read_again() -> None:
        try:
            names = read_replicas(path)
        except ConfigurationError as error:
            log.warning("%s; the replicas stay as they are", error)
        else:
            take(names)

    await watch_files((path,), read_again)
