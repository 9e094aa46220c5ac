"""The ways a reply can take: every behaviour must be the same on each."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from tgi_trio.router.http.call import HttpSettings

PATHS = {
    "direct": HttpSettings(),
    "plain": HttpSettings(direct_writes=False),
    "quart": HttpSettings(shortcut=False),
}


@pytest.fixture(params=PATHS)
def http(request: pytest.FixtureRequest) -> HttpSettings:
    """Settings of one way through the application."""
    return PATHS[request.param]


@pytest.fixture
def patient_clock() -> trio.testing.MockClock:
    """Time that goes on where nothing else does, whatever the machine is busy with.

    Where it seems so for a moment, a packet may be on its way: it is waited for.
    """
    return trio.testing.MockClock(autojump_threshold=0.01)
