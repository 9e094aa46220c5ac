"""Tiny checkpoints, made once per test run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.threads import one_torch_thread


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Run torch on one thread."""
    with one_torch_thread():
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function family, overrides -> folder; equal arguments share a folder."""
    made: dict[str, Path] = {}

    def make(family: str, **overrides: Any) -> Path:
        from transformers.utils import logging

        from tgi_trio.testing.checkpoints import make_checkpoint

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        key = repr((family, sorted(overrides.items(), key=repr)))
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            made[key] = make_checkpoint(folder, family, **overrides)
        return made[key]

    return make
