"""Tests whose kernels run under the sanitizer: a few always, all with SANITIZE=1. A plugin.

    make test-sanitized ARGS=tests/shard/torch_backend/test_selecting.py

A test fails for what its launches are found to do, see `tgi_trio/testing/sanitizer/`; harmless
things are printed, which `-rP` shows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from tgi_trio.testing.sanitizer.sanitizer import Sanitizer

_EVERY: Final = os.environ.get("SANITIZE", "") not in ("", "0")
_ROOM: Final = "tests/shard/"
_COMPANY: Final = "tests/company/test_device.py"  # whose rows leave while steps are in flight
_KERNELS: Final = f"{_ROOM}torch_backend/"
_STATES: Final = f"{_KERNELS}states/"
# A kind of kernel each, and a model from its loading on. Few, as launches run three or four times.
ALWAYS: Final = (
    f"{_KERNELS}test_selecting.py::test_nothing_is_left_out_of_a_row_that_is_short",
    f"{_KERNELS}test_routing_kernel.py::test_many_programs_share_the_lists[deepseek_v3]",
    f"{_KERNELS}test_lookup_kernel.py::test_a_step_that_is_repeated_is_written_again",
    f"{_KERNELS}test_fused_kernels.py::test_heads[as they are-rotated-torch.float32]",
    f"{_STATES}test_ngram_kernels.py::test_it_adds_what_torch_adds[decodes-2-2",
    f"{_STATES}test_recurrence_kernels.py::"
    "test_a_row_of_no_numbers_leaves_its_neighbours_alone[Mamba-2]",
    f"{_KERNELS}test_device_families.py::test_it_says_what_it_says_on_the_cpu[qwen3_moe]",
)
# Tests that put something else in the place of a kernel: another reads what it has not written.
_NEVER: Final = (
    f"{_KERNELS}test_coded_products.py::test_all_variants_are_compiled",
    f"{_KERNELS}test_sanitizer.py",  # has its own
)


def is_watched(test: str) -> bool:
    """Return whether the kernels of a test, given by its id, run under the sanitizer."""
    chosen = test.startswith((_ROOM, _COMPANY) if _EVERY else ALWAYS)
    return chosen and not test.startswith(_NEVER)


@pytest.fixture(scope="module", autouse=True)
def sanitizing(request: pytest.FixtureRequest) -> Iterator[Sanitizer | None]:
    """Watch what a module launches, its fixtures included, if all tests are to be watched."""
    if not (_EVERY and is_watched(request.node.nodeid) and _interprets()):
        yield None
        return
    with _make_sanitizer() as sanitizer:
        yield sanitizer


@pytest.fixture(autouse=True)
def sanitized(request: pytest.FixtureRequest, sanitizing: Sanitizer | None) -> Iterator[None]:
    """Watch the test's launches, if there is an interpreter that can be watched."""
    watched = is_watched(request.node.nodeid)
    if sanitizing is None and not (watched and _interprets()):
        yield
        return
    with ExitStack() as stack:
        sanitizer = sanitizing or stack.enter_context(_make_sanitizer())
        stack.enter_context(sanitizer.host())
        yield
    for note in sanitizer.findings.notes.values():
        print("harmless:", note)
    sanitizer.findings.notes.clear()
    found = sanitizer.findings.take()
    if found and watched:
        pytest.fail("\n".join(map(str, found)), pytrace=False)


def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@contextmanager
def _make_sanitizer() -> Iterator[Sanitizer]:
    pytest.importorskip("triton")
    from tgi_trio.testing.sanitizer.sanitizer import Sanitizer

    sanitizer = Sanitizer()
    with sanitizer.on():
        yield sanitizer
