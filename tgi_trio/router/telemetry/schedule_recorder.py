"""--record-schedule: records scheduling decisions as a trace for `scheduling.trace.replay`.

The event loop only appends lines to a list; a thread writes them. Both the unwritten lines and the
file are limited in size. A trace with a gap cannot be replayed, so recording ends at either limit,
and the file remains a valid trace of the server's first hours.
"""

from __future__ import annotations

import logging
import secrets
from io import FileIO
from pathlib import Path

import trio

from tgi_trio.errors import ConfigurationError, tell_reason
from tgi_trio.router.scheduling.limits import SchedulingLimits
from tgi_trio.router.scheduling.trace import RecordingScheduler
from tgi_trio.whole_files import write_whole

log = logging.getLogger(__name__)

MAX_WAITING = 64 << 20  # most bytes not yet written; more means that the disk has stalled
MAX_FILE = 4 << 30  # bytes
_PAUSE_S = 0.2  # seconds between two writes


class ScheduleRecorder:
    """Takes lines without waiting, and writes them to a file."""

    def __init__(
        self, path: Path, max_waiting: int = MAX_WAITING, max_file: int = MAX_FILE
    ) -> None:
        self._path = path
        self._max_waiting = max_waiting
        self._max_file = max_file
        self._lines: list[str] = []
        self._waiting = 0
        self._size = 0  # bytes written or waiting
        self._ended = False

    def scheduler(self, limits: SchedulingLimits) -> RecordingScheduler:
        """Return a recorded scheduler; token ids are obfuscated by a random number."""
        return RecordingScheduler(limits, self.write, veil=secrets.randbits(30) | 1)

    def write(self, line: str) -> None:
        """Take a line without waiting; ends the recording when a limit is reached."""
        if self._ended:
            return
        if self._waiting + len(line) > self._max_waiting or self._size + len(line) > self._max_file:
            self._ended = True
            log.warning("%s is complete at %d bytes: recording has ended", self._path, self._size)
            return
        self._lines.append(line)
        self._waiting += len(line)
        self._size += len(line)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Write until cancelled, then write what is left.

        Raises ConfigurationError if the file cannot be created.
        """
        try:
            file = self._path.open("wb", buffering=0)  # what a full disk refuses is not kept
        except OSError as error:
            raise ConfigurationError(
                f"--record-schedule {self._path} cannot be written: {error.strerror}"
            ) from error
        with file:
            task_status.started()
            try:
                while True:
                    await trio.sleep(_PAUSE_S)
                    await self._flush(file)
            finally:
                await self._flush(file)

    async def _flush(self, file: FileIO) -> None:
        lines, self._lines = self._lines, []
        self._waiting = 0
        if not lines:
            return
        try:
            # Not cancelled when the server stops, as half a line could then follow another half.
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(lambda: write_whole(file, "".join(lines).encode()))
        except OSError as error:
            self._ended = True
            self._lines.clear()
            log.warning("recording has ended: %s: %s", self._path, tell_reason(error))
