"""Keys that are exchanged while the server runs."""

from __future__ import annotations

import logging
from collections.abc import Callable

from tgi_trio.errors import ConfigurationError
from tgi_trio.file_watch import watch_files
from tgi_trio.settings.keys import Keys

log = logging.getLogger(__name__)


async def watch_keys(
    source: Keys, known: tuple[str, ...], take: Callable[[tuple[str, ...]], None]
) -> None:
    """Give `take` all keys whenever those of the file are others than `known`, until cancelled.

    While it cannot be read, or holds none, the keys stay as they are: a server that asks for a key
    never stops asking.
    """
    if source.file is None:
        return

    def read_again() -> None:
        nonlocal known
        try:
            keys = source.read()
        except ConfigurationError as error:
            log.warning("%s; the keys stay as they are", error)
            return
        if keys != known:
            known = keys
            take(keys)
            log.info(
                "--api-key-file %s has changed: keys that open now: %d", source.file, len(keys)
            )

    await watch_files((source.file,), read_again)
