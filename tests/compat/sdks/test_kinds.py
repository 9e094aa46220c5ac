"""Each kind of item, block and tool that the SDKs' types have is one that somebody has decided on.

A release with another kind fails here, until it is read, or is known to say nothing to a model.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import pytest
from openai.types.responses.response_input_item_param import ResponseInputItemParam
from openai.types.responses.tool_param import ToolParam

from tests.compat.sdks.drawing import alternatives, draw, kind
from tests.router.http.dialects import anthropic_answers, responses_answers
from tests.router.http.dialects.conversations import engine
from tests.router.http.served import served

pytest.importorskip("anthropic.types", reason="pip install -e '.[sdks]'")

DOCS: Final = Path(__file__).parents[3] / "docs"
USER: Final = {"role": "user", "content": "Rain?"}


def _anthropic() -> tuple[Any, Any]:
    from anthropic.types import beta

    return beta.BetaContentBlockParam, beta.BetaToolUnionParam


BLOCK, TOOL = _anthropic()
# What is read; a second set says less, or nothing, of what OpenAI's own tools did.
ITEMS: Final = frozenset(
    {
        *("message", "reasoning", "function_call", "function_call_output", "custom_tool_call"),
        *("custom_tool_call_output", "local_shell_call", "local_shell_call_output"),
        *("shell_call", "shell_call_output", "apply_patch_call", "apply_patch_call_output"),
        *("additional_tools", "tool_search_output", "configuration_update", "compaction"),
        *("compaction_trigger", "item_reference"),
    }
)
PASSED_OVER: Final = frozenset(
    {
        *("code_interpreter_call", "computer_call"),
        *("computer_call_output", "file_search_call", "image_generation_call", "mcp_call"),
        *("mcp_approval_request", "mcp_approval_response", "mcp_list_tools", "program"),
        *("program_output", "tool_search_call"),
        "web_search_call",
    }
)
BLOCKS: Final = frozenset(
    {
        *("text", "image", "document", "search_result", "tool_use", "tool_result", "thinking"),
        *("compaction", "container_upload", "tool_addition", "tool_removal"),
    }
)
LEFT_OUT: Final = frozenset(
    {
        *("redacted_thinking", "server_tool_use", "fallback", "mcp_tool_listing", "mcp_tool_use"),
        *("mcp_tool_result", "advisor_tool_result", "bash_code_execution_tool_result"),
        *("code_execution_tool_result", "text_editor_code_execution_tool_result"),
        *("tool_search_tool_result", "web_fetch_tool_result", "web_search_tool_result"),
    }
)
TOOLS: Final = frozenset({"function", "custom", "namespace", "local_shell", "shell", "apply_patch"})
IGNORED_TOOLS: Final = frozenset(
    {
        *("code_interpreter", "computer", "computer_use_preview", "file_search"),
        *("image_generation", "mcp", "programmatic_tool_calling", "tool_search"),
        *("web_search", "web_search_preview"),
    }
)
# Anthropic's, without the dates of their versions.
CLIENT_TOOLS: Final = frozenset({"bash", "memory", "text_editor"})
ANTHROPICS_TOOLS: Final = frozenset(
    {
        *("advisor", "browser_toolset", "code_execution", "computer", "computer_toolset"),
        *("mcp_toolset", "tool_search_tool_bm25", "tool_search_tool_regex"),
        *("web_fetch", "web_search"),
    }
)


def kinds(union: Any) -> dict[str, Any]:
    """Return the types of a union by their kinds."""
    shapes = [each for each in alternatives(union) if not hasattr(each, "model_fields")]
    return {kind(each) or each.__name__: each for each in shapes}


def undated(name: str) -> str:
    head, _, tail = name.rpartition("_")
    return head if tail.isdigit() else name


def test_every_kind_is_known() -> None:
    items = kinds(ResponseInputItemParam).keys() - {"ItemReference"} | {"item_reference"}
    assert items == ITEMS | PASSED_OVER
    assert kinds(ToolParam).keys() == TOOLS | IGNORED_TOOLS
    assert kinds(BLOCK).keys() == BLOCKS | LEFT_OUT
    tools = {undated(each) for each in kinds(TOOL).keys() - {"BetaToolParam"}}
    assert tools == ANTHROPICS_TOOLS | CLIENT_TOOLS


@pytest.mark.parametrize(
    ("page", "names"),
    [("responses.md", ITEMS | TOOLS), ("messages.md", BLOCKS | CLIENT_TOOLS)],
)
def test_what_is_read_is_documented(page: str, names: Collection[str]) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert not {name for name in names if f"`{name}`" not in text}


async def prompts(path: str, bodies: Collection[dict[str, Any]]) -> list[str]:
    """Return the prompts that bodies become."""
    one = engine()
    async with served(one) as server:
        client = await server.connect()
        for body in bodies:
            answer = await client.post(path, body)
            assert answer.status == 200, (answer.body, body)
    return one.prompts


@pytest.mark.trio
async def test_kinds_that_say_nothing_leave_the_prompt_alone() -> None:
    source = random.Random(1)
    shapes = kinds(ResponseInputItemParam)
    items = [draw(shapes[each], source) for each in sorted(PASSED_OVER) for _ in range(3)]
    asked = [{**responses_answers.BODY, "input": [USER, item]} for item in items]
    tools = [draw(shape, source) for name, shape in kinds(ToolParam).items() if name not in TOOLS]
    asked += [{**responses_answers.BODY, "tools": [tool]} for tool in tools]
    assert set(await prompts(responses_answers.PATH, asked)) == {"<user>Rain?<end><assistant>"}

    found = kinds(BLOCK)
    blocks = [draw(found[each], source) for each in sorted(LEFT_OUT) for _ in range(3)]
    said = {"type": "text", "text": "Yes."}
    turns = [{"role": "assistant", "content": [said, block]} for block in blocks]
    asked = [{**anthropic_answers.BODY, "messages": [USER, turn, USER]} for turn in turns]
    told = set(await prompts(anthropic_answers.PATH, asked))
    assert told == {"<user>Rain?<end><assistant>Yes.<end><user>Rain?<end><assistant>"}
    given = [
        draw(shape, source)
        for name, shape in kinds(TOOL).items()
        if undated(name) in ANTHROPICS_TOOLS
    ]
    asked = [{**anthropic_answers.BODY, "tools": [tool]} for tool in given]
    assert set(await prompts(anthropic_answers.PATH, asked)) == {"<user>Rain?<end><assistant>"}


@pytest.mark.trio
@pytest.mark.parametrize("name", sorted(ITEMS - {"item_reference"}))
async def test_items_that_say_something_are_heard(name: str) -> None:
    source = random.Random(name)
    shape = kinds(ResponseInputItemParam)[name]
    options = {"reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}}}
    one = engine(template="{{ tools }}{{ messages }}{{ reasoning_effort }}{# enable_thinking #}")
    changed = 0
    async with served(one) as server:
        client = await server.connect()
        body = {**responses_answers.BODY, **options}
        call = {"type": "function_call", "call_id": "x", "name": "f", "arguments": "{}"}
        for alone in ([USER], [USER, call]):
            await client.post(responses_answers.PATH, {**body, "input": alone})
        for _ in range(12):
            items = [USER, draw(shape, source), *([call] if name == "reasoning" else [])]
            answer = await client.post(responses_answers.PATH, {**body, "input": items})
            refused = answer.status in (400, 404)
            heard = refused or one.prompts[-1] != one.prompts[1 if name == "reasoning" else 0]
            changed += heard or bool(one.submitted[-1].sampling.grammar)
    assert changed
