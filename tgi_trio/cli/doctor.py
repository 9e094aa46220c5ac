"""`doctor`: reports what this machine has, what is missing, and how to fix it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Final, TextIO

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tgi_trio import __version__
from tgi_trio.cli.options import DoctorOptions


class FindingVerdict(Enum):
    """What a finding means for serving."""

    GOOD = "ok"
    POOR = "warn"  # the server works, but not as well as it could
    BAD = "FAIL"  # the server does not work


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    subject: str
    verdict: FindingVerdict
    found: str
    cure: str = ""  # how to fix it, unless GOOD


_PACKAGES: Final = (
    "torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "hypercorn", "quart",
    "quart-trio", "trio", "numpy", "orjson", "llguidance", "llvmlite",
)  # fmt: skip
_DESCRIPTORS: Final = 4096  # open files for a few thousand streams
_SHM: Final = 64 * 2**20  # bytes; a container's default
_DRIVER_SECONDS: Final = 30.0  # timeout of nvidia-smi


def _python() -> Finding:
    where = f"{platform.system()} {platform.machine()}"
    return Finding("python", FindingVerdict.GOOD, f"{platform.python_version()} on {where}")


def _package(name: str) -> Finding:
    needed = _find_requirement(name)
    cure = f"pip install '{name}{needed}'"
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(name, FindingVerdict.BAD, "not installed", cure)
    if not needed.contains(found, prereleases=True):
        return Finding(name, FindingVerdict.BAD, f"{found}, which is not {needed}", cure)
    return Finding(name, FindingVerdict.GOOD, found)


def _find_requirement(name: str) -> SpecifierSet:
    """Return the versions of a package that this one needs; all, where it is not installed."""
    try:
        requirements = map(Requirement, importlib.metadata.requires("tgi-trio") or ())
    except importlib.metadata.PackageNotFoundError:
        return SpecifierSet()
    wanted = canonicalize_name(name)
    always = (each for each in requirements if each.marker is None)  # the others are extras
    found = (each.specifier for each in always if canonicalize_name(each.name) == wanted)
    return next(found, SpecifierSet())


def _processor() -> Finding:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = f"{cores} usable cores, {memory / 2**30:.0f} GiB of memory"
    if cores < 2:
        cure = "router and shard share one core: give the container two"
        return Finding("processor", FindingVerdict.POOR, found, cure)
    return Finding("processor", FindingVerdict.GOOD, found)


def _accelerator() -> Finding:
    if shutil.which("nvidia-smi") is None:
        return Finding("accelerator", FindingVerdict.GOOD, "none: models are computed on the CPU")
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    cure = "look at the driver: nvidia-smi must list the devices"
    try:
        done = subprocess.run(
            query, capture_output=True, text=True, timeout=_DRIVER_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:  # as of a driver that waits for a device that fell off
        found = f"nvidia-smi has not answered for {_DRIVER_SECONDS:g} s"
        return Finding("accelerator", FindingVerdict.POOR, found, cure)
    except OSError as error:
        found = f"nvidia-smi cannot be run: {error.strerror}"
        return Finding("accelerator", FindingVerdict.POOR, found, cure)
    found = ", ".join(done.stdout.splitlines()) or done.stderr.strip() or "nvidia-smi says nothing"
    verdict = FindingVerdict.POOR if done.returncode else FindingVerdict.GOOD
    return Finding("accelerator", verdict, found, cure if done.returncode else "")


def _flash_attention() -> Finding:
    try:
        return Finding("flash-attn", FindingVerdict.GOOD, importlib.metadata.version("flash-attn"))
    except importlib.metadata.PackageNotFoundError:
        return Finding("flash-attn", FindingVerdict.GOOD, "not installed: only CUDA devices use it")


def _shared_memory() -> Finding:
    from tgi_trio.errors import SegmentError
    from tgi_trio.ipc.segment import Segment

    try:
        with Segment.create(2**20, label="doctor"):
            pass
    except SegmentError as error:
        return Finding("shared memory", FindingVerdict.BAD, "cannot be made", str(error))
    try:
        state = os.statvfs("/dev/shm")
    except OSError:
        return Finding("shared memory", FindingVerdict.GOOD, "no /dev/shm: anonymous memory serves")
    free = state.f_bavail * state.f_frsize
    found = f"{free / 2**20:,.0f} MiB free in /dev/shm"
    if free < _SHM:
        cure = "anonymous memory serves instead; docker run --shm-size 1g gives more"
        return Finding("shared memory", FindingVerdict.POOR, found, cure)
    return Finding("shared memory", FindingVerdict.GOOD, found)


def _fence() -> Finding:
    from tgi_trio.ipc.fence import choose_ordering
    from tgi_trio.ipc.litmus import holds

    ordering = choose_ordering(holds)
    return Finding(
        "memory fence", FindingVerdict.GOOD, f"{ordering.name}, proven by a race of two cores"
    )


def _death_watch() -> Finding:
    from tgi_trio.ipc import robust

    if robust.available():
        return Finding(
            "death watch", FindingVerdict.GOOD, "robust mutex: a dead shard shows within 1 ms"
        )
    cure = "glibc's robust mutexes would show a dead shard sooner"
    return Finding("death watch", FindingVerdict.POOR, "pidfd only", cure)


def _descriptors() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{hard:,} open files ({soft:,} before a server starts)"
    if hard < _DESCRIPTORS:
        cure = f"ulimit -Hn {_DESCRIPTORS}: each stream holds one"
        return Finding("descriptors", FindingVerdict.POOR, found, cure)
    return Finding("descriptors", FindingVerdict.GOOD, found)


def _port(port: int) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError as error:
            cure = "stop what listens there, or serve with another --port"
            return Finding(f"port {port}", FindingVerdict.POOR, error.strerror or str(error), cure)
    return Finding(f"port {port}", FindingVerdict.GOOD, "free")


def _hub() -> Finding:
    from huggingface_hub import constants, get_token

    from tgi_trio.hub.repository import hub_token

    found = f"cache in {constants.HF_HUB_CACHE}, "
    if hub_token() or get_token():
        return Finding("hub", FindingVerdict.GOOD, found + "with a token")
    return Finding(
        "hub", FindingVerdict.GOOD, found + "without a token: gated models need HF_TOKEN"
    )


def list_checks(options: DoctorOptions) -> Iterator[Callable[[], Finding]]:
    """Yield every check, in the order of the report."""
    yield _python
    yield from (partial(_package, name) for name in _PACKAGES)
    yield from (_processor, _accelerator, _flash_attention, _shared_memory, _fence)
    yield from (_death_watch, _descriptors, partial(_port, options.port), _hub)


def run_checks(options: DoctorOptions) -> Iterator[Finding]:
    """Yield the finding of each check as soon as it is there."""
    for check in list_checks(options):
        yield check()


def run_doctor(options: DoctorOptions) -> int:
    """Print the report to standard output; the exit code is what `doctor` returns."""
    return doctor(options, sys.stdout)


def doctor(options: DoctorOptions, output: TextIO) -> int:
    """Print the report; return 1 if something keeps the server from working."""
    print(f"tgi-trio {__version__}", file=output)
    bad = 0
    for finding in run_checks(options):
        bad += finding.verdict is FindingVerdict.BAD
        print(f"{finding.verdict.value:<5} {finding.subject:<16} {finding.found}", file=output)
        if finding.cure:
            print(f"{'':<23}{finding.cure}", file=output)
    print(
        "ready to serve" if not bad else f"{bad} things keep the server from serving", file=output
    )
    return 1 if bad else 0
