"""What tests of ranks on other machines share: a secret, a child that lives, and waiting for it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import trio

from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.router.shards.shard_instance import ShardArgv

SECRET = b"sixteen letters and more"
REQUEST = WarmupRequest(64, 256, 4, 256)

# A rank that says what it was told, and lives until it is killed.
_CHILD = """
import sys, time
from tgi_trio.ipc.death import start_shard_end
from tgi_trio.ipc.shard_settings import ShardSettings
end = start_shard_end(sys.argv[1])
end.beat(7, 3)
open(sys.argv[3] + str(ShardSettings.parse(sys.argv[2]).rank), "w").write(sys.argv[2])
time.sleep(300)
"""


def telling(path: Path) -> ShardArgv:
    """Return the command of a rank that writes its settings to `path`, its number behind that."""
    return lambda spec, settings: [sys.executable, "-c", _CHILD, spec, settings, str(path)]


async def wait_for_file(path: Path) -> ShardSettings:
    """Return what a rank of `telling` was told."""
    with trio.fail_after(60):
        while not path.exists() or not path.read_text():
            await trio.sleep(0.01)
    return ShardSettings.parse(path.read_text())


async def wait_until_gone(pid: int) -> None:
    """Return when no process has this number any more."""
    with trio.fail_after(60), pytest.raises(ProcessLookupError):
        while True:
            os.kill(pid, 0)
            await trio.sleep(0.01)
