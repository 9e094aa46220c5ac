"""How large the stacks of a process may be; where one is too small, nothing else says so."""

from __future__ import annotations

import resource
from typing import Final

from tgi_trio.errors import ConfigurationError

# Of the first thread, and of others made without a size of their own. JSON of a request may be
# nested a thousand times: 256 KiB were not enough to read it, 512 were.
_LEAST: Final = 1 << 20


def check_stack() -> None:
    """Raise ConfigurationError where a stack is so small that a request could end the process.

    The kernel would end it with a segmentation fault.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    if soft != resource.RLIM_INFINITY and soft < _LEAST:
        raise ConfigurationError(
            f"stacks may have {soft >> 10} KiB, and requests may take {_LEAST >> 10} KiB: raise "
            "the limit (`ulimit -s`, `LimitSTACK=`)"
        )
