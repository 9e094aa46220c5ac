"""A test that leaves another environment behind fails.

Variables are everybody's in a process: what the next tests start has them, and what is forked for
tests is not forked where they are others. A test that came after would fail, in some orders only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Final

import pytest

# Of pytest, which sets it before each phase of a test; and of libraries, which set them when parts
# of them are imported or used. Nothing that is forked looks at these.
_OF_OTHERS: Final = frozenset(
    {
        "PYTEST_CURRENT_TEST",
        "CUBLAS_WORKSPACE_CONFIG",
        "TOKENIZERS_PARALLELISM",
        "TORCHINDUCTOR_CACHE_DIR",
    }
)
_BEFORE: Final = pytest.StashKey[dict[str, str]]()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    item.stash[_BEFORE] = dict(os.environ)
    yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Have the variables be what they were; raises AssertionError if they were not."""
    try:
        yield
    finally:
        before = item.stash[_BEFORE]
        names = changed(before, os.environ)
        for name in names:
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
    assert not names, f"the test leaves these variables changed: {', '.join(names)}"


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return the names of variables that are not what they were, but for those of others."""
    names = {*before, *after} - _OF_OTHERS
    return sorted(name for name in names if before.get(name) != after.get(name))
