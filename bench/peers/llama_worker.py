"""A process that runs llama.cpp on one GGUF file and measures on request.

    python -m bench.peers.llama_worker LIBRARIES FILE THREADS

It speaks as `bench.model.worker` does, processor time included. Prompts are computed once and kept;
what a measurement adds to them is forgotten after it. Nothing is sampled.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from bench.model.cases import Case, clock_of
from bench.peers.llama_binding import Context, Libraries, Token

_REPEATS = 3  # prefills in one reading


def prompt(sequence: int, length: int) -> list[Token]:
    """Return a prompt whose last token wants logits."""
    return [
        Token(3 + (7 * place + sequence) % 500, place, sequence, wanted=place == length - 1)
        for place in range(length)
    ]


class Measurer:
    """One file; the sequences of the last case stay computed for the next like it."""

    def __init__(self, libraries: Libraries, file: Path, threads: int, stack: ExitStack) -> None:
        self._libraries, self._file, self._threads, self._stack = libraries, file, threads, stack
        self._held: tuple[list[int], Context] | None = None
        self._behind = 0  # tokens of each sequence behind its prompt

    def measure(self, case: Case) -> float:
        """Return milliseconds of a decode step or of a prefill, the median."""
        if case.prefill:
            return self._prefill_ms(case.contexts[0], clock_of(case))
        return self._decode_ms(case.contexts, case.steps, clock_of(case))

    def _prefill_ms(self, length: int, clock: Callable[[], float]) -> float:
        context, times = self._context([length], room=1), []
        for _ in range(_REPEATS):
            context.forget(0, 0)
            times.append(_timed(context, prompt(0, length), clock))
        return statistics.median(times) * 1e3

    def _decode_ms(self, contexts: list[int], steps: int, clock: Callable[[], float]) -> float:
        context, times = self._context(contexts, room=steps + 2), []
        self._go_back(context, contexts, steps + 2)
        for step in range(self._behind, self._behind + steps + 2):
            tokens = [
                Token(5 + step + sequence, length + step, sequence, wanted=True)
                for sequence, length in enumerate(contexts)
            ]
            times.append(_timed(context, tokens, clock))
        self._behind += steps + 2
        return statistics.median(times[2:]) * 1e3

    def _go_back(self, context: Context, contexts: list[int], room: int) -> None:
        """Forget what is behind the prompts.

        States cannot: sequences go on while there is `room`, and are computed again then.
        """
        try:
            for sequence, length in enumerate(contexts):
                context.forget(sequence, length)
        except RuntimeError:
            if max(contexts) + self._behind + room <= _tokens(contexts, room):
                return
            for sequence, length in enumerate(contexts):
                context.forget(sequence, 0)
                context.compute(prompt(sequence, length))
        self._behind = 0

    def _context(self, contexts: list[int], room: int) -> Context:
        """Return a context that holds these sequences."""
        if self._held is not None and self._held[0] == contexts:
            return self._held[1]
        self._stack.close()
        self._held = None
        self._behind = 0
        context = self._stack.enter_context(
            Context(
                self._libraries,
                self._file,
                tokens=_tokens(contexts, room),
                sequences=len(contexts),
                threads=self._threads,
            )
        )
        for sequence, length in enumerate(contexts):
            context.compute(prompt(sequence, length))
        self._held = contexts, context
        return context


def _tokens(contexts: list[int], room: int) -> int:
    """Return how long sequences may be that have these prompts."""
    return -(-(max(contexts) + room) // 256) * 256


def _timed(context: Context, tokens: list[Token], clock: Callable[[], float]) -> float:
    """Return the seconds that tokens take."""
    start = clock()
    context.compute(tokens)
    return clock() - start


def main(libraries: Path, file: Path, threads: int) -> None:
    with ExitStack() as stack:
        measurer = Measurer(Libraries(libraries), file, threads, stack)
        print("ready", flush=True)
        for line in sys.stdin:
            print(json.dumps(measurer.measure(Case(**json.loads(line)))), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
