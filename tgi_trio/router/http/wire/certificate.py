"""A TLS certificate that may be renewed while the server runs."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from tgi_trio.errors import ConfigurationError
from tgi_trio.file_watch import watch_files
from tgi_trio.process.sockets import tls_context
from tgi_trio.whole_files import SMALL, read_file

log = logging.getLogger(__name__)


class Certificate:
    """The certificate in --ssl-certfile and --ssl-keyfile, and the TLS context that uses it."""

    def __init__(self, certfile: Path | str, keyfile: Path | str | None) -> None:
        """Raises ConfigurationError if the pair cannot be used."""
        self._paths = [Path(each) for each in (certfile, keyfile) if each is not None]
        self.context: ssl.SSLContext  # for new connections
        self.context, self._content = self._read()

    def _read(self) -> tuple[ssl.SSLContext, list[bytes]]:
        try:
            content = [read_file(path, SMALL) for path in self._paths]
        except OSError:
            content = []  # the next line reports the error
        return tls_context(self._paths[0], self._paths[-1]), content

    async def watch(self) -> None:
        """Reload the files whenever they hold another pair, until cancelled.

        While they cannot be used or do not match, as in the middle of a renewal, the old pair is
        served. Existing connections keep theirs.
        """
        await watch_files(self._paths, self._read_again)

    def _read_again(self) -> None:
        try:
            context, content = self._read()
        except ConfigurationError as error:
            log.warning("%s; what was read before is served", error)
            return
        if content != self._content:
            self.context, self._content = context, content
            log.info("--ssl-certfile %s has changed: new connections get it", self._paths[0])
