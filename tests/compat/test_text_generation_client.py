"""HF's `text-generation` client, in an environment of its own.

It asks for huggingface_hub below 1.0, which transformers 5 does not work with. So it is installed
into a virtual environment in pytest's cache, once; where that cannot be done the tests are skipped.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.system.server import ServerProcess

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]  # it may have to be installed

PACKAGE = "text-generation==0.7.0"
CALLS = Path(__file__).parent / "clients" / "text_generation_calls.py"


def run(*words: str | Path, timeout: float) -> str:
    """Run a command and return what it printed; raises CalledProcessError and TimeoutExpired."""
    return subprocess.run(
        [str(word) for word in words], check=True, capture_output=True, text=True, timeout=timeout
    ).stdout


@pytest.fixture(scope="module")
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter that can import the client."""
    cache = getattr(request.config, "cache", None)  # absent under -p no:cacheprovider
    name = "text-generation-client"
    folder = Path(cache.mkdir(name)) if cache is not None else tmp_path_factory.mktemp(name)
    interpreter, ready = folder / "bin" / "python", folder / "ready"
    if not ready.exists() or ready.read_text() != PACKAGE:
        try:
            run(sys.executable, "-m", "venv", "--without-pip", "--clear", folder, timeout=240)
            pip = (sys.executable, "-m", "pip", "--python", interpreter)
            # Python compiles what is imported of it, and only that.
            run(*pip, "install", "--quiet", "--no-compile", PACKAGE, timeout=240)
        except (subprocess.SubprocessError, OSError) as error:
            pytest.skip(f"{PACKAGE} cannot be installed: {error}")
        ready.write_text(PACKAGE)
    return interpreter


@pytest.fixture(scope="module")
def seen(python: Path, served: ServerProcess) -> dict[str, Any]:
    """What the client's calls returned."""
    result = subprocess.run(
        [python, CALLS, served.url], capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_stream_says_what_the_body_says(seen: dict[str, Any], kind: str) -> None:
    whole, events = seen[kind]["whole"], seen[kind]["events"]
    text = "".join(event["token"]["text"] for event in events)
    assert text == whole["generated_text"] == events[-1]["generated_text"]
    assert [event["generated_text"] for event in events[:-1]] == [None] * 5
    for details in (whole["details"], events[-1]["details"]):
        assert (details["finish_reason"], details["generated_tokens"]) == ("length", 6)
    assert [token["id"] for token in whole["details"]["tokens"]] == [
        event["token"]["id"] for event in events
    ]


def test_details_reach_the_clients_types(seen: dict[str, Any]) -> None:
    details = seen["sync"]["whole"]["details"]
    assert details["prefill"][0]["logprob"] is None
    assert all(token["logprob"] < 0 for token in details["prefill"][1:])
    assert [len(top) for top in details["top_tokens"]] == [2] * 6
    assert len(seen["sync"]["best_of"]["details"]["best_of_sequences"]) == 1
    stopped = seen["sync"]["stopped"]
    assert stopped["details"]["finish_reason"] == "stop_sequence"
    assert stopped["generated_text"].endswith(" ")


def test_a_chat_reaches_the_clients_types(seen: dict[str, Any]) -> None:
    chat = seen["sync"]["chat"]
    assert chat["usage"]["completion_tokens"] == 4
    assert chat["choices"][0]["message"]["content"]
    assert chat["choices"][0]["finish_reason"] == "length"


def test_refusals_are_the_clients_exceptions(seen: dict[str, Any]) -> None:
    refusal = seen["sync"]["refusal"]
    assert refusal.startswith("Input validation error: `inputs` tokens + `max_new_tokens` must be")
