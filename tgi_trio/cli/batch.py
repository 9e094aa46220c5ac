"""`batch`: asks a server all requests of a file, and writes the answers to another.

Each line is written whole as soon as it is there, so that a run that was broken off goes on where
it was: requests that have an answer are not asked again.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final, TextIO

import trio
from tqdm import tqdm

from tgi_trio.cli.chat import open_client, read_info
from tgi_trio.cli.options import BatchOptions
from tgi_trio.client.batch_files import (
    BatchRow,
    append_line,
    is_worth_another_try,
    keep_answers,
    read_ids,
    read_rows,
    write_answer,
    write_failure,
)
from tgi_trio.client.http import Client
from tgi_trio.errors import ConfigurationError

PAUSES: Final = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before another try
_LONGEST_PAUSE: Final = 60.0  # that a server may ask for
_WELL: Final = 200  # the status


def run_batch(options: BatchOptions) -> int:
    """Ask all; the exit code is 1 if one was not answered well. Raises as `batch` does."""
    return 0 if trio.run(batch, options, sys.stdout) else 1


async def batch(options: BatchOptions, output: TextIO) -> bool:
    """Ask what has no answer yet; print how many were answered. Returns whether all were, well.

    Raises ConfigurationError for files that cannot be used and for what is no such server,
    ShardCannotStart if the server of our own does not start, and OSError if the server cannot be
    reached (any more).
    """
    asked = read_ids(options.input)
    answered = {id: at for id, at in keep_answers(options.output).items() if id in asked}
    left = len(asked) - len(answered)
    rows = (row for row in read_rows(options.input) if row.custom_id not in answered)
    counts: Counter[str] = Counter()
    bar = tqdm(total=len(asked), initial=len(answered), desc="rows", leave=False, file=sys.stderr)
    # Unbuffered: a line is one call of the system, and is there as soon as it is written.
    with bar, options.output.open("ab", buffering=0) as answers:
        try:
            if left:
                async with open_client(options) as client:
                    await read_info(client)
                    write = partial(append_line, answers)
                    run = BatchRun(client, rows, write, bar.update, options.timeout, counts=counts)
                    await run.ask_all(min(options.clients, left))
        finally:
            bar.close()
            left -= counts.total()
            if left:
                print(f"{left} rows are left: the same command goes on", file=sys.stderr)
    print(describe(len(asked), len(answered), counts), file=output)
    return {*counts, *map(str, answered.values())} <= {str(_WELL)}


def describe(total: int, done: int, counts: Counter[str]) -> str:
    """Return what became of the rows; `counts`: by status, or by what went wrong."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
    before = f"{done} before, " if done else ""
    return f"{total} rows: {before}{kinds or 'none asked'}"


@dataclass(slots=True)
class BatchRun:
    """The requests of one run."""

    client: Client
    rows: Iterator[BatchRow]
    write: Callable[[bytes], object]  # a whole line
    told: Callable[[int], object]  # of each row that has an answer
    timeout: float  # seconds of a row
    pauses: tuple[float, ...] = PAUSES
    counts: Counter[str] = field(default_factory=Counter)
    _failure: OSError | ConfigurationError | None = None

    async def ask_all(self, clients: int) -> None:
        """Ask all rows, `clients` at a time. Raises OSError if there is no server.

        Also what `write` raises, ConfigurationError if no more can be written.
        """
        async with trio.open_nursery() as nursery:
            for _ in range(clients):
                nursery.start_soon(self._ask_some, nursery.cancel_scope)
        if self._failure is not None:
            raise self._failure

    async def _ask_some(self, all: trio.CancelScope) -> None:
        for row in self.rows:
            try:
                kind, line = await self._ask(row)
                self.write(line)
            except (OSError, ConfigurationError) as error:  # it would meet each further row as well
                self._failure = error
                all.cancel()
                return
            self.counts[kind] += 1
            self.told(1)

    async def _ask(self, row: BatchRow) -> tuple[str, bytes]:
        """Return what became of a row, its status or an error's code, and its line."""
        with trio.move_on_after(self.timeout):
            for number in range(len(self.pauses) + 1):
                last = number == len(self.pauses)
                pause = 0.0 if last else self.pauses[number]
                try:
                    answer = await self.client.post(row.url, row.body)
                except trio.BrokenResourceError as error:
                    if last:
                        code = "connection_error"
                        return code, write_failure(row, code, str(error))
                except OSError:
                    if last:
                        raise
                else:
                    if last or not is_worth_another_try(answer.status):
                        return str(answer.status), write_answer(row, answer)
                    pause = max(pause, min(answer.retry_after, _LONGEST_PAUSE))
                await trio.sleep(pause)
        why = f"no answer within {self.timeout:g} s"
        return "request_timeout", write_failure(row, "request_timeout", why)
