"""`python -m tgi_trio.grammars.checking <tokenizer.json> <cpu> <wall> <bytes>`: checks grammars.

Compiles each grammar as the shard will, in a child process that may die of it
(`sandbox/zygote.py`): some grammars take minutes or all memory, and none of llguidance's own limits
stops them. A job is `{"of": FILE}` with the grammar's UTF-8, where FILE is the tokenizer.json of an
adapter or "", the model's; the answer is what is wrong with the grammar. `{"read": FILE}` comes
before, as what is read survives in the parent: `_FILES` of them.
"""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from tgi_trio.errors import ModelLoadError
from tgi_trio.grammars.compiler import compile_grammar, load_tokenizer
from tgi_trio.sandbox.zygote import JobLimits, serve_jobs

_FILES = 4  # tokenizers of adapters: some tens of MB each
_PROBED = 8  # tokens for which the time of masks is measured
_SLOWEST_MASK_S = 0.01  # of CPU time; every running sequence waits for it in every step


def check(text: str, tokenizer: LLTokenizer) -> None:
    """Raise ValueError with the reason if the shard cannot serve this grammar."""
    matcher = compile_grammar(text, tokenizer)
    slowest = _slowest_mask(matcher)
    # What the machine has done meanwhile may be counted as CPU time: a hundred times that of a mask
    # was seen. A verdict is remembered, so it takes a second look.
    if slowest > _SLOWEST_MASK_S:
        slowest = min(slowest, _slowest_mask(compile_grammar(text, tokenizer)))
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


class _Checks:
    """Runs jobs with the tokenizers that have been read."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        """`tokenizer`: the model's."""
        self._model = tokenizer
        self._read: OrderedDict[str, LLTokenizer] = OrderedDict()

    def run(self, question: dict[str, str], text: bytes) -> None:
        """Do one job; raises ValueError. `text`: a grammar, where it is to be checked."""
        file = question.get("read")
        if file is None:
            of = question["of"]
            grammar = text.decode("utf-8", "surrogateescape")
            check(grammar, self._read[of] if of else self._model)
            return
        if file not in self._read:
            try:
                self._read[file] = load_tokenizer(Path(file))
            except ModelLoadError as error:
                raise ValueError(str(error)) from error
        self._read.move_to_end(file)
        if len(self._read) > _FILES:
            self._read.popitem(last=False)


def main(argv: list[str]) -> int:
    """Answer until the end of standard input; return the process's exit code."""

    return serve_jobs(
        lambda: _Checks(load_tokenizer(Path(argv[0]))).run,
        JobLimits.parse(argv[1:]),
        patient=True,
        harmless=lambda question: "read" in question,  # a file that the operator has named
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
