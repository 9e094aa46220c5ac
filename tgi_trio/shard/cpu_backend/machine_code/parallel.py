"""Parallel compilation in several processes: Python writes LLVM's instructions one by one.

The very first start compiles the kernels of a step and of the sampler, some seconds each, and those
of each kind of quantised weights, a second each. The loading process opens them one after the
other. Meanwhile helper processes work through the same list from its end, and skip what another one
is compiling. `python -m` of this module is such a process; it reads the list as a pickle that we
wrote.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeAlias

from tgi_trio.ipc.parent import die_with_parent
from tgi_trio.ipc.shard_output import warn
from tgi_trio.shard.cpu_backend.machine_code.entry import Choice, Entry
from tgi_trio.shard.cpu_backend.machine_code.store import find_folder
from tgi_trio.shard.machine.cores import usable_cores
from tgi_trio.shard.machine.garbage import pause_collection

Kernel: TypeAlias = tuple[Entry, Choice]


@contextmanager
def compile_in_parallel(
    wanted: Sequence[Kernel], report: Callable[[str], None] = warn
) -> Iterator[None]:
    """Have other processes compile the missing part of a list, from its end, during the block.

    They are killed when the block ends. Nothing is started if nothing is missing, or without a
    second core. Main thread only. `report` is told of kernels that the block has not left in the
    store.
    """
    missing = [each for each in wanted if not each[0].is_kept(each[1])]
    helpers = min(len(missing), len(usable_cores())) - 1
    with ExitStack() as stack:
        for _ in range(helpers):
            stack.enter_context(_run_beside(pickle.dumps(missing)))
        yield
    if lost := [each for each in missing if not each[0].is_kept(each[1])]:
        report(
            f"{len(lost)} of {len(wanted)} compiled kernels could not be kept in {find_folder()}, "
            "so that each start compiles them, for many seconds: the disk, or a quota, may be full"
        )


@contextmanager
def _run_beside(text: bytes) -> Iterator[None]:
    """Run a helper process, which ends with the block, or with us."""
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


def compile_backwards(wanted: Sequence[Kernel]) -> None:
    """Compile missing kernels, last first, but skip those that others are compiling."""
    for entry, choice in reversed(wanted):
        entry.compile_alone(choice)


if __name__ == "__main__":
    with pause_collection():
        compile_backwards(pickle.load(sys.stdin.buffer))
