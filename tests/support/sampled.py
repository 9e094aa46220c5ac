"""Tests that say much the same of many cases: some are in the suite. A plugin of pytest.

`sampled(n, first=0)`: every nth case is, from `first` on, and all others are marked `thorough`.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without thorough tests where no others are wanted.

    Most files have none, and to import them takes a process longer than to import the rest.
    """
    if config.getoption("markexpr") != "thorough" or collection_path.suffix != ".py":
        return None
    return None if may_be_thorough(collection_path) else True


def may_be_thorough(file: Path) -> bool:
    """Return whether tests of a file may be marked `thorough`."""
    text = file.read_text(encoding="utf-8")
    return "mark.sampled" in text or "mark.thorough" in text


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of `sampled` tests that only `make test-thorough` runs.

    Raises UsageError for a mark that comes from another file: a thorough case would not be found.
    """
    counts, known = Counter[str](), dict[Path, bool]()
    for item in items:
        if (sampled := item.get_closest_marker("sampled")) is None:
            continue
        if item.path not in known:
            known[item.path] = may_be_thorough(item.path)
        if not known[item.path]:
            raise pytest.UsageError(f"{item.nodeid} is sampled, but not by its own file")
        test = item.nodeid.partition("[")[0]
        (every,) = sampled.args
        if (counts[test] - sampled.kwargs.get("first", 0)) % every:
            item.add_marker(pytest.mark.thorough)
        counts[test] += 1
