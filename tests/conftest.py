"""What holds for every test."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, settings

from tests.support.threads import one_torch_thread
from tgi_trio.devices import has_driver

pytest_plugins = [
    "tests.support.hangs",
    "tests.support.sampled",
    "tests.support.sanitized",
    "tests.support.variables",
]

# Before anything imports Triton, as libraries do that other tests import: it then interprets.
if not has_driver():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# What Python compiles is kept, whatever an image says: tests start hundreds of processes. So are
# tests as pytest rewrites them, here: to find them all takes half the processor's time then.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Kernels are kept in one place, whatever a test says of other caches: a server that finds none
# compiles for seconds.
_CACHE = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
os.environ.setdefault("KERNEL_CACHE_DIR", os.path.join(_CACHE, "tgi-trio"))

# Threads of a team that has nothing to do sleep, here and in what tests start. By themselves they
# wait in a spin, which next to other tests took five times the processor's time of the work itself.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Code that comes with models is copied here, not among what somebody has there. It is one folder
# for all tests: with another, whatever runs such code would have to import transformers anew.
_MODULES = TemporaryDirectory(prefix="tgi-trio-modules-")
os.environ["HF_MODULES_CACHE"] = _MODULES.name

# Libraries show how far they are, for people.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

# Nothing is garbage that is there until the tests are known: to look through it again and again is
# a quarter of what finding them takes. `pytest_collection_finish` looks again.
gc.disable()

# Tests assert behaviour, never wall-clock times: a busy machine must not fail a property.
SLOW = [HealthCheck.too_slow]
# In CI the examples are always the same: a commit is judged by itself, not by the luck of the draw.
settings.register_profile(
    "shared-machine",
    deadline=None,
    suppress_health_check=SLOW,
    derandomize=bool(os.environ.get("CI")),
)
settings.load_profile("shared-machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse names that differ between processes which run tests beside each other."""
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid} has an address in its name: give it ids")


def pytest_collection_finish() -> None:
    """Look for garbage again, but not among the modules and the tests: they stay."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Have a test draw the numbers that it draws alone, whichever tests came before it."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def cores_for_all_workers() -> Iterator[None]:
    """With tests beside these, torch has one thread: the others of a team would wait in a spin."""
    if "PYTEST_XDIST_WORKER" in os.environ and "torch" in sys.modules:
        with one_torch_thread():
            yield
    else:
        yield
