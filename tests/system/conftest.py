"""One server on the embedded model for all tests that do it no harm."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.system.server import SECRET, ServerProcess, serving


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    secret = tmp_path_factory.mktemp("cluster") / "secret"
    secret.write_text(SECRET)
    with serving("--cluster-secret-file", str(secret), cold=True) as server:
        yield server
