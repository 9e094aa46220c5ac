"""Fixtures: both ends of a channel in one process, and real child processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tgi_trio.ipc.channel import ShardEnd
from tgi_trio.ipc.endpoints import Endpoints
from tgi_trio.ipc.router_end import ReplyBell, RouterEnd
from tgi_trio.ipc.spawn import ShardProcess, spawn_shard

CHILDREN = Path(__file__).parent / "children"
ROOT = Path(__file__).parents[2]


def attach_here(endpoints: Endpoints) -> ShardEnd:
    """Attach the shard's end in this process, on descriptors of its own."""
    spec = replace(endpoints.spec, segment=os.dup(endpoints.spec.segment))
    return ShardEnd.attach(spec.text())


@pytest.fixture
def make_endpoints() -> Iterator[Callable[..., Endpoints]]:
    """Return a factory of small channels that do not spin; closes them afterwards."""
    with ExitStack() as stack:

        def make(**options: Any) -> Endpoints:
            options = {"request_bytes": 4096, "reply_bytes": 4096, "spin_us": 0} | options
            return stack.enter_context(
                Endpoints.create(options.pop("rank", 0), options.pop("incarnation", 1), **options)
            )

        yield make


@pytest.fixture
def pair(make_endpoints: Callable[..., Endpoints]) -> Iterator[tuple[RouterEnd, ShardEnd]]:
    """Return both ends of a 4 KiB channel in this process."""
    with ReplyBell() as bell:
        endpoints = make_endpoints(reply_bell=bell.fd, full_timeout=0.02)
        with RouterEnd(endpoints, bell) as router:
            shard = attach_here(endpoints)
            yield router, shard
            shard.close()


@pytest.fixture
def spawn_child() -> Iterator[Callable[..., ShardProcess]]:
    """Return a function that starts children/NAME.py on a channel; kills them afterwards."""
    with ExitStack() as stack:

        def spawn(name: str, endpoints: Endpoints, *arguments: object, **options: Any) -> Any:
            argv = [sys.executable, str(CHILDREN / f"{name}.py"), endpoints.spec.text()]
            env = os.environ | {"PYTHONPATH": str(ROOT)}
            options = {"stdout": subprocess.PIPE} | options
            child = spawn_shard([*argv, *map(str, arguments)], endpoints, env=env, **options)
            endpoints.release_child_ends()
            return stack.enter_context(child)

        yield spawn
