"""How large the stacks of a process may be, and what is said where they are too small."""

from __future__ import annotations

import resource

import pytest

from tests.support.warm_start import run_warm
from tgi_trio.errors import ConfigurationError
from tgi_trio.process.stack_size import check_stack


@pytest.mark.parametrize("most", [1 << 20, 8 << 20, resource.RLIM_INFINITY])
def test_stacks_that_suffice(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (most, most))
    check_stack()


def test_stacks_that_a_request_would_overflow_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (256 << 10, 8 << 20))
    with pytest.raises(ConfigurationError, match=r"have 256 KiB, .* take 1024 KiB.*ulimit -s"):
        check_stack()


STARTS = """
import resource, sys
from tgi_trio.__main__ import main
_, hard = resource.getrlimit(resource.RLIMIT_STACK)
resource.setrlimit(resource.RLIMIT_STACK, (256 << 10, hard))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "words",
    [("--port", "0"), ("front", "--port", "0", "--replica", "127.0.0.1:1")],
    ids=["serve", "front"],
)
def test_a_start_says_so(words: tuple[str, ...]) -> None:
    done = run_warm("-c", STARTS, *words)
    assert done.returncode == 1
    assert done.stderr.startswith("tgi-trio: stacks may have 256 KiB"), done.stderr
