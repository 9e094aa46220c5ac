"""What a shard prints is in the router's log, its warnings as such."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest

from tests.shard.loop.scripted_router import channel
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.router.shards.shard_instance import ShardInstance
from tgi_trio.shard.__main__ import find_image_source

PRINTS = """
from tgi_trio.ipc.shard_output import warn
print("as usual", flush=True)
warn("images are not served:\\n  no tower")
"""


@pytest.mark.trio
async def test_warnings_of_a_shard_are_logged_as_such(caplog: pytest.LogCaptureFixture) -> None:
    settings = ShardSettings(model_path=Path("/nonexistent"))
    with channel() as (endpoints, _), caplog.at_level(logging.INFO, "tgi_trio.shard"):
        argv = [sys.executable, "-c", PRINTS]
        with ShardInstance.spawn(lambda *_: argv, settings, endpoints, []) as shard:
            await shard.pump_output()
    assert [(each.levelname, each.message) for each in caplog.records] == [
        ("INFO", "shard 0 | as usual"),
        ("WARNING", "shard 0 | images are not served: no tower"),
    ]
    assert list(shard.last_lines) == ["as usual", "images are not served: no tower"]


@pytest.mark.trio
@pytest.mark.parametrize(
    ("program", "end"),
    [
        ("raise SystemExit(3)", ["It has printed nothing."]),
        ("print('a'); print('b')", ["Its last lines of output:", "    a", "    b"]),
    ],
)
async def test_the_report_of_a_shard_ends_with_what_it_has_printed(
    program: str, end: list[str]
) -> None:
    settings = ShardSettings(model_path=Path("/nonexistent"))
    with channel() as (endpoints, _):
        argv = [sys.executable, "-c", program]
        with ShardInstance.spawn(lambda *_: argv, settings, endpoints, []) as shard:
            await shard.wait_for_end()
            assert (await shard.finish()).splitlines()[1:] == end


def test_a_tower_that_cannot_be_loaded_is_warned_of(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "seer", "vision_config": {}}))
    source = find_image_source(ShardSettings(model_path=tmp_path, image_arena=0))
    assert source is not None
    queue = source(frozenset())
    with pytest.raises(ValueError, match=r"its images are not served: .*seer"):
        queue.add(None, ())  # type: ignore[arg-type]  # refused before it is looked at
    assert capfd.readouterr().err.startswith("<4>images are not served: ")
