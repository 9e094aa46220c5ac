"""Copies from pinned memory: it is left alone until the device has read it.

A stand-in copies at once, a device when its stream comes to it. Only an event that was recorded
behind the copy, and has been waited for, tells that it has been read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final, NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tgi_trio.testing.sanitizer.findings import Finding, Findings
from tgi_trio.testing.stand_in_device import StandInDevice
from tgi_trio.testing.stand_in_driver import Event

_MOST: Final = 256  # copies that are followed; older ones are checked when others come


class _Sent(NamedTuple):
    """A copy in flight."""

    number: int
    source: torch.Tensor
    content: torch.Tensor


class _Thread(threading.local):
    """The copies to the device of a thread."""

    def __init__(self) -> None:
        self.number = 0
        self.sent = list[_Sent]()


class Sending:
    """Watches copies to stand-ins, once `patched`."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._own = _Thread()

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Watch everything inside the block."""
        send, wait = StandInDevice._send, StandInDevice.wait
        record, ask, synchronise = Event.record, Event.query, Event.synchronize

        def on_send(own: Any, source: torch.Tensor, quiet: bool) -> None:
            send(own, source, quiet)
            if quiet and own._is_pinned(source):
                self._add(source)

        def on_wait(own: Any, why: str) -> None:
            wait(own, why)
            self._check(self._own.number)

        def on_record(own: Any, stream: object = None) -> None:
            record(own, stream)
            own.sent = self._own.number

        def on_question(own: Any) -> bool:
            reached = ask(own)
            if reached:
                self._check(getattr(own, "sent", 0))
            return reached

        def on_synchronise(own: Any) -> None:
            self._check(getattr(own, "sent", 0))
            synchronise(own)

        with ExitStack() as stack:
            for owner, name, value in (
                (StandInDevice, "_send", on_send),
                (StandInDevice, "wait", on_wait),
                (Event, "record", on_record),
                (Event, "query", on_question),
                (Event, "synchronize", on_synchronise),
            ):
                stack.enter_context(mock.patch.object(owner, name, value))
            yield

    def _add(self, source: torch.Tensor) -> None:
        self._own.number += 1
        with _disable_current_modes():
            self._own.sent.append(_Sent(self._own.number, source, source.clone()))
        if len(self._own.sent) > _MOST:
            self._check(self._own.sent[0].number)

    def _check(self, upto: int) -> None:
        """Report what has changed of the first copies, which have been read by now."""
        left = list[_Sent]()
        for each in self._own.sent:
            if each.number > upto:
                left.append(each)
                continue
            with _disable_current_modes():
                same = torch.equal(each.source.view(torch.uint8), each.content.view(torch.uint8))
            if not same:
                shape, dtype = tuple(each.source.shape), each.source.dtype
                what = f"pinned memory {shape}, {dtype} is overwritten before it has been read"
                self._findings.add(Finding("pinned", "copy", "", "", what))
        self._own.sent = left
