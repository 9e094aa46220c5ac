"""How many threads and processes may be started; where there is none to be had, little says so."""

from __future__ import annotations

import errno
import threading
from typing import Final

from tgi_trio.errors import ConfigurationError

# Measured on two cores, with the smallest model: eight were not enough, twelve were.
_LEAST: Final = 16
_MORE: Final = 4  # for each further rank

CURE: Final = (
    "raise the limit of threads and processes (`ulimit -u`, `TasksMax=`, a container's "
    "`--pids-limit`)"
)


def check_threads(ranks: int) -> None:
    """Raise ConfigurationError where a server of `ranks` shards could not start its threads.

    They are started for a moment, as no limit tells how much of it others use. To be called before
    libraries are imported: they end the process, or go on and fail later.
    """
    needed = _LEAST + _MORE * (ranks - 1)
    done = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(needed):
            thread = threading.Thread(target=done.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        raise ConfigurationError(
            f"only {len(started)} threads and processes can be started, and a server takes "
            f"{needed} at least: {CURE}"
        ) from error
    finally:
        done.set()
        for thread in started:
            thread.join()


def describe_failure(error: BaseException) -> str | None:
    """Return what to do about an error that says that there are too many; None: it says no such.

    `error`: a RuntimeError of `threading`, or an OSError of a call that starts a process.
    """
    no_thread = isinstance(error, RuntimeError) and str(error) == "can't start new thread"
    if no_thread or getattr(error, "errno", None) == errno.EAGAIN:
        return f"no more threads or processes can be started: {CURE}"
    return None
