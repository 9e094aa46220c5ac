"""Clients in JavaScript: what applications and pages use."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.compat.agents.scripted import ANSWER, COMMAND, FOUND, QUESTION
from tests.compat.npm import NotInstalled, install_packages
from tests.compat.sdks.conftest import scripted  # noqa: F401
from tests.system.server import ServerProcess

HERE: Final = Path(__file__).parent
SECONDS: Final = 300
# As they were when the tests were written: a newer one may ask for what nobody has looked at.
VERSIONS: Final = {
    "@ai-sdk/anthropic": "3.0.140",
    "@ai-sdk/openai": "3.0.141",
    "@ai-sdk/openai-compatible": "2.0.92",
    "@huggingface/inference": "4.13.30",
    "ai": "6.0.326",
    "openai": "6.49.0",
    "zod": "4.6.7",
}
LEFT: Final = ({"side": "left"}, {"side": "right"})
THOUGHTS: Final = ["The shell will know.", "It is there."]

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(3 * SECONDS),  # for the packages to come, and for the calls
    pytest.mark.skipif(
        not os.environ.get("TEST_NPM"), reason="`make test-javascript` fetches the packages"
    ),
]
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs one of the programs beside this file; returns what it prints."""
    try:
        packages = install_packages("javascript", VERSIONS)
    except NotInstalled as error:
        pytest.skip(f"the packages are not there: {error}")
    programs = packages / f"programs-{os.getpid()}"  # node looks for packages above a program
    programs.mkdir()

    def run_program(name: str, *arguments: str) -> Any:
        shutil.copy(HERE / name, programs)
        argv = ["node", str(programs / name), *arguments]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    yield run_program
    shutil.rmtree(programs)


@pytest.mark.parametrize(
    ("provider", "thoughts"),
    [
        ("anthropic", THOUGHTS),
        ("chat", [None, None]),  # which this provider does not read
        ("compatible", THOUGHTS),
        ("responses", ["", ""]),  # it reads summaries
        ("responses, unstored", ["", ""]),
        ("responses, summary", THOUGHTS),
    ],
)
def test_vercels_sdk_runs_a_tool(
    scripted: ServerProcess,  # noqa: F811
    served: ServerProcess,
    run: Run,
    provider: str,
    thoughts: list[str | None],
) -> None:
    told = run("vercel.mjs", scripted.url, provider, QUESTION, FOUND, served.url)
    assert told["text"] == told["streamed"] == ANSWER
    assert told["commands"] == [COMMAND, COMMAND]
    assert told["reasons"] == ["tool-calls", "stop"] and told["thoughts"] == thoughts
    assert told["input"][0] < told["input"][1]
    assert {"tool-call", "tool-result", "text-delta", "finish"} <= set(told["kinds"])
    assert told["object"] in LEFT


def test_hugging_faces_client_needs_an_address_alone(served: ServerProcess, run: Run) -> None:
    told = run("hugging_face.mjs", served.url, "What is a ring buffer?")
    assert told["text"] and told["chat"] and told["streamed"] == told["chat"]


def test_openais_package(scripted: ServerProcess, served: ServerProcess, run: Run) -> None:  # noqa: F811
    told = run("openai.mjs", scripted.url, QUESTION, FOUND, served.url)
    assert told["ran"] == ANSWER and told["commands"] == [COMMAND]
    assert told["chat"] in LEFT and told["response"] in LEFT
    assert told["output"] == ["reasoning", "function_call"]
    assert told["listed"] == ["message", "reasoning", "message", "message"] and told["gone"] is True
