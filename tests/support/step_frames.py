"""STEP frames out of reports, as a shard would send them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np

from tgi_trio.ipc.messages import StepReport
from tgi_trio.shard.loop.reply_frames import StepFrames


def encode_report(report: StepReport, max_bytes: int) -> Iterator[bytes]:
    """Yield the frames of a report, each of `max_bytes` at most."""
    words: dict[str, int] = {}
    columns: dict[str, Any] = {}
    for field in fields(report):
        value = getattr(report, field.name)
        if not isinstance(value, list):
            words[field.name] = value
        elif value:
            columns[field.name] = np.array(value)
    return iter(StepFrames().encode(words, columns, max_bytes))
