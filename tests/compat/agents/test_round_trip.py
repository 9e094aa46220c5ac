"""Coding agents do a task of one command against a scripted model: call, result, answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.compat.agents import packages
from tests.compat.agents.isolation import namespace
from tests.compat.agents.programs import AGENTS
from tests.compat.agents.scripted import ANSWER, FAMILIES
from tests.compat.npm import NotInstalled

ROOT = Path(__file__).parents[3]
PATIENCE = 600  # seconds

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(2 * PATIENCE),  # for the programs to come, and for an agent's task
    pytest.mark.skipif(
        not os.environ.get("TEST_NPM"), reason="`make test-agents` fetches the agents' programs"
    ),
]


@pytest.fixture(scope="module")
def installed() -> Path:
    try:
        return packages.install()
    except NotInstalled as error:
        pytest.skip(f"the agents' programs are not there: {error}")


def do_task(agent: str, family: str, installed: Path) -> dict[str, Any]:
    """Let an agent do the task without a network, or, where that cannot be had, say why."""
    prefix, why = namespace()
    if why:
        print(f"no network namespace ({why}): proxies of the agents lead nowhere instead")
    program = [sys.executable, "-m", "tests.compat.agents.round_trip"]
    argv = [*prefix, *program, agent, family, str(installed), "up" if prefix else "as-is"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    assert result["rc"] == 0, (result["output"], result["errors"])
    return result


def told(agent: str, output: str) -> str:
    """Return what the agent tells the person who asked."""
    if agent == "claude-code":
        return str(json.loads(output)["result"])
    events = [json.loads(line) for line in output.splitlines() if line]
    if agent == "opencode":
        return str([each["part"]["text"] for each in events if each["type"] == "text"][-1])
    items = [each.get("item", {}) for each in events]
    return str([item["text"] for item in items if item.get("type") == "agent_message"][-1])


def of_the_task(requests: Iterable[dict[str, Any]], route: str) -> list[dict[str, Any]]:
    """Return the requests with the agent's tools; a title is asked for with a short prompt."""
    ours = [each for each in requests if route in json.dumps(each)]
    longest = max(each["prompt_tokens"] for each in ours)
    return [each for each in ours if each["prompt_tokens"] > longest / 2]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_calls_its_shell_and_tells_what_it_found(
    agent: str, family: str, installed: Path
) -> None:
    result = do_task(agent, family, installed)
    assert told(agent, result["output"]).strip() == ANSWER
    first, *_, last = of_the_task(result["requests"], AGENTS[agent].route)
    assert last["prompt_tokens"] > first["prompt_tokens"] > 5000
    # The history goes on where it ended: hardly anything is computed again.
    assert last["cached_tokens"] >= 0.9 * last["prompt_tokens"]
