"""The tools of `openai-agents` that OpenAI defines and clients run: a shell, patches of files."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from openai import AsyncOpenAI

from tests.compat.agents.scripted import ANSWER, COMMAND, FOUND, QUESTION
from tests.compat.sdks.conftest import THINKING, serving_script

package = pytest.importorskip("agents", reason="pip install -e '.[sdks]'")
pytestmark = pytest.mark.system

PATCH: Final = {"type": "update_file", "path": "notes/sum.md", "diff": "@@\n-a\n+b\n"}
ARGUMENTS: Final = {"shell": {"commands": [COMMAND], "timeout_ms": 5000}, "apply_patch": PATCH}


class Client:
    """Runs what it is asked to, and remembers it."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def shell(self, request: Any) -> Any:
        """Run commands: an executor of `ShellTool`."""
        action = request.data.action
        self.asked.append({"commands": action.commands, "timeout_ms": action.timeout_ms})
        outcome = package.ShellCallOutcome("exit", 0)
        return package.ShellResult([package.ShellCommandOutput(f"{FOUND}\n", outcome=outcome)])

    def update_file(self, operation: Any) -> Any:
        """Change a file: of an `ApplyPatchEditor`."""
        self.asked.append({name: getattr(operation, name) for name in PATCH})
        return package.ApplyPatchResult("completed", FOUND)

    create_file = delete_file = update_file


@pytest.mark.parametrize("tool", ARGUMENTS)
def test_a_run_and_a_stream(tool: str, tmp_path: Path) -> None:
    package.set_tracing_disabled(True)
    client = Client()
    tools = {
        "shell": package.ShellTool(client.shell),
        "apply_patch": package.ApplyPatchTool(client),
    }
    call = json.dumps({"name": tool, "arguments": ARGUMENTS[tool]})
    family = replace(THINKING, call=lambda *_: f"</think><tool_call>\n{call}\n</tool_call>")
    with serving_script(family, tool, tmp_path) as server:

        async def run() -> list[Any]:
            openai = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
            model = package.OpenAIResponsesModel("scripted", openai_client=openai)
            agent = package.Agent(name="one", model=model, tools=[tools[tool]])
            whole = await package.Runner.run(agent, QUESTION)
            streamed = package.Runner.run_streamed(agent, QUESTION)
            async for _ in streamed.stream_events():
                pass
            return [whole.final_output, streamed.final_output]

        assert asyncio.run(run()) == [ANSWER, ANSWER]
    assert client.asked == [ARGUMENTS[tool]] * 2
