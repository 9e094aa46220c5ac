"""The ways a reply can take: every behaviour must be the same on each."""

from __future__ import annotations

import pytest

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
