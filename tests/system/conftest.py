"""One server on the embedded model for all tests that do it no harm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.system.server import ServerProcess, serving


@pytest.fixture(scope="session")
def demo() -> Iterator[ServerProcess]:
    with serving() as server:
        yield server
