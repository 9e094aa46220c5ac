"""Runs modules as `python -m` does, each in a process forked off one that has imported the most of
what they import: that would take each of them seconds. So are their servers, of another one.

`python -m` of it reads a line of JSON per run: the module, its arguments and the files for what it
prints, and the seconds that it may take. It answers with the exit code.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO

# What they have in common. Only imports: a process with threads must not be forked.
import bench.harness.server
import bench.harness.stats
import bench.model.bare  # on the first of a name, for all of it
import tgi_trio.client.load
import tgi_trio.shard.cpu_backend.verified
import tgi_trio.shard.torch_backend.torch_loading  # noqa: F401
from tests.support.warm_start import WarmProcess, start_warm
from tgi_trio.ipc.parent import die_with_parent


def main() -> None:
    """Fork until there are no more lines; whoever is forked off returns as the module does."""
    ours = os.getpid()
    # So that all of them have the same ones to fork servers off.
    for shards in ("plain", "fake"):
        start_warm(["-c", ""], 2, 2, shards=shards).wait()
    plain = bench.harness.server.start_process

    def start_process(
        command: Sequence[str | Path],
        output: int | IO[bytes] | None,
        environment: Mapping[str, str],
    ) -> bench.harness.server.Process:
        """Do what the harness does, sooner where it is a module of ours."""
        program, option, *words = map(str, command)
        if (program, option) != (sys.executable, "-m"):
            return plain(command, output, environment)
        return start_forked([option, *words], output, {**os.environ, **environment})

    bench.harness.server.start_process = start_process
    while line := sys.stdin.readline():
        child = os.fork()
        if not child:
            die_with_parent(ours)
            return run(**json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def start_forked(
    arguments: Sequence[str], output: int | IO[bytes] | None, environment: Mapping[str, str]
) -> WarmProcess:
    """Run `python ARGUMENTS`, forked off a process that has imported what a server imports."""
    with ExitStack() as stack:
        if output == subprocess.DEVNULL:
            output = stack.enter_context(open(os.devnull, "wb"))
        target = 1 if output is None else output if isinstance(output, int) else output.fileno()
        shards = "fake" if "tgi_trio.testing.fake_server" in arguments else "plain"
        return start_warm(arguments, target, target, environment=environment, shards=shards)


def run(module: str, arguments: Sequence[str], output: str, errors: str, seconds: int) -> None:
    """Be the process of a module; raises what it raises."""
    signal.alarm(seconds)  # which ends it
    for path, stream in ((os.devnull, 0), (output, 1), (errors, 2)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), stream)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
