"""Shards of a server under test, forked off a process that has imported what they import.

A server that was itself forked (`tests.support.warm_process`) has a sibling, forked off with it
before it had run anything. Instead of a new interpreter for a shard the server asks that one to
fork once more. What comes of it is the server's own child, with the command line, the environment
and the descriptors that it was to have, and runs what `python -m` would run.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any, Final

from tgi_trio.demo import model_path
from tgi_trio.ipc import spawn, waiting
from tgi_trio.ipc.parent import die_with_parent

_SHARD: Final = "tgi_trio.shard"
_OWN: Final = (
    "tgi_trio.shard.media.tower",
    "tgi_trio.shard.cpu_backend.loading",
    "tgi_trio.shard.cpu_backend.cpu_runner",
    "tgi_trio.shard.cpu_backend.verified",
    "tgi_trio.shard.torch_backend.torch_loading",
)
# What transformers imports as it builds a model: three seconds of each shard that sees images.
_MODELS: Final = ("transformers.modeling_utils", "transformers.models.auto.modeling_auto")

# What processes that decode images, videos and sounds import, without torch.
_DECODING: Final = (
    "tgi_trio.media.feature_extractors",
    "tgi_trio.media.processors",
    "tgi_trio.media.sounds",
    "tgi_trio.media.videos",
    "tgi_trio.sandbox.zygote",
    "transformers.audio_utils",
    "transformers.feature_extraction_sequence_utils",
    "transformers.image_processing_backends",
    "transformers.image_transforms",
    "av",
)

# What converts tokenizers imports, without torch as well.
_CONVERTING: Final = ("transformers.models.auto.tokenization_auto",)

# What is forked, by what is imported for it. `plain`: real ones without transformers, off whose
# process the real ones' is forked (`tests.support.warm_start`). `images`: for no server's shards,
# but for those of its processes that decode (`tests.support.warm_images`). `texts`: for what
# converts tokenizers (`tests.support.warm_conversions`).
PROGRAMS: Final = {
    **{"real": _SHARD, "plain": _SHARD, "fake": "tgi_trio.testing.fake_shard"},
    "images": "tgi_trio.media.decoding",
}
MODULES: Final = {
    "real": _MODELS,
    "plain": _OWN,
    "fake": ("tgi_trio.shard.process", "tgi_trio.testing.fake_model"),
    "images": _DECODING,
    "texts": _CONVERTING,
}
# How variables begin that Python or libraries read as they are imported: whoever is to have others
# than were there then is started anew.
_READ_EARLY: Final = (
    *("ATEN_ CUDA_ GOMP_ LD_ KERNEL_ MKL_ NUMBA_ OMP_ ONEDNN_ OPENBLAS_ PYTHON PYTORCH_ ".split()),
    *("TORCH TRITON_".split()),
)
# And those that the library of the hub reads, which transformers imports.
_READ_BY_HUB: Final = tuple("DISABLE_TELEMETRY DO_NOT_TRACK HF_ HUGGING TRANSFORMERS_".split())
# Which tests set; and a part of what `home_of_hub` finds.
_OF_NO_MATTER: Final = frozenset({"HF_HUB_DISABLE_PROGRESS_BARS", "HF_HOME"})
# Read when something is compiled; parts of torch set it themselves when a test imports them.
_READ_LATE: Final = frozenset({"TORCHINDUCTOR_CACHE_DIR"})

_ABOVE: Final = 512  # the numbers of descriptors that a shard inherits are lower
_MOST_FDS: Final = 250  # the kernel's limit is 253 a message
_LONGEST: Final = 1 << 20  # bytes of one start
_PATIENCE: Final = 120.0  # seconds
_PR_SET_CHILD_SUBREAPER: Final = 36


class ForkedShard:
    """What `subprocess.Popen` is, as far as servers ask."""

    stdin = stderr = None

    def __init__(self, pid: int, stdout: IO[bytes]) -> None:
        self.pid = pid
        self.stdout = stdout
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self) -> int | None:
        return self._reap(0)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


@dataclass(frozen=True)
class Forker:
    """What stands for the module `subprocess` where a server starts its shards."""

    control: socket.socket
    program: str  # the module that it runs

    DEVNULL = subprocess.DEVNULL
    PIPE = subprocess.PIPE
    STDOUT = subprocess.STDOUT

    def Popen(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        pass_fds: Iterable[int] = (),
        **rest: Any,
    ) -> ForkedShard | subprocess.Popen[bytes]:
        """Fork a shard whose output is a pipe; start everything else as ever."""
        places = list(pass_fds)
        piped = (rest.get("stdout"), rest.get("stderr")) == (self.PIPE, self.STDOUT)
        ours = argv[:2] == [sys.executable, "-m"] and argv[2] == self.program
        few = len(places) <= _MOST_FDS and max(places, default=0) < _ABOVE
        if ours and piped and few and (env is None or not differs(env, os.environ)):
            variables = dict(os.environ if env is None else env)
            start = {"words": argv[2:], "environment": variables, "places": places}
            with suppress(OSError):  # it has been killed, as all that is left of a server may be
                return self._fork(json.dumps(start).encode(), places)
        return subprocess.Popen(argv, env=env, pass_fds=places, **rest)

    def _fork(self, start: bytes, fds: list[int]) -> ForkedShard:
        read, write = os.pipe()
        output = open(read, "rb")  # noqa: SIM115
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(self.control, [start], [write, *fds])
            return ForkedShard(int(self.control.recv(64)), output)
        except BaseException:
            output.close()
            raise
        finally:
            libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
            os.close(write)


def prepare(kind: str) -> None:
    """Import what shards of a kind do, and load what most of the real ones compute with."""
    if kind == "texts":
        os.environ["HF_HUB_OFFLINE"] = "1"  # as conversions have it, read at the import
    if kind in ("images", "texts"):
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # as it has it itself
        sys.modules["torch"] = None  # type: ignore[assignment]
    for name in MODULES[kind]:
        import_module(name)
    if kind == "plain":  # real ones are forked off these
        from tgi_trio.shard.cpu_backend.__main__ import main

        main([str(model_path())])


def differs(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    """Return whether two environments differ in what is read early."""
    return _differ(one, other, _READ_EARLY, _READ_LATE)


def kind_for(shards: str, environment: Mapping[str, str], early: Mapping[str, str]) -> str:
    """Return the kind of what is to be forked, off a process that began with the `early` variables.

    Real shards that are to have other variables of the hub's than that are `plain` ones: nothing
    there has imported the library that reads them.
    """
    other = _differ(environment, early, _READ_BY_HUB, _OF_NO_MATTER)
    other |= home_of_hub(environment) != home_of_hub(early)
    return "plain" if other and shards == "real" else shards


def home_of_hub(environment: Mapping[str, str]) -> str:
    """Return where the library of the hub keeps its files. With that in `HF_HOME` a server may have
    another `XDG_CACHE_HOME`, and shards that are forked off a process with transformers.
    """
    base = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return environment.get("HF_HOME") or os.path.join(base, "huggingface")


def _differ(
    one: Mapping[str, str], other: Mapping[str, str], begin: tuple[str, ...], but: frozenset[str]
) -> bool:
    names = {name for name in (*one, *other) if name.startswith(begin)}
    return any(one.get(name) != other.get(name) for name in names - but)


def fork_shards(kind: str) -> bool:
    """Have this process's shards of a kind forked from here on; True in each of them.

    There `sys.argv` is the module that is to run and its words.
    """
    mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = os.getpid()
    if os.fork():
        its.close()
        mine.settimeout(_PATIENCE)
        for module in (spawn, waiting):
            vars(module)["subprocess"] = Forker(mine, PROGRAMS[kind])
        return False
    die_with_parent(server)
    os.setpgid(0, 0)  # signals for the server's group are not for this one
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    control = socket.socket(fileno=fcntl.fcntl(its, fcntl.F_DUPFD_CLOEXEC, _ABOVE))
    os.closerange(1, _ABOVE)
    for end in (its, mine):
        end.detach()
    _fork_until_the_end(control)
    return True


def _fork_until_the_end(control: socket.socket) -> None:
    """Return in every shard that the server asks for, as a child of the server."""
    while True:
        message, fds, _, _ = socket.recv_fds(control, _LONGEST, _MOST_FDS + 1)
        if not message:
            os._exit(0)
        between = os.fork()
        if between:
            os.waitpid(between, 0)
            for fd in fds:
                os.close(fd)
            continue
        between = os.getpid()
        if os.fork():
            os._exit(0)  # and its child is the server's, which takes what is left alone
        while os.getppid() == between:
            time.sleep(0.0002)
        _become(json.loads(message), fds)
        control.send(b"%d" % os.getpid())
        control.close()
        return


def _become(start: Mapping[str, Any], fds: Sequence[int]) -> None:
    """Have a shard's descriptors, variables and words."""
    os.setpgid(0, 0)  # as all starts of shards ask for
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for fd in fds]
    os.closerange(1, _ABOVE)
    for fd, place in zip((high[0], *high), (1, 2, *start["places"]), strict=True):
        os.dup2(fd, place)
    for fd in high:
        os.close(fd)
    os.environ.clear()
    os.environ.update(start["environment"])
    sys.argv = start["words"]
    show_words([sys.executable, "-m", *sys.argv])


def show_words(words: Sequence[str]) -> None:
    """Have a command line be this process's for others, as far as there is room for it."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(stat[45]), int(stat[46])
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    ctypes.memmove(begin, text[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)
