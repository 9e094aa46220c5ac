"""Faults are told before the STEP that covers them, and acknowledgements only grow."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from tgi_trio.ipc.frame_codec import Frame
from tgi_trio.ipc.frames import FrameKind
from tgi_trio.ipc.messages import decode_step
from tgi_trio.shard.loop.image_queue import ImageQueue
from tgi_trio.shard.loop.reporting import Reporter


class Wire:
    """Keeps what is sent."""

    writer = SimpleNamespace(max_payload=1 << 16)

    def __init__(self) -> None:
        self.frames: list[Frame] = []

    def send(self, payload: bytes | memoryview) -> None:
        self.frames.append(Frame(memoryview(payload)))


@pytest.fixture
def queue() -> ImageQueue:
    return ImageQueue(None, None, 0)


@pytest.fixture
def wire() -> Wire:
    return Wire()


@pytest.fixture
def copies() -> SimpleNamespace:
    """Copies between device and host, of which none is over."""
    return SimpleNamespace(copied=0)


@pytest.fixture
def reports(wire: Wire, queue: ImageQueue, copies: SimpleNamespace) -> Reporter:
    return Reporter(wire, queue, SimpleNamespace(transfers=copies))  # type: ignore[arg-type]


def test_faults_are_told_once_and_before_the_step_that_covers_them(
    wire: Wire, reports: Reporter
) -> None:
    reports.add_fault(7, "cannot be run")
    reports.send(3, {}, {"step": 1})
    reports.send(4, {}, {"step": 2})
    assert [frame.kind for frame in wire.frames] == [
        FrameKind.FAULT,
        FrameKind.STEP,
        FrameKind.STEP,
    ]
    assert [frame.word("acknowledged") for frame in wire.frames] == [3, 3, 4]


def test_what_was_acknowledged_stays_so_when_an_older_step_is_settled(
    wire: Wire, reports: Reporter
) -> None:
    reports.send(9, {}, {"step": 1})
    reports.send(5, {}, {"step": 2, "held": 1})
    assert [decode_step(frame).acknowledged for frame in wire.frames] == [9, 9]


def know(reports: Reporter, queue: ImageQueue) -> None:
    pass


def fail(reports: Reporter, queue: ImageQueue) -> None:
    reports.add_fault(1, "no")


def see(reports: Reporter, queue: ImageQueue) -> None:
    queue.seen[1, 0] = 25


@pytest.mark.parametrize(
    ("happen", "applied", "stalled", "news"),
    [
        (know, 4, 2, False),
        (know, 5, 2, True),
        (know, 4, 1, True),
        (know, 4, 0, True),
        (fail, 4, 2, True),
        (see, 4, 2, True),
    ],
)
def test_it_is_news_only_until_it_has_been_told(
    wire: Wire,
    reports: Reporter,
    queue: ImageQueue,
    happen: Callable[[Reporter, ImageQueue], None],
    applied: int,
    stalled: int,
    news: bool,
) -> None:
    reports.send(4, {}, {"stalled_rows": 2})
    happen(reports, queue)
    assert reports.has_news(applied, stalled) is news
    reports.send(applied, {}, {"stalled_rows": stalled})
    assert not reports.has_news(applied, stalled)
    seen = wire.frames[-1].column("seen_ns")
    np.testing.assert_array_equal(seen, [25] if happen is see else [])


def test_copies_that_are_over_are_told_once(
    wire: Wire, reports: Reporter, copies: SimpleNamespace
) -> None:
    assert not reports.has_news(0, 0)
    copies.copied = 5
    assert reports.has_news(0, 0)
    reports.send(0, {}, {"step": 1})
    assert not reports.has_news(0, 0)
    assert decode_step(wire.frames[-1]).copied == 5
    copies.copied = 0  # a warm-up has begun anew
    assert reports.has_news(0, 0)
