"""Endpoints of a channel leave no descriptor open, whatever happens as they are made."""

from __future__ import annotations

import errno
import gc
import os

import pytest

from tgi_trio.ipc import endpoints as endpoints_module
from tgi_trio.ipc.endpoints import Endpoints


def test_running_out_of_descriptors_leaves_none_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints_module, "_new_bell", no_descriptor)
    before = descriptors()
    with pytest.raises(OSError, match="open files"):
        Endpoints.create(0, 1)
    assert descriptors() == before


def descriptors() -> set[str]:
    """Return this process's descriptors, but for those of garbage that other tests have left."""
    gc.collect()
    return set(os.listdir("/proc/self/fd"))


def no_descriptor() -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_closing_endpoints_closes_every_descriptor() -> None:
    before = descriptors()
    with Endpoints.create(0, 1) as endpoints:
        endpoints.release_child_ends()
    del endpoints  # a mapping has a descriptor of its own, and lives as long as its views
    assert descriptors() == before
