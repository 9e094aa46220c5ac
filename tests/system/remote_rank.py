"""A rank of a server under test that runs beside it, as on another machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

from tests.warm_start import WarmProcess, start_warm
from tgi_trio.ipc.parent import die_with_parent

SECRET = "0123456789abcdef0123"


def write_secret(folder: Path) -> Path:
    """Write the cluster's secret to a file of `folder`."""
    path = folder / "secret"
    path.write_text(SECRET)
    path.chmod(0o600)
    return path


def running_rank(
    leader: str, rank: int, secret: Path, *, within: Sequence[str] = ()
) -> AbstractContextManager[WarmProcess | subprocess.Popen[bytes]]:
    """Run `python -m tgi_trio rank` for the length of the block.

    `within`: what comes before the command, such as `ip netns exec NAME`.
    """
    return _running(["rank", "--leader", leader, "--rank", str(rank)], secret, within)


def running_shard(
    address: str, secret: Path, *, within: Sequence[str] = ()
) -> AbstractContextManager[WarmProcess | subprocess.Popen[bytes]]:
    """Run `python -m tgi_trio shard` for the length of the block, as `running_rank` does."""
    return _running(["shard", "--listen", address], secret, within)


@contextmanager
def _running(
    command: Sequence[str], secret: Path, within: Sequence[str]
) -> Iterator[WarmProcess | subprocess.Popen[bytes]]:
    argv = ["-m", "tgi_trio", *command, "--cluster-secret-file", str(secret)]
    process: WarmProcess | subprocess.Popen[bytes]
    if within:
        process = subprocess.Popen(
            [*within, sys.executable, *argv], preexec_fn=partial(die_with_parent, os.getpid())
        )
    else:
        process = start_warm(argv, 1, 2, shards="real")  # what it says is said here
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)
