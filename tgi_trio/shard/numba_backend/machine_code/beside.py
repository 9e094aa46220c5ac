"""Compilation on other cores: numba compiles one kernel at a time in a process.

The very first start compiles a step's kernels and the sampler's, some seconds each, and those of
each kind of quantised weights, a second. Whoever needs them opens one after the other; meanwhile
processes of their own go through the same list from its end, and leave out what another one is at.
`python -m` of this module is such a process, which reads the list as a pickle of ours.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeAlias

from tgi_trio.ipc.parent import die_with_parent
from tgi_trio.shard.machine.cores import usable_cores
from tgi_trio.shard.machine.garbage import pause_collection
from tgi_trio.shard.numba_backend.machine_code.entry import Choice, Entry

Wanted: TypeAlias = tuple[Entry, Choice]


@contextmanager
def compile_beside(wanted: Sequence[Wanted]) -> Iterator[None]:
    """Have other processes compile what is missing of a list, from its end, during the block.

    Those that are at something end it: who needs it waits there. Nothing is run where nothing is
    missing, or no second core. Main thread only.
    """
    missing = [each for each in wanted if not each[0].is_kept(each[1])]
    helpers = min(len(missing), len(usable_cores())) - 1
    with ExitStack() as stack:
        for _ in range(helpers):
            stack.enter_context(_run_beside(pickle.dumps(missing)))
        yield


@contextmanager
def _run_beside(text: bytes) -> Iterator[None]:
    """Run a process of this module that ends with the block, or with us."""
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=partial(die_with_parent, os.getpid()),
    )
    try:
        if process.stdin is not None:
            with process.stdin as pipe:
                pipe.write(text)
        yield
    finally:
        process.kill()
        process.wait()


def compile_backwards(wanted: Sequence[Wanted]) -> None:
    """Compile what is missing, the last first, but for what others are at."""
    for entry, choice in reversed(wanted):
        entry.compile_alone(choice)


if __name__ == "__main__":
    with pause_collection():
        compile_backwards(pickle.load(sys.stdin.buffer))
