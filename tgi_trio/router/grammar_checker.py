"""Grammars are tried out before a request is admitted, in processes that may die of it.

llguidance's own limits do not bound its time: an integer `multipleOf` 1000003 takes 5 s, and 5 KB
of `patternProperties` 1 s. So `shard.grammar_check` gives a compilation so much CPU time and memory
and no more, and what needs more is refused before it reaches the shard. Answers are remembered, and
for a while that a busy machine had no time to find one. Processes outlive what they try out.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import signal
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import trio

from tgi_trio.errors import GrammarError, Overloaded, Unavailable, ValidationError
from tgi_trio.router.text.grammars import check_size

log = logging.getLogger(__name__)

_REMEMBERED = 4096  # verdicts
_MEMORY = 256 * 2**20  # bytes a compilation may take
_START_S = 60.0  # for a process to load the tokenizer
_IN_LINE_S = 10.0  # how long a grammar waits for those before it
_SLOWDOWN = 10.0  # how much longer than its CPU time a compilation may take on a busy machine
_AGAIN_S = 30.0  # after which what found no CPU time may try again
_GRACE_S = 10.0  # for a process to say that it has ended a trial in time
_BUSY = "too many grammars wait to be checked"
_LINE = 2**16  # longest answer
_LONGEST_SAID = 4096  # bytes of a line of its standard error


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What one grammar may take; each field is named after its flag."""

    max_grammar_bytes: int = 2**16
    max_grammar_seconds: float = 0.5  # of CPU time


class _Ended(Exception):
    """The process has ended instead of answering."""


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What is known of a grammar."""

    wrong: str | None  # None: nothing
    until: float = math.inf  # trio clock; before, it is not tried again


class _Process:
    """One process of `shard.grammar_check`; it serves one grammar after the other."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._rest = b""
        self._begun = b""  # of a line of standard error
        self._owed = 0  # answers that are still to come
        self._sending = False

    @classmethod
    async def start(cls, argv: Sequence[str]) -> _Process:
        """Start one and wait until it is ready; raises ValidationError when it cannot be."""
        process = await trio.lowlevel.open_process(
            list(argv), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
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
    def usable(self) -> bool:
        """Return whether it can be asked: it lives, and has had every question whole."""
        return self._process.poll() is None and not self._sending

    async def ask(self, grammar: str) -> str | int | None:
        """Return what is wrong with a grammar, or the signal it ended in; raises _Ended."""
        stdin = self._process.stdin
        if stdin is None:
            raise RuntimeError("started without a pipe")
        while self._owed:
            await self._answer()
            self._owed -= 1
        self._sending = True  # left so when cancelled half-way
        try:
            await stdin.send_all(json.dumps(grammar).encode() + b"\n")
        except trio.BrokenResourceError as error:
            raise _Ended from error
        self._sending = False
        self._owed += 1
        answer = await self._answer()
        self._owed -= 1
        return answer

    def abandon(self) -> None:
        """End the trial under way, if there is one: nobody waits for its answer any more."""
        if self._owed:
            self._process.send_signal(signal.SIGUSR1)

    async def _answer(self) -> str | int | None:
        stdout = self._process.stdout
        if stdout is None:
            raise RuntimeError("started without a pipe")
        while b"\n" not in self._rest:
            data = await stdout.receive_some(_LINE)
            if not data:
                raise _Ended
            self._rest += data
        self._log_errors()
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
            self._log_errors()
            if self._process.stderr is not None:
                await self._process.stderr.aclose()

    def _log_errors(self) -> None:
        """Log what has come on standard error: a panic of llguidance, a traceback.

        It is looked at with each answer: whoever fills the pipe meanwhile waits, within its time.
        """
        stderr = self._process.stderr
        if not isinstance(stderr, trio.lowlevel.FdStream):
            raise RuntimeError("started without a pipe")
        data = b"..."
        with suppress(BlockingIOError):
            while data:
                data = os.read(stderr.fileno(), _LINE)
                *lines, begun = (self._begun + (data or b"\n")).split(b"\n")
                self._begun = begun[-_LONGEST_SAID:]
                for line in filter(None, lines):
                    log.warning("grammars | %s", line[:_LONGEST_SAID].decode(errors="replace"))


class GrammarChecker:
    """Says what is wrong with grammars. Processes start when they are needed first."""

    def __init__(self, tokenizer: Path, limits: GrammarLimits, workers: int) -> None:
        """`tokenizer`: the tokenizer.json that the shard uses; `workers`: processes at most."""
        self._limits = limits
        self._argv = [
            sys.executable,
            "-m",
            "tgi_trio.grammars.checking",
            str(tokenizer),
            str(limits.max_grammar_seconds),
            str(_SLOWDOWN * limits.max_grammar_seconds),
            str(_MEMORY),
        ]
        self._limiter = trio.CapacityLimiter(workers)
        self._idle: list[_Process] = []
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()

    async def check(self, grammar: str) -> None:
        """Raise GrammarError unless the shard can serve this grammar.

        Raises Overloaded where too many wait, Unavailable where the machine is too busy to find
        out. A checkpoint; cancelled, it ends the trial.
        """
        check_size(grammar, self._limits.max_grammar_bytes)
        key = hashlib.sha256(grammar.encode()).digest()
        verdict = self._known(key)
        if verdict is None:
            await self._take_turn()
            try:
                verdict = self._known(key)  # it may have been checked meanwhile
                if verdict is None:
                    verdict = await self._try(grammar)
                    self._remember(key, verdict)
            finally:
                self._limiter.release()
        else:
            await trio.lowlevel.checkpoint()
        if verdict.until < math.inf:
            raise Unavailable(str(verdict.wrong), verdict.until - trio.current_time())
        if verdict.wrong is not None:
            raise GrammarError(f"grammar is not valid: {verdict.wrong}")

    async def close(self) -> None:
        """End all processes that wait for work."""
        while self._idle:
            await self._idle.pop().end()

    async def _take_turn(self) -> None:
        with trio.move_on_after(_IN_LINE_S) as waiting:
            await self._limiter.acquire()
        if waiting.cancelled_caught:
            raise Overloaded(_BUSY, retry_after=_IN_LINE_S)

    async def _try(self, grammar: str) -> _Verdict:
        """Have a process try the grammar out."""
        process = await self._take_process()
        seconds = self._limits.max_grammar_seconds
        answer: str | int | None = signal.SIGALRM
        try:
            with trio.move_on_after(_SLOWDOWN * seconds + _GRACE_S) as patience:
                answer = await process.ask(grammar)
        except _Ended:
            answer = signal.SIGKILL
        finally:
            if process.usable and not patience.cancelled_caught:
                process.abandon()
                self._idle.append(process)
            else:
                await process.end()
        match answer:
            case signal.SIGPROF:
                found = f"compiling it takes more than {seconds:g} s (--max-grammar-seconds)"
                return _Verdict(found)
            case signal.SIGALRM:  # it says nothing of the grammar
                found = (
                    f"this machine is too busy to try the grammar out: {seconds:g} s of CPU time "
                    f"(--max-grammar-seconds) were not to be had in {_SLOWDOWN * seconds:g} s"
                )
                return _Verdict(found, trio.current_time() + _AGAIN_S)
            case int():
                return _Verdict(f"compiling it takes more than {_MEMORY >> 20} MiB of memory")
        return _Verdict(answer)

    async def _take_process(self) -> _Process:
        while self._idle:
            process = self._idle.pop()
            if process.usable:
                return process
            await process.end()
        return await _Process.start(self._argv)

    def _known(self, key: bytes) -> _Verdict | None:
        """Return the verdict on a grammar, while it holds."""
        verdict = self._verdicts.get(key)
        if verdict is None or verdict.until <= trio.current_time():
            return None
        self._verdicts.move_to_end(key)
        return verdict

    def _remember(self, key: bytes, verdict: _Verdict) -> None:
        self._verdicts[key] = verdict
        if len(self._verdicts) > _REMEMBERED:
            self._verdicts.popitem(last=False)
