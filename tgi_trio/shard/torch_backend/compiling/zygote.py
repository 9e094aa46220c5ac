"""A process that imports Triton once, and forks the compiler processes of `compilers.py`.

`python -m ...zygote <target as JSON> <descriptors>`: a socket for each child. Every line from a
socket is a kernel as Triton describes it (`specialization_data`), which the child compiles into
Triton's cache on disk. The answer is a line of JSON: what went wrong, or null. No device is needed
or used. Everything ends when standard input does, which the parent holds open.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NoReturn

from tgi_trio.errors import PeerGone
from tgi_trio.ipc.parent import die_with_parent
from tgi_trio.shard.torch_backend.compiling.kernel_keys import hash_compiler, settle_key

# Triton imports these when it compiles, which takes a core a sixth of a second.
_USED_BY_ALL: Final = ("triton.compiler.code_generator", "triton.experimental.gluon.language")
LOCKS: Final = "being-compiled"  # beside Triton's own files


def main(argv: Sequence[str]) -> NoReturn:
    """Serve every socket in a child process until standard input ends."""
    target, *places = argv
    os.setpgid(0, 0)
    gc.disable()  # this process lives for seconds
    _aim_at(json.loads(target))
    sockets = [socket.socket(fileno=int(place)) for place in places]
    here, children = os.getpid(), []
    while sockets:
        with sockets.pop() as own:
            child = os.fork()
            if child == 0:
                _serve(own, here, sockets)
            children.append(child)
    sys.stdin.buffer.read()
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    os.killpg(0, signal.SIGKILL)  # assemblers that the children ran, and this process
    raise RuntimeError("killed, and alive")


def _aim_at(target: Sequence[Any]) -> None:
    """Have Triton compile for `target`, the arguments of a `GPUTarget`, whatever device is here."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime import driver

    aim = GPUTarget(*target)
    driver.set_active(SimpleNamespace(get_current_target=lambda: aim, get_current_device=lambda: 0))
    # Each child would have to do this for its first kernel.
    hash_compiler()
    make_backend(aim).hash()  # runs the assembler to get its version
    for name in _USED_BY_ALL:
        with suppress(ImportError):  # depends on Triton's version
            importlib.import_module(name)


def _serve(own: socket.socket, parent: int, others: Sequence[socket.socket]) -> NoReturn:
    """Compile the kernels that arrive through a socket, then end this process."""
    try:
        die_with_parent(parent)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), sys.stdin.fileno())
        for other in others:
            other.close()
        with own.makefile("rb") as lines:
            for line in lines:
                own.sendall(json.dumps(_compile(line.decode().strip())).encode() + b"\n")
    except (PeerGone, ConnectionError):
        pass  # the other side has gone
    finally:
        os._exit(0)


def _compile(data: str) -> str | None:
    """Compile a kernel; return what went wrong, None if nothing did."""
    try:
        module, _, name = json.loads(data)["name"].rpartition(".")
        function = getattr(importlib.import_module(module), name)
        settle_key(function)
        with alone_with(data):
            function.preload(data)
    except Exception as error:  # a compiler's defects, too; the caller may compile it itself
        return f"{type(error).__name__}: {error}"
    return None


@contextmanager
def alone_with(data: str) -> Iterator[None]:
    """Hold the lock of a kernel in Triton's cache, so that nobody else compiles it meanwhile.

    The ranks of a machine need the same kernels at the same time; the second one to take the lock
    finds the kernel in the cache. A lock is a byte of one file and is released when its process
    ends. On a file system without locks, every process compiles.
    """
    from triton import knobs

    place = int.from_bytes(hashlib.sha256(data.encode()).digest()[:7])
    folder = Path(knobs.cache.dir)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / LOCKS, "ab") as file:
        with suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_EX, 1, place)
        yield


if __name__ == "__main__":
    main(sys.argv[1:])
