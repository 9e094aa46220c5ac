"""A rank of a server under test that runs beside it, as on another machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tests.support.warm_start import WarmProcess, start_warm

SECRET = "0123456789abcdef0123"


def write_secret(folder: Path) -> Path:
    """Write the cluster's secret to a file of `folder`."""
    path = folder / "secret"
    path.write_text(SECRET)
    path.chmod(0o600)
    return path


def running_rank(
    leader: str, rank: int, secret: Path, *, network: str = ""
) -> AbstractContextManager[WarmProcess]:
    """Run `python -m tgi_trio rank` for the length of the block.

    `network`: the name of another one that it is to have, as `ip netns` has it.
    """
    return _running(["rank", "--leader", leader, "--rank", str(rank)], secret, network)


def running_shard(
    address: str, secret: Path, *, network: str = ""
) -> AbstractContextManager[WarmProcess]:
    """Run `python -m tgi_trio shard` for the length of the block, as `running_rank` does."""
    return _running(["shard", "--listen", address], secret, network)


@contextmanager
def _running(command: Sequence[str], secret: Path, network: str) -> Iterator[WarmProcess]:
    argv = ["-m", "tgi_trio", *command, "--cluster-secret-file", str(secret)]
    # What it says is said here.
    process = start_warm(argv, 1, 2, network=network, shards="real")
    try:
        yield process
    finally:
        process.terminate()
        process.wait(60)
