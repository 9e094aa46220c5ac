"""`python -m ...compiler_zygote <parent's process id> <target as JSON> <descriptors>`.

The process that has Triton loaded, and forks a child of itself for each socket: `compilers.py`.
Every line that comes through one is a kernel as Triton describes it (`specialization_data`), which
the child compiles into Triton's cache on disk; the line that goes back says what went wrong, in
JSON: null where nothing did. No device is needed for that, and none is looked at.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, NoReturn

from tgi_trio.errors import PeerGone
from tgi_trio.ipc.parent import die_with_parent
from tgi_trio.shard.torch_backend.kernel_keys import settle_key


def main(argv: Sequence[str]) -> int:
    """Serve every socket by a child until it closes; returns the process's exit code."""
    parent, target, *places = argv
    try:
        die_with_parent(int(parent))
    except PeerGone:
        return 0
    gc.disable()  # this ends within seconds
    _aim_at(json.loads(target))
    sockets = [socket.socket(fileno=int(place)) for place in places]
    here = os.getpid()
    while sockets:
        with sockets.pop() as own:
            if os.fork() == 0:
                _serve(own, here, sockets)
    with suppress(ChildProcessError):
        while True:
            os.wait()
    return 0


def _aim_at(target: Sequence[Any]) -> None:
    """Have Triton compile for a `target`, by its three words, whatever device is here."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    aim = GPUTarget(*target)
    driver.set_active(SimpleNamespace(get_current_target=lambda: aim, get_current_device=lambda: 0))
    with suppress(ImportError):  # where it is depends on Triton's version; each child would do it
        from triton.runtime.cache import triton_key

        triton_key()


def _serve(own: socket.socket, parent: int, others: Sequence[socket.socket]) -> NoReturn:
    """Compile what comes through a socket, and end this process."""
    try:
        die_with_parent(parent)
        for other in others:
            other.close()
        with own.makefile("rb") as lines:
            for line in lines:
                own.sendall(json.dumps(_compile(line.decode())).encode() + b"\n")
    except (PeerGone, ConnectionError):
        pass  # nobody is left to tell
    finally:
        os._exit(0)


def _compile(data: str) -> str | None:
    """Compile a kernel; return what went wrong."""
    try:
        module, _, name = json.loads(data)["name"].rpartition(".")
        function = getattr(importlib.import_module(module), name)
        settle_key(function)
        function.preload(data)
    except Exception as error:  # defects of compilers, too: whoever asks may compile it himself
        return f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
