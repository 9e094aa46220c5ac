"""`python -m tgi_trio.grammars.checking <tokenizer.json> <cpu> <wall> <bytes>`: is it usable?

Compiles grammars as the shard will, each in a child of its own that may die of it: some take
minutes or all of the memory, and no limit of llguidance's own stops them. The tokenizer, which may
take seconds to load, survives in the parent. Every line of standard input is a grammar as a JSON
string. Every line of output is null, what is wrong with it as a string, or the number of the signal
that ended the child: SIGPROF after `cpu` seconds of CPU time, SIGALRM after `wall` seconds without
having had as much, another where it needed more than `bytes` of memory. SIGUSR1 ends the trial
under way: nobody waits for its answer. The first line says that the tokenizer is loaded.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from tgi_trio.errors import ModelLoadError
from tgi_trio.grammars.compiler import compile_grammar, load_tokenizer
from tgi_trio.ipc.parent import die_with_parent

_NICENESS = 5  # steps and streams go first
_SHORT_S = 0.1  # of CPU time: a compilation that takes more goes on only where a core is idle
_LOOK_S = 0.02
_LONGEST = 4096  # bytes of an answer
_PROBED = 8  # tokens followed to see what masks cost
_SLOWEST_MASK_S = 0.01  # of CPU time: every running sequence waits for it in every step


def check(text: str, tokenizer: LLTokenizer) -> None:
    """Raise ValueError, with what is wrong, unless the shard can serve this grammar."""
    matcher = compile_grammar(text, tokenizer)
    slowest = _slowest_mask(matcher)
    if slowest > _SLOWEST_MASK_S:
        raise ValueError(
            f"a step takes {1e3 * slowest:.0f} ms, {1e3 * _SLOWEST_MASK_S:.0f} ms are allowed: "
            "use fewer optional properties or shorter texts"
        )


def _slowest_mask(matcher: LLMatcher) -> float:
    """Return the CPU seconds of the slowest of the first few masks, along any allowed tokens."""
    slowest = 0.0
    for _ in range(_PROBED):
        began = time.thread_time()
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        slowest = max(slowest, time.thread_time() - began)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if matcher.is_error() or len(allowed) == 0:
            break
        matcher.consume_token(int(allowed[-1]))
    if matcher.is_error():
        raise ValueError(matcher.get_error())
    return slowest


def _limit_memory(more: int) -> None:
    """Let this process take `more` bytes of address space beyond what it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class _Trials:
    """Tries grammars out, one after the other."""

    def __init__(self, tokenizer: LLTokenizer, cpu: float, wall: float, memory: int) -> None:
        """At most `cpu` seconds of CPU time, `wall` seconds and `memory` bytes for each."""
        self._tokenizer = tokenizer
        self._cpu, self._wall, self._memory = cpu, wall, memory
        self._child = 0  # process id while there is one
        signal.signal(signal.SIGUSR1, self._abandon)

    def run(self, text: str) -> str | int | None:
        """Check a grammar in a child; return the answer, or the signal that ended the child."""
        reading, writing = os.pipe()
        parent = os.getpid()
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
            die_with_parent(parent)
            self._answer(text, writing)
        self._child = child
        os.close(writing)
        with open(reading, "rb") as pipe:
            wrong = pipe.read().decode(errors="replace")
        self._child = 0
        _, status = os.waitpid(child, 0)
        return -code if (code := os.waitstatus_to_exitcode(status)) < 0 else wrong or None

    def _answer(self, text: str, writing: int) -> NoReturn:
        """Write what is wrong with a grammar, within the limits, and end this process."""
        _limit_memory(self._memory)
        signal.setitimer(signal.ITIMER_PROF, self._cpu)  # SIGPROF ends the process
        signal.setitimer(signal.ITIMER_REAL, self._wall)  # and so does SIGALRM
        _slow_down_later()
        try:
            check(text, self._tokenizer)
        except ValueError as error:
            os.write(writing, str(error).encode()[:_LONGEST])
        except BaseException as error:  # llguidance's own defects are PanicExceptions
            os.write(writing, f"{type(error).__name__}: {error}".encode()[:_LONGEST])
        finally:
            os._exit(0)

    def _abandon(self, number: int, frame: object) -> None:
        if self._child:
            os.kill(self._child, signal.SIGKILL)


def _slow_down_later() -> None:
    """Have this thread run only on idle cores once it has worked for a while."""
    worker = threading.get_native_id()

    def watch() -> None:
        while time.process_time() < _SHORT_S:
            time.sleep(_LOOK_S)
        os.sched_setscheduler(worker, os.SCHED_IDLE, os.sched_param(0))

    threading.Thread(target=watch, daemon=True).start()


def _tell(value: str | int | None) -> None:
    print(json.dumps(value), flush=True)


def main(argv: list[str]) -> int:
    """Answer until standard input ends; returns the process's exit code."""
    path, cpu, wall, memory = Path(argv[0]), float(argv[1]), float(argv[2]), int(argv[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C means the server, which ends this
    os.nice(_NICENESS)
    try:
        trials = _Trials(load_tokenizer(path), cpu, wall, memory)
    except ModelLoadError as error:
        _tell(str(error))
        return 1
    _tell(None)
    for line in sys.stdin:
        _tell(trials.run(json.loads(line)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
