"""`python -m tgi_trio.shard.grammar_check <tokenizer.json> <seconds> <bytes>`: is a grammar usable?

Compiles grammars as the shard will, in a process that may die of it: some take minutes or all of
the memory, and no limit of llguidance's own stops them. Every line of standard input is a grammar
as a JSON string, every line of output null or what is wrong with it as a JSON string; the first
line says that the tokenizer is loaded. A grammar that needs more than `seconds` of CPU time ends
the process with SIGPROF, one that needs more than `bytes` of memory with another signal.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from tgi_trio.errors import ModelLoadError
from tgi_trio.shard.grammars import compile_grammar, load_tokenizer

_NICENESS = 10  # steps and streams go first
_PROBED = 8  # tokens followed to see what masks cost
_SLOWEST_MASK_S = 0.02  # of CPU time: every running sequence waits for it in every step


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


def _answer(value: str | None) -> None:
    print(json.dumps(value), flush=True)


def main(argv: list[str]) -> int:
    """Answer until standard input ends; returns the process's exit code."""
    path, seconds, memory = Path(argv[0]), float(argv[1]), int(argv[2])
    os.nice(_NICENESS)
    try:
        tokenizer = load_tokenizer(path)
    except ModelLoadError as error:
        _answer(str(error))
        return 1
    _limit_memory(memory)
    _answer(None)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process
        wrong: str | None = None
        try:
            check(json.loads(line), tokenizer)
        except ValueError as error:
            wrong = str(error)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer(wrong)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
