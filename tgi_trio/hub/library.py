"""huggingface_hub as it is used here: nothing is told of this machine, and no wait is for ever."""

from __future__ import annotations

import logging
import os
from typing import Any


def import_huggingface_hub() -> Any:
    """Import the package: a third of a second, which most starts do not need to spend.

    It tells the hub nothing of this machine then, unless HF_HUB_DISABLE_TELEMETRY has it do so. For
    each part of an answer it waits HF_HUB_ETAG_TIMEOUT seconds, or as long as it says itself.
    """
    import huggingface_hub
    from huggingface_hub import constants

    # We promise that nothing is reported to anyone. Not by the variable: that would be everybody's
    # in this process, and comes too late where the package has been imported.
    if "HF_HUB_DISABLE_TELEMETRY" not in os.environ:
        vars(constants)["HF_HUB_DISABLE_TELEMETRY"] = True
    _bound_waits(huggingface_hub.get_session())
    if logging.getLogger().handlers:  # what it writes by itself, as well, would be there twice
        logging.getLogger("huggingface_hub").handlers.clear()
    return huggingface_hub


def _bound_waits(session: Any) -> None:
    """Give a limit to requests without one, as it makes them for lists of files.

    A hub that takes a connection and says nothing would hold a start for good, even where all is in
    the cache.
    """
    hooks = session.event_hooks
    if _set_limit not in hooks["request"]:
        session.event_hooks = {**hooks, "request": [*hooks["request"], _set_limit]}


def _set_limit(request: Any) -> None:
    from huggingface_hub import constants

    if not any((request.extensions.get("timeout") or {}).values()):
        waits = ("connect", "read", "write", "pool")
        request.extensions["timeout"] = dict.fromkeys(waits, constants.HF_HUB_ETAG_TIMEOUT)
