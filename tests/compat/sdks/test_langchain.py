"""LangChain's models of Anthropic's and of OpenAI's APIs, with tools."""

from __future__ import annotations

from typing import Any

import pytest

from tests.compat.agents.scripted import ANSWER, COMMAND, CONTEXT, QUESTION
from tests.compat.sdks.conftest import TOOL, Shell
from tests.system.server import ServerProcess

pytest.importorskip("langchain_anthropic", reason="pip install -e '.[sdks]'")
pytest.importorskip("langchain_openai", reason="pip install -e '.[sdks]'")
pytestmark = pytest.mark.system


def model_of(api: str, url: str) -> Any:
    from langchain_anthropic import ChatAnthropic
    from langchain_openai import ChatOpenAI

    if api == "anthropic":
        options: Any = {"base_url": url, "api_key": "-", "max_retries": 0}
        return ChatAnthropic(model_name="scripted", **options)
    options = {"base_url": f"{url}/v1", "api_key": "-", "max_retries": 0}
    return ChatOpenAI(model="scripted", use_responses_api=api == "responses", **options)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])
def test_a_round(api: str, scripted: ServerProcess, shell: Shell, stream: bool) -> None:
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
    from langchain_core.tools import StructuredTool

    tool = StructuredTool.from_function(shell.run, name=TOOL)
    model = model_of(api, scripted.url).bind_tools([tool])
    messages: list[Any] = [SystemMessage("Be brief."), HumanMessage(QUESTION)]

    def answer() -> Any:
        if not stream:
            return model.invoke(messages)
        first, *more = model.stream(messages)
        for piece in more:
            first += piece
        return first

    first = answer()
    (call,) = first.tool_calls
    result = ToolMessage(tool.invoke(call["args"]), tool_call_id=call["id"])
    messages += [first, result]
    assert answer().text == ANSWER and shell.commands == [COMMAND]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["chat", "responses", "anthropic"])
def test_a_prompt_that_is_too_long_is_known_as_such(
    api: str, scripted: ServerProcess, stream: bool
) -> None:
    from langchain_core.exceptions import ContextOverflowError

    model = model_of(api, scripted.url)
    with pytest.raises(ContextOverflowError):
        list(model.stream("ab " * CONTEXT)) if stream else model.invoke("ab " * CONTEXT)
