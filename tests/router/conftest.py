"""What decodes images and converts tokenizers for routers in this process is forked."""

from __future__ import annotations

import pytest

from tests.support.warm_conversions import fork_conversions
from tests.support.warm_images import fork_decoders
from tests.support.warm_start import EARLY, way_to


@pytest.fixture(scope="session", autouse=True)
def forked_decoders() -> None:
    fork_decoders(lambda: way_to("images"), EARLY)


@pytest.fixture(scope="session", autouse=True)
def forked_conversions() -> None:
    fork_conversions()
