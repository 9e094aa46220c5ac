"""Scheduling: pure state machines. No trio, no torch, no clock, no input or output."""

from __future__ import annotations

from tgi_trio.router.scheduling.limits import SchedulingLimits
from tgi_trio.router.scheduling.scheduler import Scheduler
from tgi_trio.router.scheduling.shard_commands import (
    Command,
    Copy,
    Extend,
    Filter,
    Limits,
    Prefill,
    Progress,
)

__all__ = [
    "Command",
    "Copy",
    "Extend",
    "Filter",
    "Limits",
    "Prefill",
    "Progress",
    "Scheduler",
    "SchedulingLimits",
]
