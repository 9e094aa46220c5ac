"""Keys that are exchanged while the server runs."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import trio
import trio.testing

from tgi_trio.file_watch import LOOK_SECONDS
from tgi_trio.router.http.key_watch import watch_keys
from tgi_trio.settings.keys import Keys

pytestmark = pytest.mark.trio


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("one\n")
    return path


def exchange(file: Path, content: bytes) -> None:
    """Put another file in the place of one, as editors and mounted secrets do it."""
    other = file.with_name("other")
    other.write_bytes(content)
    os.replace(other, file)


async def looks(clock: trio.testing.MockClock) -> None:
    """Wait until the file has been looked at."""
    await trio.testing.wait_all_tasks_blocked()
    clock.jump(LOOK_SECONDS)
    await trio.testing.wait_all_tasks_blocked()


async def test_keys_are_those_of_the_file_as_it_is_now(
    file: Path, mock_clock: trio.testing.MockClock
) -> None:
    taken: list[tuple[str, ...]] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch_keys, Keys(("a",), file), ("a", "one"), taken.append)
        await looks(mock_clock)
        assert taken == []
        exchange(file, b"two\nthree\n")
        await looks(mock_clock)
        await looks(mock_clock)
        assert taken == [("a", "two", "three")]
        file.write_text("four")
        await looks(mock_clock)
        assert taken[1:] == [("a", "four")]
        nursery.cancel_scope.cancel()


async def test_a_file_that_changed_before_it_was_watched(
    file: Path, mock_clock: trio.testing.MockClock
) -> None:
    taken: list[tuple[str, ...]] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch_keys, Keys((), file), ("zero",), taken.append)
        await looks(mock_clock)
        nursery.cancel_scope.cancel()
    assert taken == [("one",)]


@pytest.mark.parametrize("content", [None, b"", b" \n", b"hush\xff", b"hu\x07sh"])
async def test_a_file_without_keys_changes_none(
    file: Path,
    mock_clock: trio.testing.MockClock,
    caplog: pytest.LogCaptureFixture,
    content: bytes | None,
) -> None:
    taken: list[tuple[str, ...]] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch_keys, Keys((), file), ("one",), taken.append)
        await looks(mock_clock)
        with caplog.at_level(logging.WARNING):
            if content is None:
                file.unlink()
            else:
                exchange(file, content)
            await looks(mock_clock)
            await looks(mock_clock)
        assert [each.levelname for each in caplog.records] == ["WARNING"]
        assert "the keys stay as they are" in caplog.text and "hu" not in caplog.text
        assert taken == []
        exchange(file, b"two")
        await looks(mock_clock)
        nursery.cancel_scope.cancel()
    assert taken == [("two",)]


async def test_without_a_file_nothing_is_watched() -> None:
    await watch_keys(Keys(("a",)), ("a",), lambda keys: None)
