"""How much address space a process may have; where there is too little, nothing else says so."""

from __future__ import annotations

import errno
import resource
from typing import Final

from tgi_trio.errors import ConfigurationError

# With the smallest model. Measured: 400 MB were not enough, 1500 were.
_LEAST: Final = 1 << 30


def check_address_space() -> None:
    """Raise ConfigurationError where so little may be mapped that nothing can be served.

    To be called before libraries are imported: they end the process, each in words of its own.
    """
    limit = _limit()
    if limit is not None and limit < _LEAST:
        raise ConfigurationError(
            f"this process may map {limit >> 20} MiB, and a server takes {_LEAST >> 20} MiB beside "
            "its model at least: raise the limit (`ulimit -v`, `LimitAS=`)"
        )


def describe_failure(error: Exception) -> str | None:
    """Return what to do about an error if it says that there is no more memory; None: it does not.

    `error`: a MemoryError, or an OSError of a call that maps some.
    """
    if not isinstance(error, MemoryError) and getattr(error, "errno", None) != errno.ENOMEM:
        return None
    limit = _limit()
    if limit is not None:
        return (
            f"there is no more memory, and this process may map {limit >> 20} MiB: raise the limit "
            "(`ulimit -v`, `LimitAS=`)"
        )
    return (
        "there is no more memory: lower --max-batch-total-tokens, or serve a smaller model or one "
        "with weights of fewer bits (--quantize)"
    )


def _limit() -> int | None:
    """Return how many bytes this process may map; None: as many as there are."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft
