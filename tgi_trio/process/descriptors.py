"""How many descriptors, sockets among them, a process may have open, and what it keeps of them."""

from __future__ import annotations

import errno
import logging
import resource
from typing import Final

from tgi_trio.errors import ConfigurationError, tell_reason

log = logging.getLogger(__name__)

# Kept for shards that are started again, files, images that are fetched, and whoever asks for
# metrics: a server whose clients have taken every descriptor could not help itself any more.
RESERVED: Final = 256

# What a server takes of its own, a few clients and the pipes of a grammar or an image among it, and
# for each rank: its channel, its end, its standard error. Measured for 1, 2, 4 and 8 ranks: the
# first answers with a grammar came at 26, 34, 48 and 80.
_LEAST: Final = 24
_LEAST_OF_A_RANK: Final = 8
_CURE: Final = "raise the hard limit (`ulimit -Hn`, `LimitNOFILE=`)"


def min_descriptors(ranks: int = 1) -> int:
    """Return how many descriptors a server of `ranks` on this machine takes at least."""
    return _LEAST + _LEAST_OF_A_RANK * ranks


def check_limit(ranks: int = 1) -> None:
    """Raise ConfigurationError where so few descriptors may be open that nothing can be served.

    `ranks`: those on this machine. To be called before anything is opened: whatever fails first
    would say less.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = min_descriptors(ranks)
    if 0 <= hard < least:  # -1: without a limit
        raise ConfigurationError(
            f"only {hard} descriptors may be open, and a server takes {least} at least: {_CURE}"
        )


def describe_failure(error: BaseException) -> str | None:
    """Return what to do about an error that says that no more may be open; None: says no such."""
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return f"no more descriptors may be open: {_CURE}"
    return None


def raise_limit() -> None:
    """Let this process open as many descriptors as it may ask for, and log how many.

    The soft limit, often 1024, protects programs that call `select`. Here none does.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # the kernel allows less by now (fs.nr_open)
        log.warning(
            "no more than %d descriptors may be open, instead of %d: %s",
            soft,
            hard,
            tell_reason(error),
        )
        return
    log.info("%d descriptors may be open, the hard limit, instead of %d", hard, soft)


def max_connections(each: int = 1) -> int:
    """Return how many clients may be connected; `each`: descriptors that one of them takes."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(1, (soft - min(RESERVED, soft // 4)) // each)
