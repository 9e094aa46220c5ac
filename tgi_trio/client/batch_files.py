"""Files of OpenAI's Batch API: a request on each line, and an answer on each line.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

    {"id": "batch_req_1f", "custom_id": "a", "error": null,
     "response": {"status_code": 200, "request_id": "...", "body": {...}}}

Answers come in the order in which they are ready. `error` is set, with `code` and `message`, where
there was no answer at all.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Final

import orjson

from tgi_trio.client.http import Answer
from tgi_trio.errors import ConfigurationError
from tgi_trio.whole_files import check_file, open_file, write_whole

ROUTES: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings")
_FIELDS: Final = ("custom_id", "method", "url", "body")
_SHOWN: Final = 60  # most characters of a value in an error
_LONGEST_LINE: Final = 256 << 20  # bytes of a request or an answer
_LONGEST: Final = 300  # characters that are kept of an answer that is no JSON


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One request."""

    custom_id: str
    url: str  # the route
    body: bytes  # JSON


def read_rows(path: Path) -> Iterator[BatchRow]:
    """Yield the requests of a file, line by line; empty lines are none.

    Raises ConfigurationError, with the line, for what is no request, and for a file that cannot be
    read.
    """
    try:
        for number, line in enumerate(_read_lines(path), start=1):
            if line.strip():
                yield _read_row(line, f"{path}, line {number}")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error


def read_ids(path: Path) -> set[str]:
    """Return the ids of a file's requests. Raises ConfigurationError for any that is wrong."""
    known: set[str] = set()
    for count, row in enumerate(read_rows(path), start=1):
        known.add(row.custom_id)
        if len(known) != count:
            raise ConfigurationError(
                f"{path} has the `custom_id` {row.custom_id[:_SHOWN]!r} twice: answers are told "
                "apart by it"
            )
    if not known:
        raise ConfigurationError(f"{path} has no requests")
    return known


def _read_lines(path: Path) -> Iterator[bytes]:
    """Yield a file's lines with their ends. Raises OSError, ConfigurationError for a long one."""
    with open_file(path) as file:
        if not os.fstat(file.fileno()).st_size:
            return  # files of /proc have no size, and some wait for the kernel to say something
        number = 0
        while line := file.readline(_LONGEST_LINE + 1):
            number += 1
            if len(line) > _LONGEST_LINE:
                raise ConfigurationError(
                    f"{path}, line {number} has more than {_LONGEST_LINE >> 20} MiB"
                )
            yield line


def _read_row(line: bytes, place: str) -> BatchRow:
    try:
        given = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigurationError(f"{place} is no JSON: {error}") from error
    if not isinstance(given, dict) or any(name not in given for name in _FIELDS):
        raise ConfigurationError(f"{place} must have `custom_id`, `method`, `url` and `body`")
    id, method, url, body = (given[name] for name in _FIELDS)
    if not isinstance(id, str) or not id:
        raise ConfigurationError(f"{place}: `custom_id` must be a text that is not empty")
    if method != "POST":
        raise ConfigurationError(f"{place}: `method` must be `POST`")
    if url not in ROUTES:
        known = ", ".join(f"`{each}`" for each in ROUTES)
        raise ConfigurationError(
            f"{place}: `url` must be one of {known}. Given: {str(url)[:_SHOWN]!r}"
        )
    if not isinstance(body, dict):
        raise ConfigurationError(f"{place}: `body` must be an object")
    if body.get("stream") or body.get("background"):
        raise ConfigurationError(
            f"{place}: `stream` and `background` are not for batches: each answer is a whole one"
        )
    return BatchRow(id, url, orjson.dumps(body))


def write_answer(row: BatchRow, answer: Answer) -> bytes:
    """Return the line of a request that was answered, with whatever status."""
    try:
        body = orjson.loads(answer.body)
    except orjson.JSONDecodeError:
        body = {"error": {"message": answer.body[:_LONGEST].decode(errors="replace")}}
    response = {"status_code": answer.status, "request_id": answer.request_id, "body": body}
    return _write(row, response, None)


def write_failure(row: BatchRow, code: str, message: str) -> bytes:
    """Return the line of a request that was not answered."""
    return _write(row, None, {"code": code, "message": message})


def _write(row: BatchRow, response: Any, error: Any) -> bytes:
    line = {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": row.custom_id,
        "response": response,
        "error": error,
    }
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def append_line(file: FileIO, line: bytes) -> None:
    """Write all of a line to an unbuffered file. Raises ConfigurationError."""
    try:
        write_whole(file, line)
    except OSError as error:
        raise ConfigurationError(f"{file.name!s} cannot be written: {error.strerror}") from error


def is_worth_another_try(status: int) -> bool:
    """Return whether a status says that the same request may be answered later."""
    return status in (408, 429) or status >= 500


def keep_answers(path: Path) -> dict[str, int]:
    """Return the statuses that a file of answers has, by request; other lines are removed from it.

    Removed are a last line that was cut off, and those of requests that are worth another try.
    The file is made where there is none. Raises ConfigurationError for a file that holds anything
    else, which stays as it is, and for one that cannot be written.
    """
    answered: dict[str, int] = {}
    as_it_is = True
    try:
        if path.exists():
            check_file(path, None)  # opened for writing, a pipe would wait for a reader
        path.open("ab").close()
        for line in _read_lines(path):
            own = _read_answered(line, path)
            if own is None:
                as_it_is = False
            else:
                answered[own[0]] = own[1]
        if not as_it_is:
            beside = path.with_name(f"{path.name}.{os.getpid()}")
            with beside.open("wb") as kept:
                kept.writelines(line for line in _read_lines(path) if _read_answered(line, path))
            beside.replace(path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from error
    return answered


def _read_answered(line: bytes, path: Path) -> tuple[str, int] | None:
    """Return the id of the request that a line answers, and the status.

    None: there is no whole answer, or none that counts.
    """
    if not line.endswith(b"\n") or not line.strip():
        return None
    try:
        given = orjson.loads(line)
        id, response, error = given["custom_id"], given["response"], given["error"]
        status = None if response is None else int(response["status_code"])
    except (ValueError, TypeError, KeyError):
        raise ConfigurationError(
            f"{path} holds something else than answers of a batch: give another OUTPUT"
        ) from None
    if error is not None or status is None or is_worth_another_try(status):
        return None
    return str(id), status
