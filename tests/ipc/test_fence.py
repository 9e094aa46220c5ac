"""Fences: the litmus that shows what they are for, and the fallback when one does not work."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tgi_trio.errors import SegmentError
from tgi_trio.ipc import fence, litmus
from tgi_trio.ipc.doorbell import affordable_spin_us
from tgi_trio.ipc.fence import choose_ordering, find_ordering, orderings
from tgi_trio.ipc.segment import Segment

two_cores = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="reordering needs two cores"
)


@two_cores
@pytest.mark.parametrize("name", [o.name for o in orderings() if o.full is not None])
def test_a_fence_keeps_stores_before_loads(name: str) -> None:
    outcome = litmus.run(find_ordering(name), rounds=50_000, seconds=1.0)
    assert outcome.rounds > 0
    assert outcome.reordered == 0


@two_cores
def test_without_a_fence_loads_overtake_stores() -> None:
    """The control: if this fails, the litmus proves nothing on this machine."""
    for _ in range(60):  # seldom more than one attempt; other load can keep the sides apart
        if litmus.run(fence.Ordering("none", None, None), rounds=100_000, seconds=2.0).reordered:
            return
    pytest.fail("no reordering in sixty runs without a fence")


def test_a_fence_that_fails_the_self_test_is_not_used() -> None:
    best = orderings()[0].name
    assert choose_ordering(lambda ordering: True).name == best
    assert choose_ordering(lambda ordering: ordering.name != best).name != best
    last = choose_ordering(lambda ordering: False)
    assert last.name == orderings()[-1].name
    assert litmus.holds(fence.Ordering("none", None, None)) is False


def test_one_core_shows_nothing_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert litmus.run(orderings()[0], rounds=10, seconds=1.0) == (0, 0, 0)


_INTERRUPTED = """
import logging, os, signal
from tgi_trio.ipc import litmus
from tgi_trio.ipc.fence import orderings
logging.basicConfig()
with litmus.partner_ahead():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.killpg(0, signal.SIGINT)
    print(litmus.holds(orderings()[0]))
"""


@two_cores
def test_ctrl_c_does_not_mean_the_partner() -> None:
    """A terminal sends it to all of its foreground: the fence seemed not to work."""
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED],
        capture_output=True, text=True, timeout=60, process_group=0, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


@two_cores
def test_a_litmus_without_a_partner_counts_as_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(litmus, "_MODULE", "this")
    monkeypatch.setattr(litmus, "_PATIENCE_S", -1.0)
    assert not litmus.holds(orderings()[0])


def test_who_has_stood_still_itself_does_not_blame_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy machine: the partner comes while this side is kept from looking."""
    words = memoryview(bytearray(8 * 1024)).cast("Q")
    looks = []

    def clock() -> float:
        looks.append(1)
        if len(looks) == 2:
            words[litmus._READY[1]] = 2
        return 1000.0 * len(looks)

    monkeypatch.setattr(litmus, "time", SimpleNamespace(monotonic=clock))
    litmus._meet(words, 0, 2, lambda: False)
    assert len(looks) == 2


@two_cores
def test_what_a_partner_prints_is_logged(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(litmus, "_MODULE", "no_such_module")
    monkeypatch.setattr(litmus, "_PATIENCE_S", 3600.0)  # one that has ended is not waited for
    assert not litmus.holds(orderings()[0])
    (line,) = caplog.messages
    assert line.startswith("fence test | ") and "no_such_module" in line
    assert capfd.readouterr().err == ""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """Return the partners that are started from now on."""
    found: list[subprocess.Popen[bytes]] = []

    def start(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        found.append(popen(*args, **options))
        return found[-1]

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    return found


@two_cores
def test_a_partner_may_be_started_ahead(started: list[subprocess.Popen[bytes]]) -> None:
    with litmus.partner_ahead():
        assert len(started) == 1
        assert litmus.holds(orderings()[0])
        assert len(started) == 1
        assert started[0].returncode is not None
        assert litmus.holds(orderings()[0])  # there is none any more
        assert len(started) == 2


@two_cores
def test_a_partner_that_nobody_needs_is_ended(
    started: list[subprocess.Popen[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyError), litmus.partner_ahead():
        assert started[0].poll() is None
        raise KeyError
    assert started[0].returncode is not None
    assert caplog.messages == []
    assert litmus.holds(orderings()[0])
    assert len(started) == 2


@two_cores
def test_a_partner_that_cannot_be_started_ahead_is_missed_where_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def create(size: int, label: str) -> Segment:
        raise SegmentError("no memory")

    monkeypatch.setattr(Segment, "create", create)
    with litmus.partner_ahead(), pytest.raises(SegmentError):
        litmus.holds(orderings()[0])


def test_arm_uses_libatomic_and_fences_publication_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence, "_libatomic_fence", lambda: lambda: None)
    (only,) = orderings("aarch64")
    assert only.name == "libatomic"
    assert only.publish is not None


def test_arm_without_libatomic_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence, "_libatomic_fence", lambda: None)
    with pytest.raises(RuntimeError, match="libatomic1"):
        orderings("aarch64")
    assert [o.name for o in orderings("x86_64")] == ["lock", "none"]


def test_an_unknown_ordering_becomes_the_most_careful_one() -> None:
    assert find_ordering("membarrier").name == orderings()[-1].name


def test_nobody_spins_when_cores_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert affordable_spin_us(50, 1) == 50
    assert affordable_spin_us(50, 2) == 0
