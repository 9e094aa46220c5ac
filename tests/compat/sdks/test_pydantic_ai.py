"""The `pydantic-ai` package: its loop of tools over three APIs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.compat.agents.scripted import ANSWER, COMMAND, CONTEXT, QUESTION, THOUGHT
from tests.compat.sdks.conftest import TOOL, Shell
from tests.system.server import ServerProcess

package = pytest.importorskip("pydantic_ai", reason="pip install -e '.[sdks]'")
pytestmark = pytest.mark.system


def model_of(api: str, url: str) -> Any:
    if api == "anthropic":
        from pydantic_ai.models.anthropic import AnthropicModel
        from pydantic_ai.providers.anthropic import AnthropicProvider

        return AnthropicModel("scripted", provider=AnthropicProvider(base_url=url, api_key="-"))
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="-")
    kind = OpenAIChatModel if api == "chat" else OpenAIResponsesModel
    return kind("scripted", provider=provider)


@pytest.fixture(params=["chat", "responses", "anthropic"])
def agent(request: pytest.FixtureRequest, scripted: ServerProcess, shell: Shell) -> Any:
    model = model_of(request.param, scripted.url)
    tool = package.Tool(shell.run, name=TOOL)
    return package.Agent(model, instructions="Be brief.", tools=[tool])


def thoughts(result: Any) -> str:
    """Return what was thought; that of a response is kept apart from its summary."""
    parts = [part for message in result.all_messages() for part in message.parts]
    thoughts = [part for part in parts if part.part_kind == "thinking"]
    raw = [
        text for part in thoughts for text in (part.provider_details or {}).get("raw_content", ())
    ]
    return "\n".join([*(part.content for part in thoughts), *raw])


def test_a_run(agent: Any, shell: Shell) -> None:
    result = asyncio.run(agent.run(QUESTION))
    assert result.output == ANSWER and shell.commands == [COMMAND]
    assert THOUGHT in thoughts(result)


def test_a_stream(agent: Any, shell: Shell) -> None:
    async def run() -> Any:
        async with agent.run_stream(QUESTION) as result:
            text = ""
            async for piece in result.stream_text(delta=True):
                text += piece
            return text

    assert asyncio.run(run()) == ANSWER
    assert shell.commands == [COMMAND]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])
def test_a_prompt_that_is_too_long_is_known_as_such(
    api: str, scripted: ServerProcess, stream: bool
) -> None:
    from pydantic_ai.exceptions import ModelContextWindowExceededError

    agent = package.Agent(model_of(api, scripted.url))

    async def ask() -> None:
        if not stream:
            await agent.run("ab " * CONTEXT)
            return
        async with agent.run_stream("ab " * CONTEXT) as result:
            await result.get_output()

    with pytest.raises(ModelContextWindowExceededError):
        asyncio.run(ask())
