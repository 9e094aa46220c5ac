"""The process that has Triton loaded, and forks a child of itself for each of `compilers.py`.

`python -m ...zygote <target as JSON> <descriptors>`: each of a socket, one a child. Every
line that comes through one is a kernel as Triton describes it (`specialization_data`), which the
child compiles into Triton's cache on disk; the line that goes back says what went wrong, in JSON:
null where nothing did. No device is needed for that, and none is looked at. All of it ends when
standard input does, which whoever asks holds open.
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
from tgi_trio.shard.torch_backend.compiling.kernel_keys import settle_key, sum_compiler

# Which Triton imports as it compiles: a sixth of a second of a processor.
_USED_BY_ALL: Final = ("triton.compiler.code_generator", "triton.experimental.gluon.language")
LOCKS: Final = "being-compiled"  # beside Triton's own files


def main(argv: Sequence[str]) -> NoReturn:
    """Serve every socket by a child until standard input ends."""
    target, *places = argv
    os.setpgid(0, 0)
    gc.disable()  # this ends within seconds
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
    os.killpg(0, signal.SIGKILL)  # assemblers that they ran, and this process
    raise RuntimeError("killed, and alive")


def _aim_at(target: Sequence[Any]) -> None:
    """Have Triton compile for a `target`, by its three words, whatever device is here."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime import driver

    aim = GPUTarget(*target)
    driver.set_active(SimpleNamespace(get_current_target=lambda: aim, get_current_device=lambda: 0))
    # What the first kernel of each child would have to begin with.
    sum_compiler()
    make_backend(aim).hash()  # asks its assembler for its version
    for name in _USED_BY_ALL:
        with suppress(ImportError):  # by its version
            importlib.import_module(name)


def _serve(own: socket.socket, parent: int, others: Sequence[socket.socket]) -> NoReturn:
    """Compile what comes through a socket, and end this process."""
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
        pass  # nobody is left to tell
    finally:
        os._exit(0)


def _compile(data: str) -> str | None:
    """Compile a kernel; return what went wrong."""
    try:
        module, _, name = json.loads(data)["name"].rpartition(".")
        function = getattr(importlib.import_module(module), name)
        settle_key(function)
        with alone_with(data):
            function.preload(data)
    except Exception as error:  # defects of compilers, too: whoever asks may compile it himself
        return f"{type(error).__name__}: {error}"
    return None


@contextmanager
def alone_with(data: str) -> Iterator[None]:
    """Have nobody else compile a kernel for the same cache meanwhile.

    The ranks of a machine ask for the same ones at the same time; who comes second finds what the
    first has made. A lock is a byte of one file and ends with the process that has it; where the
    file system knows none, kernels are compiled by all.
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
