"""Real clients against real servers on the embedded model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.system.server import ServerProcess, serving

KEY = "a-key-of-the-test"


@pytest.fixture(scope="session")
def served() -> Iterator[ServerProcess]:
    """A server as it starts without flags."""
    with serving() as server:
        yield server


@pytest.fixture(scope="session")
def guarded() -> Iterator[ServerProcess]:
    """A server that asks for a key, has room for one request, and goes by a name of its own."""
    flags = ("--api-key", KEY, "--max-concurrent-requests", "1", "--served-model-name", "mine")
    # 900 tokens take 90 s, on any machine: who is there is still there when the next one comes
    with serving(*flags, fake='{"step_ms": 100}') as server:
        yield server


@pytest.fixture
def openai(served: ServerProcess) -> Iterator[OpenAI]:
    """A client that shows every error instead of trying again."""
    with OpenAI(base_url=f"{served.url}/v1", api_key="-", max_retries=0) as client:
        yield client
