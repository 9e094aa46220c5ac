"""What `tests.support.warm_start` talks to: it has imported what a server imports, and forks per
start."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import json
import os
import selectors
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from runpy import run_module
from types import ModuleType
from typing import Any

from tests.support import warm_children
from tgi_trio.ipc.parent import die_with_parent

# All that a router imports; no torch, which it does without. Not `tgi_trio.__main__`: that is run.
MODULES = (
    "tgi_trio.cli.bench",
    "tgi_trio.cli.chat",
    "tgi_trio.cli.files",
    "tgi_trio.cli.front",
    "tgi_trio.cli.parser",
    "tgi_trio.cli.rank",
    "tgi_trio.cli.shard",
    "tgi_trio.hub.resolve",
    "tgi_trio.launcher",
    "tgi_trio.model.facts",
    "tgi_trio.router.assembly",
    "tgi_trio.settings.resolve",
    "tgi_trio.process.signals",
    "tgi_trio.start.checks",
)
# What huggingface_hub imports; it is imported by whoever uses it, as it reads variables then.
LIBRARIES = ("anyio", "filelock", "httpx", "httpx2", "yaml")  # which of the two, its version says
LONGEST = 1 << 20  # bytes of one start: its words and its environment
MOST_FDS = 16
ABOVE = 512  # the numbers of descriptors that are given on are lower
_CLONE_NEWNET = 0x40000000


def main() -> None:
    """Become one process per start that is asked for, until nobody is there to ask.

    Words: the descriptor of who asks; which shards of servers can be forked as well; and anything,
    whose place the words of those take that are forked. It may itself have been forked so, for
    shards that import more.
    """
    control, shards = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    early = dict(os.environ)
    ending = Ending()
    if len(sys.argv) > 3:  # else what this was forked off has done it
        atexit.register(ending.leave)  # before all others: it is called after them
    if shards in ("images", "texts"):
        if not control.recv(1, socket.MSG_PEEK):  # many tests need none
            return
    else:
        for name in MODULES:
            import_module(name)
        for name in LIBRARIES:
            with suppress(ImportError):
                import_module(name)
    warm_children.prepare(shards)
    gc.freeze()
    parent = os.getpid()
    with ending:
        if (start := next_start(control)) is not None:
            become(*start, parent, early)


class Ending:
    """Ends a process that has done its work without taking apart what it was forked with.

    To look through all that has been imported would have the kernel copy it, which took more of the
    processor's time than starting and serving. Threads have ended by then, what was to be called at
    exit has been called, and output is written. What fails otherwise than by `sys.exit` ends as
    ever.
    """

    def __init__(self) -> None:
        self._code: int | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        code = error.code if isinstance(error, SystemExit) else error
        if code is None or isinstance(code, int):
            self._code = code or 0

    def leave(self) -> None:
        """Write what is left to write, and be gone."""
        if self._code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self._code & 0xFF)


@dataclass(frozen=True)
class Child:
    """A process that was forked; it is reaped when its end has been told and nobody asks more."""

    pid: int
    handle: int  # the descriptor of the process
    asker: socket.socket

    def tell(self, number: int) -> None:
        """Send a number, whether or not somebody still waits for it."""
        with suppress(OSError):
            self.asker.send(b"%d" % number)

    def tell_end(self) -> None:
        """Send the exit code; until it is reaped, nobody else can have its number."""
        ended = os.waitid(os.P_PIDFD, self.handle, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        killed = ended.si_code != os.CLD_EXITED
        self.tell(-ended.si_status if killed else ended.si_status)


def next_start(control: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return a start and its descriptors, in a fork made for it; None, here, at the very end."""
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is not None:
                    see_end(selector, key.fd, key.data)
                    continue
                message, fds, _, _ = socket.recv_fds(control, LONGEST, MOST_FDS)
                if not message:
                    return None
                pid = os.fork()
                if pid == 0:
                    return json.loads(message), fds
                child = Child(pid, os.pidfd_open(pid), socket.socket(fileno=fds.pop()))
                for fd in fds:
                    os.close(fd)
                child.tell(pid)
                selector.register(child.handle, selectors.EVENT_READ, child)
                selector.register(child.asker, selectors.EVENT_READ, child)


def see_end(selector: selectors.BaseSelector, fd: int, child: Child) -> None:
    """Take note that a child has ended, or that nobody asks for it any more."""
    selector.unregister(fd)
    if fd == child.handle:
        child.tell_end()
        os.close(fd)
    else:
        child.asker.close()
    watched = selector.get_map().values()
    if not any(key.data is child for key in watched):
        os.waitpid(child.pid, 0)


def become(start: dict[str, Any], fds: list[int], parent: int, early: dict[str, str]) -> None:
    """Run what was asked for as `python -m` or `python -c` does.

    `early`: the variables that were there at the imports.
    """
    os.setsid()
    die_with_parent(parent)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where tests run under `nohup`
    high = place_descriptors(fds, [0, 1, 2, *start["places"]])
    os.environ.clear()
    os.environ.update(start["environment"])
    os.chdir(start["folder"])
    if start["network"]:
        enter_network(start["network"])
    option, what, *words = start["arguments"]
    warm_children.show_words([sys.executable, *start["arguments"]])
    same = not warm_children.differs(early, os.environ)
    if start["shards"] and same and warm_children.fork_shards(start["shards"]):
        option, (what, *words) = "-m", sys.argv
    elif start["shards"]:
        control = socket.socket(fileno=high[0])
        import_module("tests.support.warm_images").fork_decoders(lambda: control, early)
    if option == "-m":
        sys.argv = [what, *words]
        run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [option, *words]
        sys.modules["__main__"] = module = ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), vars(module))


def place_descriptors(fds: list[int], places: list[int]) -> list[int]:
    """Have descriptors under the numbers of `places`, and no others but what is behind those.

    Returns these, which have high numbers and are not given on.
    """
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, ABOVE) for fd in fds]
    kept = high[len(places) :]
    for fd, place in zip(high, places, strict=False):
        os.dup2(fd, place)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in (*places, *kept):
            with suppress(OSError):  # what the folder was listed with
                os.close(number)
    return kept


def enter_network(name: str) -> None:
    """Have the network of a name that `ip netns` has given; raises OSError."""
    handle = os.open(f"/var/run/netns/{name}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(handle, _CLONE_NEWNET):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), name)
    finally:
        os.close(handle)


if __name__ == "__main__":
    main()
