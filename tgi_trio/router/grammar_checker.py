"""Grammars are tried out before a request is admitted, in processes that may die of it.

llguidance's own limits do not bound its time: an integer `multipleOf` 1000003 takes 5 s, and 5 KB
of `patternProperties` 1 s. So `shard.grammar_check` gives a compilation so much CPU time and memory
and no more, and what needs more is refused before it reaches the shard. Answers are remembered.
"""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

from tgi_trio.errors import GrammarError, Overloaded, ValidationError

_REMEMBERED = 4096  # verdicts
_MEMORY = 256 * 2**20  # bytes a compilation may take
_START_S = 60.0  # for a process to load the tokenizer
_IN_LINE_S = 10.0  # how long a grammar waits for those before it
_SLOWDOWN = 10.0  # how much longer than its CPU time a compilation may take on a busy machine
_BUSY = "too many grammars wait to be checked"
_LINE = 2**16  # longest answer


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What one grammar may take; each field is named after its flag."""

    max_grammar_bytes: int = 2**16
    max_grammar_seconds: float = 0.5  # of CPU time


class _Ended(Exception):
    """The process has ended instead of answering."""


class _Process:
    """One process of `shard.grammar_check`; it serves one grammar after the other."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._rest = b""

    @classmethod
    async def start(cls, argv: Sequence[str]) -> _Process:
        """Start one and wait until it is ready; raises ValidationError when it cannot be."""
        process = await trio.lowlevel.open_process(
            list(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self = cls(process)
        wrong: str | int | None = f"it is not ready after {_START_S:g} s"
        try:
            with trio.move_on_after(_START_S):
                wrong = await self._answer()
        except _Ended:
            wrong = "the process that checks grammars cannot start"
        finally:
            if wrong is not None:
                await self.end()
        if wrong is not None:
            raise ValidationError(f"grammar is not supported: {wrong}")
        return self

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def ask(self, grammar: str) -> str | int | None:
        """Return what is wrong with a grammar, or the signal it ended in; raises _Ended."""
        stdin = self._process.stdin
        if stdin is None:
            raise RuntimeError("started without a pipe")
        try:
            await stdin.send_all(json.dumps(grammar).encode() + b"\n")
        except trio.BrokenResourceError as error:
            raise _Ended from error
        return await self._answer()

    async def _answer(self) -> str | int | None:
        stdout = self._process.stdout
        if stdout is None:
            raise RuntimeError("started without a pipe")
        while b"\n" not in self._rest:
            data = await stdout.receive_some(_LINE)
            if not data:
                raise _Ended
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        answer: str | int | None = json.loads(line)
        return answer

    async def end(self) -> None:
        """End it, whatever it does."""
        with trio.CancelScope(shield=True):  # SIGKILL is not waited for long
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    await stream.aclose()
            self._process.kill()
            await self._process.wait()


class GrammarChecker:
    """Says what is wrong with grammars. Processes start when they are needed first."""

    def __init__(self, tokenizer: Path, limits: GrammarLimits, workers: int) -> None:
        """`tokenizer`: the tokenizer.json that the shard uses; `workers`: processes at most."""
        self._limits = limits
        self._argv = [
            sys.executable,
            "-m",
            "tgi_trio.shard.grammar_check",
            str(tokenizer),
            str(limits.max_grammar_seconds),
            str(_MEMORY),
        ]
        self._limiter = trio.CapacityLimiter(workers)
        self._idle: list[_Process] = []
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()

    async def check(self, grammar: str) -> None:
        """Raise GrammarError unless the shard can serve this grammar; Overloaded if it is busy.

        A checkpoint; cancelled, it ends the process that is at work on the grammar.
        """
        size, most = len(grammar.encode()), self._limits.max_grammar_bytes
        if size > most:
            raise GrammarError(
                f"grammar is not valid: it has {size} bytes, {most} are allowed "
                "(--max-grammar-bytes)"
            )
        key = hashlib.sha256(grammar.encode()).digest()
        if key not in self._verdicts:
            await self._take_turn()
            try:
                if key not in self._verdicts:  # it may have been checked meanwhile
                    self._remember(key, await self._verdict(grammar))
            finally:
                self._limiter.release()
        else:
            self._verdicts.move_to_end(key)
            await trio.lowlevel.checkpoint()
        wrong = self._verdicts[key]
        if wrong is not None:
            raise GrammarError(f"grammar is not valid: {wrong}")

    async def close(self) -> None:
        """End all processes that wait for work."""
        while self._idle:
            await self._idle.pop().end()

    async def _take_turn(self) -> None:
        with trio.move_on_after(_IN_LINE_S) as waiting:
            await self._limiter.acquire()
        if waiting.cancelled_caught:
            raise Overloaded(_BUSY, retry_after=_IN_LINE_S)

    async def _verdict(self, grammar: str) -> str | None:
        """Have a process try the grammar out."""
        process = await self._take_process()
        seconds = self._limits.max_grammar_seconds
        answer: str | int | None = None
        try:
            with trio.move_on_after(_SLOWDOWN * seconds) as patience:
                answer = await process.ask(grammar)
                self._idle.append(process)
        except _Ended:
            answer = signal.SIGKILL
        finally:
            if process not in self._idle:
                await process.end()
        if patience.cancelled_caught:  # it says nothing of the grammar: there was no CPU time
            raise Overloaded(_BUSY, retry_after=_IN_LINE_S)
        if answer == signal.SIGPROF:
            return f"compiling it takes more than {seconds:g} s (--max-grammar-seconds)"
        if isinstance(answer, int):
            return f"compiling it takes more than {_MEMORY >> 20} MiB of memory"
        return answer

    async def _take_process(self) -> _Process:
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
            await process.end()
        return await _Process.start(self._argv)

    def _remember(self, key: bytes, verdict: str | None) -> None:
        self._verdicts[key] = verdict
        if len(self._verdicts) > _REMEMBERED:
            self._verdicts.popitem(last=False)
