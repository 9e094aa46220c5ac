"""Why a process could not be started: of what the machine, or its limits, had none left."""

from __future__ import annotations

from tgi_trio.errors import tell_reason
from tgi_trio.process import descriptors, thread_limit


def tell_shortage(error: BaseException) -> str:
    """Return why a process could not be started, and which limit to raise if it is one."""
    return (
        descriptors.describe_failure(error)
        or thread_limit.describe_failure(error)
        or tell_reason(error)
    )
