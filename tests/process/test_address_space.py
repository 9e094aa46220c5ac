"""How much address space a process may have, and what is said where it has too little."""

from __future__ import annotations

import errno
import resource

import pytest

from tests.support.warm_start import run_warm
from tgi_trio.errors import ConfigurationError
from tgi_trio.process.address_space import check_address_space, describe_failure


def limit(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Have this process see another limit of its own."""

    def getrlimit(which: int) -> tuple[int, int]:
        assert which == resource.RLIMIT_AS
        return most, most

    monkeypatch.setattr(resource, "getrlimit", getrlimit)


def test_a_server_that_cannot_be_is_refused_before_libraries_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit(monkeypatch, 400 << 20)
    with pytest.raises(ConfigurationError, match=r"may map 400 MiB, .* takes 1024 MiB .*ulimit -v"):
        check_address_space()
    for most in (2 << 30, resource.RLIM_INFINITY):
        limit(monkeypatch, most)
        check_address_space()


def test_what_says_that_memory_is_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, 2 << 30)
    for error in (MemoryError(), OSError(errno.ENOMEM, "Cannot allocate memory")):
        assert "may map 2048 MiB: raise the limit" in (describe_failure(error) or "")
    limit(monkeypatch, resource.RLIM_INFINITY)
    assert "lower --max-batch-total-tokens" in (describe_failure(MemoryError()) or "")
    assert describe_failure(OSError(errno.ENOSPC, "No space left on device")) is None
    assert describe_failure(ValueError()) is None


STARTS = """
import resource, sys
from tgi_trio.__main__ import main
resource.setrlimit(resource.RLIMIT_AS, (900 << 20, 900 << 20))
sys.exit(main(["--port", "0"]))
"""


def test_a_start_says_so() -> None:
    done = run_warm("-c", STARTS)
    assert done.returncode == 1
    assert done.stderr.startswith("tgi-trio: this process may map 900 MiB"), done.stderr
