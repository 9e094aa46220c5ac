"""Grammars are tried out before a request is admitted, in processes that may die of it.

llguidance's own limits do not bound its time: an integer `multipleOf` 1000003 takes 5 s, and 5 KB
of `patternProperties` 1 s. So `grammars.checking` gives a compilation so much CPU time and memory
and no more, and what needs more is refused before it reaches the shard. Answers are remembered, and
for a while that a busy machine had no time to find one. Processes outlive what they try out.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import signal
import sys
from collections import OrderedDict
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import trio

from tgi_trio.errors import GrammarError, TgiTrioError, Unavailable, ValidationError
from tgi_trio.process.threads import run_in_thread
from tgi_trio.router.sandbox_pool import (
    Sandbox,
    SandboxCannotStart,
    SandboxPool,
    SandboxRefused,
    Turn,
)
from tgi_trio.router.text.grammars import check_size

log = logging.getLogger(__name__)

_REMEMBERED = 4096  # verdicts
_MEMORY = 256 * 2**20  # bytes a compilation may take
_SLOWDOWN = 10.0  # how much longer than its CPU time a compilation may take on a busy machine
_READ_S = 60.0  # seconds in which a process has to have read a tokenizer
_AGAIN_S = 30.0  # after which what found no CPU time may try again
_LONG = 2**16  # characters of a grammar that is read in a thread, piece by piece
_BUSY = "too many grammars wait to be checked"


@dataclass(frozen=True, slots=True)
class GrammarLimits:
    """What one grammar may take; each field is named after its flag."""

    max_grammar_bytes: int = 2**16
    max_grammar_seconds: float = 0.5  # of CPU time


def _read(grammar: str, file: str, most: int) -> tuple[bytes, bytes]:
    """Return a grammar's UTF-8 and its key among verdicts; raises as `check_size` does.

    `file`: of the tokenizer with which it is tried out.
    """
    check_size(grammar, most)
    text = grammar.encode("utf-8", "surrogateescape")
    found = hashlib.sha256(f"{file}\0".encode("utf-8", "surrogateescape"))
    for start in range(0, len(text), _LONG):
        found.update(text[start : start + _LONG])
    return text, found.digest()


def _cannot_read(tokenizer: Path, why: str) -> TgiTrioError:
    """Return the error for a tokenizer that grammars cannot be tried out with.

    It may be of a kind that is not served, or its file may be gone, which nobody did who asks.
    """
    if os.access(tokenizer, os.R_OK):
        return ValidationError(f"grammar is not supported: {why}")
    log.error("grammars cannot be tried out: %s", why)
    return Unavailable(
        "grammars cannot be tried out now: the file of the tokenizer is gone, which the server's "
        "log names",
        _AGAIN_S,
    )


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What is known of a grammar."""

    wrong: str | None  # None: nothing
    until: float = math.inf  # trio clock; before, it is not tried again


@dataclass(slots=True)
class _Trial:
    """One that is under way, for all who ask for its grammar meanwhile."""

    ended: trio.Event = field(default_factory=trio.Event)
    failed: TgiTrioError | None = None  # why it has come to no verdict


class GrammarChecker:
    """Says what is wrong with grammars. Processes start when they are needed first."""

    def __init__(self, tokenizer: Path, limits: GrammarLimits, workers: int) -> None:
        """`tokenizer`: the tokenizer.json that the shard uses; `workers`: processes at most."""
        self._tokenizer = tokenizer
        self._limits = limits
        argv = [
            sys.executable,
            "-m",
            "tgi_trio.grammars.checking",
            str(tokenizer),
            str(limits.max_grammar_seconds),
            str(_SLOWDOWN * limits.max_grammar_seconds),
            str(_MEMORY),
        ]
        self._pool = SandboxPool(Sandbox("grammars", argv, workers), _BUSY)
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._trials: dict[bytes, _Trial] = {}

    async def check(self, grammar: str, tokenizer: Path | None = None) -> None:
        """Raise GrammarError unless the shard can serve this grammar.

        `tokenizer`: the tokenizer.json of an adapter; None: the model's. Raises Overloaded where
        too many wait, Unavailable where the machine is too busy to find out. A checkpoint;
        cancelled, it ends the trial.
        """
        file = "" if tokenizer is None else str(tokenizer)
        read = partial(_read, grammar, file, self._limits.max_grammar_bytes)
        if len(grammar) > _LONG:
            text, key = await run_in_thread(read)
        else:
            text, key = read()
            await trio.lowlevel.checkpoint()
        while (verdict := self._find_verdict(key)) is None:
            if (trial := self._trials.get(key)) is None:
                verdict = await self._try_for_all(text, file, key)
                break
            await trial.ended.wait()
            if trial.failed is not None:
                raise copy(trial.failed)  # each with a traceback of its own
        if verdict.until < math.inf:
            raise Unavailable(str(verdict.wrong), verdict.until - trio.current_time())
        if verdict.wrong is not None:
            raise GrammarError(f"grammar is not valid: {verdict.wrong}")

    async def close(self) -> None:
        """End all processes that wait for work."""
        await self._pool.close()

    async def _try_for_all(self, text: bytes, file: str, key: bytes) -> _Verdict:
        """Try a grammar out and remember the verdict; who asks for it meanwhile waits for that.

        Cancelled, it leaves the trial to another of them.
        """
        trial = self._trials[key] = _Trial()
        try:
            async with self._pool.turn() as turn:
                verdict = await self._try(text, file, turn)
                self._remember(key, verdict)
        except TgiTrioError as error:
            trial.failed = error
            raise
        finally:
            del self._trials[key]
            trial.ended.set()
        return verdict

    async def _try(self, text: bytes, file: str, turn: Turn) -> _Verdict:
        """Have a process try the grammar out, with an adapter's tokenizer or the model's ("")."""
        seconds = self._limits.max_grammar_seconds
        try:
            if file and (read := await turn.ask({"read": file}, within=_READ_S)).wrong is not None:
                raise _cannot_read(Path(file), read.wrong)
            answer = await turn.ask({"of": file}, text, within=_SLOWDOWN * seconds)
        except SandboxRefused as error:
            raise Unavailable(f"grammars cannot be tried out now: {error}", _AGAIN_S) from error
        except SandboxCannotStart as error:
            raise _cannot_read(self._tokenizer, str(error)) from error
        match answer.signal:
            case 0:
                return _Verdict(answer.wrong)
            case signal.SIGPROF:
                found = f"compiling it takes more than {seconds:g} s (--max-grammar-seconds)"
                return _Verdict(found)
            case signal.SIGALRM:  # it says nothing of the grammar
                found = (
                    f"this machine is too busy to try the grammar out: {seconds:g} s of CPU time "
                    f"(--max-grammar-seconds) were not to be had in {_SLOWDOWN * seconds:g} s"
                )
                return _Verdict(found, trio.current_time() + _AGAIN_S)
        if answer.killed:
            found = "the process that tried the grammar out has ended before it could say"
            return _Verdict(found, trio.current_time() + _AGAIN_S)
        return _Verdict(f"compiling it takes more than {_MEMORY >> 20} MiB of memory")

    def _find_verdict(self, key: bytes) -> _Verdict | None:
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
