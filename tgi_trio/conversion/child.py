"""Conversions for the rest of the project, each in a process of its own, within limits.

The process gets no secrets, and no more CPU time and memory than weights of that size need, so a
malicious file costs only an error message. No third-party import here.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tgi_trio.errors import ModelLoadError

log = logging.getLogger("tgi_trio.conversion")

_SECONDS: Final = 120  # of CPU time, however small the files are
_BYTES_PER_SECOND: Final = 20_000_000  # of CPU time, at least; ten times as many are usual
_PATIENCE: Final = 10  # seconds per second of CPU time: disks are slow, other processes compete
_MEMORY: Final = 2**32  # bytes, besides the mapped files
_KEPT: Final = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "HOME", "LANG", "LC_ALL", "TMPDIR")


def convert(folder: Path, pickles: Iterable[Path]) -> None:
    """Convert a folder's pickles to safetensors files beside them; raises ModelLoadError."""
    _run(["convert", str(folder)], sum(path.stat().st_size for path in pickles))


def merge(adapter: Path, base: Path, target: Path, *, own_texts: bool) -> None:
    """Write a base model with an adapter merged into it to `target`; raises ModelLoadError.

    `own_texts`: whether it gets the tokenizer, chat template and ends of the adapter's folder.
    """
    size = sum(path.stat().st_size for path in base.glob("*.safetensors"))
    whose = "own" if own_texts else "base"
    _run(["merge", str(adapter), str(base), str(target), whose], size)


def _run(words: list[str], size: int) -> None:
    """Run one job of `tgi_trio.conversion` over `size` bytes of weights."""
    seconds = _SECONDS + size // _BYTES_PER_SECOND
    # sources and targets are mapped to be compared, and one tensor may be in memory twice
    memory = _MEMORY + 4 * size
    argv = [sys.executable, "-m", "tgi_trio.conversion", str(seconds), str(memory), *words]
    environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
    with tempfile.TemporaryFile() as last_words:
        with subprocess.Popen(
            argv, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=last_words,
        ) as process:  # fmt: skip
            try:
                in_time = _follow(process, seconds * _PATIENCE)
            finally:
                process.kill()
        if process.returncode:
            last_words.seek(0)
            text = last_words.read().decode(errors="replace").strip()
            raise ModelLoadError(_why(words, process.returncode, text, in_time))


def _follow(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Log a process's output until it ends; return whether it ended in time."""
    deadline, text = time.monotonic() + seconds, b""
    stdout = process.stdout
    while stdout is not None and (left := deadline - time.monotonic()) > 0:
        if not select.select([stdout], [], [], left)[0]:
            break
        data = os.read(stdout.fileno(), 2**16)
        *lines, text = (text + data).split(b"\n")
        for line in lines:
            log.info("%s", line.decode(errors="replace"))
        if not data:
            process.wait()  # it has closed its output, so it is about to exit
            return True
    return False


def _why(words: list[str], code: int, text: str, in_time: bool) -> str:
    """Return the reason for a failure, as one paragraph."""
    what = f"{words[1]} could not be " + ("merged" if words[0] == "merge" else "converted")
    if not in_time:
        return f"{what}: it took too long. Look at the disk and at what else this machine does"
    if code == -signal.SIGXCPU or code == -signal.SIGKILL:
        return f"{what}: its files need more CPU time than weights of their size can, or memory"
    if code < 0:
        return f"{what}: the process was ended by {signal.Signals(-code).name}"
    return text if code == 1 and "Traceback" not in text else f"{what}: {text[-500:]}"
