"""`python -m tgi_trio.grammars.checking <tokenizer.json> <cpu> <wall> <bytes>`: checks grammars.

Compiles each grammar as the shard will, in a child process that may die of it
(`sandbox/zygote.py`): some grammars take minutes or all memory, and none of llguidance's own limits
stops them. A job is the text of a grammar; the answer is what is wrong with it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from tgi_trio.grammars.compiler import compile_grammar, load_tokenizer
from tgi_trio.sandbox.zygote import Job, JobLimits, serve_jobs

_PROBED = 8  # tokens for which the time of masks is measured
_SLOWEST_MASK_S = 0.01  # of CPU time; every running sequence waits for it in every step


def check(text: str, tokenizer: LLTokenizer) -> None:
    """Raise ValueError with the reason if the shard cannot serve this grammar."""
    matcher = compile_grammar(text, tokenizer)
    slowest = _slowest_mask(matcher)
    if slowest > _SLOWEST_MASK_S:
        raise ValueError(
            f"a step takes {1e3 * slowest:.0f} ms, {1e3 * _SLOWEST_MASK_S:.0f} ms are allowed: "
            "use fewer optional properties or shorter texts"
        )


def _slowest_mask(matcher: LLMatcher) -> float:
    """Return the CPU seconds of the slowest of the first few masks, following allowed tokens."""
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


def main(argv: list[str]) -> int:
    """Answer until the end of standard input; return the process's exit code."""

    def load() -> Job:
        tokenizer = load_tokenizer(Path(argv[0]))
        return lambda text, _: check(text, tokenizer)

    return serve_jobs(load, JobLimits.parse(argv[1:]), patient=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
