"""A server process under test."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx

from tests.support.warm_start import WarmProcess, start_warm
from tests.system.client import NO_TLS, get
from tgi_trio.ipc.parent import die_with_parent
from tgi_trio.testing.ports import reserve_port

# Seconds after which something hangs; however busy the machine, whatever is alive has come by then.
READY_TIMEOUT = 240.0
PATIENCE = 120.0

SECRET = "0123456789abcdef"  # of the cluster that `demo` belongs to


class ServerProcess:
    """`python -m tgi_trio` on a port of its own, its output kept in a file."""

    def __init__(
        self,
        flags: Sequence[str],
        port: int,
        output: Path,
        fake: str | None = None,
        env: Mapping[str, str] | None = None,
        cold: bool = False,
    ) -> None:
        module = ["tgi_trio"] if fake is None else ["tgi_trio.testing.fake_server", fake]
        argv = ["-m", *module, "--hostname", "127.0.0.1", "--port", str(port), *flags]
        variables = {**os.environ, **(env or {})}
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.process: WarmProcess | subprocess.Popen[bytes]
        self._output = output
        with output.open("wb") as sink:
            if cold:
                self.process = subprocess.Popen(
                    [sys.executable, *argv],
                    stdout=sink,
                    stderr=subprocess.STDOUT,
                    env=variables,
                    start_new_session=True,
                    # a test run that is killed leaves no server behind
                    preexec_fn=partial(die_with_parent, os.getpid()),
                )
            else:
                out, shards = sink.fileno(), "real" if fake is None else "fake"
                self.process = start_warm(argv, out, out, environment=variables, shards=shards)

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def wait_ready(self, verify: ssl.SSLContext = NO_TLS) -> None:
        """Wait until /health is green; the output is shown when that does not happen."""
        deadline = time.monotonic() + READY_TIMEOUT
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"exited with {self.process.returncode}:\n{self.output}")
            try:
                if httpx.get(f"{self.url}/health", timeout=5, verify=verify).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise AssertionError(f"not ready in {READY_TIMEOUT:g} s:\n{self.output}")

    def shards(self) -> list[int]:
        """Return the process ids of its shards."""
        return shards_of(self.process.pid)

    def metrics(self) -> dict[str, float]:
        """Return every series of /metrics by its name and labels."""
        lines = get(f"{self.url}/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def metric(self, name: str) -> float:
        """Return the value of one series of /metrics."""
        return self.metrics()[name]

    def books(self) -> tuple[float, float]:
        """Return (accepted, finished + cancelled + failed)."""
        return balance(self.metrics())

    def wait_idle(self, timeout: float = PATIENCE) -> None:
        """Wait until every block is free and every accepted request has ended."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            now = self.metrics()
            free, total = now["tgi_kv_blocks_free"], now["tgi_kv_blocks_total"]
            cached = now["tgi_prefix_cache_blocks"]
            accepted, ended = balance(now)
            slots = now["tgi_state_slots_total"] - now["tgi_state_slots_free"]
            idle = slots == now["tgi_state_snapshots"] and accepted == ended
            if free + cached == total and idle:
                return
            time.sleep(0.05)
        raise AssertionError(f"{free} free + {cached} cached of {total}; {accepted} vs {ended}")

    def wait_metric(self, name: str, least: float, timeout: float = PATIENCE) -> None:
        """Wait until a series has reached a value; only for those that never fall again."""
        deadline = time.monotonic() + timeout
        while (value := self.metric(name)) < least:
            assert time.monotonic() < deadline, f"{name} is {value:g}, not yet {least:g}"
            time.sleep(0.01)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Stop the shards for the length of the block: who is accepted in it meets the others.

        Shorter than `--stall-timeout`, which the server under test should set high.
        """
        stopped = self.shards()
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = PATIENCE) -> int:
        return self.process.wait(timeout)


def balance(metrics: Mapping[str, float]) -> tuple[float, float]:
    """Return (accepted, finished + cancelled + failed) of a server's series."""
    ended = metrics["tgi_request_finished"] + metrics["tgi_request_failed"]
    for phase in ("queue", "prefill", "decode"):
        ended += metrics[f'tgi_request_cancelled{{phase="{phase}"}}']
    return metrics["tgi_request_accepted"], ended


def children(pid: int) -> list[int]:
    """Return the direct children of a process, zombies too.

    By what each process says of its parent: of the lists that the kernel keeps by thread none has a
    child whose thread ends while they are read.
    """
    found: list[int] = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with suppress(OSError):  # it has ended meanwhile
                parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
                found += [int(process.name)] if int(parent) == pid else []
    return found


def shards_of(pid: int) -> list[int]:
    """Return the direct children of a process that are shards."""
    kinds = ("_trio.shard ", "fake_shard ")
    return [child for child in children(pid) if any(kind in command(child) for kind in kinds)]


def command(pid: int) -> str:
    """Return the command line of a process, "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def alive(pid: int) -> bool:
    """Return whether a process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def wait_gone(pids: Sequence[int], timeout: float = PATIENCE) -> list[int]:
    """Return those of `pids` that still run after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


@contextmanager
def serving(
    *flags: str,
    ready: bool = True,
    fake: str | None = None,
    env: Mapping[str, str] | None = None,
    cold: bool = False,
) -> Iterator[ServerProcess]:
    """Run a server for the length of the block; whatever is left of it is killed at the end.

    `fake`: FakeSettings as JSON, for a server whose shard has no model. `env`: more variables.
    `cold`: in a new interpreter, as users start it. Otherwise its shards compute with one thread
    where `flags` do not say how many: next to other tests a team waits more than it computes.
    """
    if not (cold or fake is not None or "--cpu-threads" in flags):
        flags = ("--cpu-threads", "1", *flags)
    with tempfile.TemporaryDirectory() as folder, reserve_port() as port:
        server = ServerProcess(flags, port, Path(folder) / "output", fake, env, cold)
        try:
            if ready:
                server.wait_ready()
            yield server
        finally:
            if server.process.poll() is None:
                server.signal(signal.SIGTERM)
                try:
                    server.wait(60)
                except subprocess.TimeoutExpired:
                    server.process.kill()
                    server.wait()
