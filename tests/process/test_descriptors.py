"""How many descriptors a process may have, and how many of them are for clients."""

from __future__ import annotations

import errno
import logging
import resource

import pytest

from tgi_trio.errors import ConfigurationError
from tgi_trio.process.descriptors import (
    RESERVED,
    check_limit,
    describe_failure,
    max_connections,
    raise_limit,
)


class Limits:
    """A process's limits, soft and hard, in place of this one's."""

    def __init__(self, soft: int, hard: int, allowed: int = 2**30) -> None:
        self.soft, self.hard, self.allowed = soft, hard, allowed

    def getrlimit(self, which: int) -> tuple[int, int]:
        assert which == resource.RLIMIT_NOFILE
        return self.soft, self.hard

    def setrlimit(self, which: int, limits: tuple[int, int]) -> None:
        if limits[1] > self.allowed:
            raise ValueError("not allowed to raise maximum limit")
        self.soft, self.hard = limits


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Limits:
    made = Limits(1024, 20_000)
    monkeypatch.setattr(resource, "getrlimit", made.getrlimit)
    monkeypatch.setattr(resource, "setrlimit", made.setrlimit)
    return made


def test_as_many_as_the_process_may_ask_for(
    limits: Limits, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        raise_limit()
        assert limits.soft == limits.hard == 20_000
        assert "20000" in caplog.text and "1024" in caplog.text
        raise_limit()
        assert len(caplog.messages) == 1, "nothing more can be had"


def test_what_the_kernel_refuses_is_done_without(
    limits: Limits, caplog: pytest.LogCaptureFixture
) -> None:
    limits.allowed = 10_000
    raise_limit()
    assert limits.soft == 1024
    assert [each.levelname for each in caplog.records] == ["WARNING"]


@pytest.mark.parametrize(
    ("soft", "each", "expected"),
    [(20_000, 1, 20_000 - RESERVED), (20_000, 2, 9872), (100, 1, 75), (1, 1, 1)],
)
def test_some_are_no_clients(limits: Limits, soft: int, each: int, expected: int) -> None:
    limits.soft = soft
    assert max_connections(each) == expected


@pytest.mark.parametrize(("ranks", "least"), [(1, 32), (2, 40), (4, 56), (8, 88)])
def test_too_few_to_serve_at_all_are_refused(limits: Limits, ranks: int, least: int) -> None:
    limits.soft, limits.hard = 3, least
    check_limit(ranks)
    limits.hard = least - 1
    with pytest.raises(ConfigurationError, match=rf"{least - 1} descriptors .* {least} .*ulimit"):
        check_limit(ranks)


def test_an_error_of_too_many_open_says_which_limit_to_raise() -> None:
    told = describe_failure(OSError(errno.EMFILE, "Too many open files"))
    assert told is not None and "ulimit -Hn" in told
    assert describe_failure(OSError(errno.ENOENT, "No such file")) is None
    assert describe_failure(ValueError()) is None
