"""Log records on a descriptor whose reader may have stopped, or whose disk may be full."""

from __future__ import annotations

import fcntl
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import orjson
import pytest

from tgi_trio.logs import DescriptorHandler, JsonFormatter, RecordStream, TextFormatter, say


@contextmanager
def piped() -> Iterator[tuple[logging.Logger, int]]:
    """Yield a logger that writes into a small pipe, and the pipe's reading end."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 8192)
    handler = DescriptorHandler(writer, TextFormatter())
    logger = logging.Logger("tgi_trio.test")
    logger.addHandler(handler)
    try:
        yield logger, reader
    finally:
        handler.close()
        os.close(reader)
        os.close(writer)


def drain(reader: int) -> str:
    os.set_blocking(reader, False)
    parts = []
    while True:
        try:
            parts.append(os.read(reader, 1 << 16))
        except BlockingIOError:
            return b"".join(parts).decode()


def test_a_reader_that_stops_costs_records_but_holds_nobody() -> None:
    with piped() as (logger, reader):
        for number in range(500):  # far more than the pipe takes; a write that blocks hangs here
            logger.info("record %d %s", number, "x" * 100)
        early = drain(reader)
        logger.info("read again")
        late = drain(reader)
    written = early.count("tgi_trio.test: record")
    assert 0 < written < 500
    assert "record 0 " in early
    assert f"{500 - written} log records were lost" in late
    assert late.endswith("tgi_trio.test: read again\n")


def test_a_record_longer_than_the_pipe_is_cut_at_what_it_takes() -> None:
    with piped() as (logger, reader):
        logger.info("long %s", "x" * 100_000)
        assert drain(reader).startswith("20")
        logger.info("next")
        cut, report, record = drain(reader).splitlines()
        assert not cut and "1 log record was lost" in report and record.endswith("test: next")


def test_a_closed_reader_and_a_full_disk_lose_records_silently(
    capfd: pytest.CaptureFixture[str],
) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    handler = DescriptorHandler(full, TextFormatter())
    logger = logging.Logger("tgi_trio.test")
    logger.addHandler(handler)
    logger.info("nowhere")
    os.close(full)
    logger.info("not even a descriptor")
    assert handler.lost == 2
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("records", [False, True])
def test_what_a_person_is_told_holds_nobody_either(
    monkeypatch: pytest.MonkeyPatch, records: bool
) -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 8192)
    with os.fdopen(writer, "w") as under:
        monkeypatch.setattr(sys, "stderr", RecordStream(under) if records else under)
        say("first", "second")
        say(*["x" * 100] * 200)  # far more than the pipe takes; a write that blocks hangs here
        assert drain(reader).startswith("first\nsecond\nxxx")
        say("read again")
        assert drain(reader).endswith("read again\n")
    os.close(reader)


def test_both_formats_show_what_was_passed_as_extra() -> None:
    record = logging.makeLogRecord(
        {"msg": "done %d", "args": (3,), "name": "n", "levelname": "INFO", "tokens": 7}
    )
    assert TextFormatter().format(record).endswith("INFO    n: done 3 tokens=7")
    fields = orjson.loads(JsonFormatter().format(record))
    assert (fields["message"], fields["tokens"], fields["target"]) == ("done 3", 7, "n")
