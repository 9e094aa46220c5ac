"""The examples run as their readers run them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.warm_start import run_warm
from tests.system.server import serving

EXAMPLES = Path(__file__).parents[2] / "examples"
ALONE = ("offline.py", "custom_sampler.py")
CLIENTS = ("chat_client.py", "native_client.py", "tools_client.py")

PROGRAM = """
import runpy, sys
del sys.argv[0]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""  # what `python FILE WORDS` does


def run(name: str, *arguments: str) -> str:
    words = ("-c", PROGRAM, str(EXAMPLES / name), *arguments)
    done = run_warm(*words, shards="plain" if name in ALONE else "")
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as server:
        yield server.url


def test_every_example_is_listed_and_run() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {*ALONE, *CLIENTS}
    readme = (EXAMPLES / "README.md").read_text()
    assert all(f"[{name}]({name})" in readme for name in names)


def test_offline_generation_continues_every_prompt() -> None:
    lines = run("offline.py").splitlines()
    assert lines[0].startswith("Continuous batching is|")
    assert all(len(line.partition("|")[2]) > 10 for line in lines[:1])


def test_a_custom_sampler_has_the_last_word() -> None:
    written = run("custom_sampler.py")
    assert len(written) > 10
    assert "e" not in written.lower()


@pytest.mark.system
def test_chat_client(url: str) -> None:
    *chat, last = run("chat_client.py", url).splitlines()
    assert "".join(chat)
    assert set(json.loads(last)) >= {"city", "large"}


@pytest.mark.system
def test_native_client(url: str) -> None:
    streamed, details = run("native_client.py", url).rsplit("\n", 2)[:2]
    assert streamed
    assert details.endswith("tokens")


@pytest.mark.system
def test_tools_client(url: str) -> None:
    called, *answered = run("tools_client.py", url).splitlines()
    assert called.startswith("called: get_weather {'city': ")
    assert answered[0].startswith("answered:")
