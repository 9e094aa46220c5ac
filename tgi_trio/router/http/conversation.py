"""From the messages and tools of a chat to the prompt that the model's template makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson
from msgspec import to_builtins

from tgi_trio.errors import GrammarError, TemplateError, ToolError, ValidationError
from tgi_trio.router.http.call import Call
from tgi_trio.router.http.messages import schema
from tgi_trio.router.http.messages.problems import Refused
from tgi_trio.router.http.messages.response_format import forms
from tgi_trio.router.http.messages.tool_calls import AnswerReader, new_call_id
from tgi_trio.router.text import grammars
from tgi_trio.router.text.chat_template import ChatTemplate
from tgi_trio.router.text.tools.call_formats import Format, format_of
from tgi_trio.router.text.tools.call_parser import CallParser
from tgi_trio.router.text.tools.functions import Function, ToolUse, tool_use
from tgi_trio.router.text.tools.grammar import tool_grammar

# For templates that know nothing of tools; the format is the one `format_of` gives for them.
_TOOL_PROMPT = """
These are functions you can call. To call one, answer with its name and its arguments as JSON:
<tool_call>
{"name": the function's name, "arguments": an object of its parameters}
</tool_call>
Write values, not variables. If no function helps, answer in your own words.
"""


@dataclass(frozen=True, slots=True)
class ChatTools:
    """The tools that the answer to one chat may call."""

    use: ToolUse
    format: Format
    listed: Sequence[Mapping[str, Any]]  # as the template shows them
    added: Mapping[str, int]  # the tokenizer's added tokens, special or not: text -> id

    def grammar(self, most: int) -> str:
        """Return what the answer must look like, for the shard.

        Raises GrammarError where the schemas of the tools are more than `most` bytes together.
        """
        grammars.check_size([function.schema for function in self.use.functions], most)
        return tool_grammar(self.format, self.use, self.added)

    def reader(self) -> AnswerReader:
        """Return what reads one answer."""
        parser = CallParser(self.format, new_call_id, required=self.use.required)
        texts = "".join(self.format.texts)
        marks = {id: text for text, id in self.added.items() if text and text in texts}
        return AnswerReader(parser, marks)


def chat_tools(call: Call, request: schema.ChatRequest) -> ChatTools | None:
    """Return the tools a chat may call; None where there are none.

    Raises ToolError and BodyRejected.
    """
    choice = request.tool_choice
    if choice == "none":
        return None
    if request.tools is not None and (given := forms(request)):
        form = ", ".join(f"`{each}`" for each in given)
        raise ToolError(
            f"Grammar and tools are mutually exclusive: {form} beside `tools` (leave one of them "
            'out, or set `tool_choice` to "none")'
        )
    functions = [_function(tool, i) for i, tool in enumerate(request.tools or [])]
    named = isinstance(choice, schema.NamedToolChoice)
    use = tool_use(
        functions,
        choice.function.name if isinstance(choice, schema.NamedToolChoice) else choice,
        named=named,
        parallel=request.parallel_tool_calls is not False,
    )
    if use is None:
        return None
    template = call.engine.chat_template
    names = {function.name for function in use.functions}
    return ChatTools(
        use=use,
        format=format_of(template.source(tools=True) if template is not None else ""),
        listed=[_to_listed_tool(t) for t in request.tools or [] if t["function"]["name"] in names],
        added=call.engine.tokenizer.added_tokens,
    )


async def explain_tool_error(call: Call, tools: ChatTools) -> None:
    """Raise ToolError for the first tool whose arguments have no grammar, if there is one."""
    for function in tools.use.functions:
        try:
            await call.engine.validator.check_grammar(grammars.json_schema(function.schema))
        except GrammarError as error:
            raise ToolError(f"the `parameters` of `{function.name}`: {error}") from error


def _function(tool: Mapping[str, Any], i: int) -> Function:
    found = schema.convert_body(tool, schema.Tool, f"tools[{i}]").function
    return Function.of(
        found.name, found.arguments if found.parameters is None else found.parameters
    )


def _to_listed_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool as it was sent, but for TGI's other name of `parameters`."""
    function = tool["function"]
    if "parameters" in function or "arguments" not in function:
        return tool
    renamed = {"parameters" if k == "arguments" else k: v for k, v in function.items()}
    return {**tool, "function": renamed}


# ---- the prompt --------------------------------------------------------------------------------


def render_prompt(call: Call, request: schema.ChatRequest, tools: ChatTools | None = None) -> str:
    """Return the prompt that the model's template makes of the messages and the tools.

    Raises TemplateError, and Refused for what is not supported.
    """
    template = call.engine.chat_template
    if template is None:
        raise TemplateError("template not found")
    shown = tools is not None and template.uses("tools", tools=True)
    messages = [_template_message(message, i) for i, message in enumerate(request.messages)]
    if "tool_calls" not in template.source(tools=shown):
        messages = [_flatten_content(message) for message in messages]
    if tools is not None:
        _append_tool_prompt(messages, request.tool_prompt, None if shown else tools.listed)
    return template.render(
        messages,
        tools=tools.listed if tools is not None and shown else None,
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=_continues(request, messages),
        documents=request.documents,
        **_variables(request, template, tools=shown),
    )


def _continues(request: schema.ChatRequest, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the answer goes on with the last message; raises Refused."""
    begins = request.add_generation_prompt is True
    if request.continue_final_message is None:
        # TGI continues a final message of the assistant by itself.
        last = messages[-1] if messages else {}
        return not begins and last.get("role") == "assistant" and bool(last.get("content"))
    if begins and request.continue_final_message:
        text = (
            "`continue_final_message` and `add_generation_prompt` cannot both be true: the one "
            "goes on with the last message, the other begins a new one"
        )
        raise Refused(422, f"Input validation error: {text}", "validation")
    return request.continue_final_message


_OURS = frozenset(
    {"self", "messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)


def _variables(
    request: schema.ChatRequest, template: ChatTemplate, *, tools: bool
) -> dict[str, Any]:
    """Return the variables of a client's own; raises BodyRejected and ValidationError."""
    variables, effort = request.chat_template_kwargs or {}, request.reasoning_effort
    ours = _OURS if effort is None else _OURS | {"reasoning_effort"}
    for name in variables:
        if name in ours:
            raise schema.invalid_value("chat_template_kwargs", f"`{name}` has a field of its own")
    if effort is None:
        return variables
    if not template.uses("reasoning_effort", tools=tools):
        raise ValidationError(
            "`reasoning_effort` is not supported: the chat template of this model does not read it"
        )
    return {**variables, "reasoning_effort": effort}


def _append_tool_prompt(
    messages: Sequence[dict[str, Any]], prompt: str | None, tools: Sequence[Any] | None
) -> None:
    """Tell the model of its tools in the last message, as TGI does it.

    `tools` are those that the template does not show. One that shows them speaks for itself, so
    that only a prompt of the client's own is added.
    """
    if tools is not None:
        text = f"{orjson.dumps(tools).decode()}\n{prompt or _TOOL_PROMPT}"
    elif prompt:
        text = prompt
    else:
        return
    if messages and isinstance(messages[-1].get("content"), str):
        messages[-1]["content"] += f"\n---\n{text}"


# ---- messages ----------------------------------------------------------------------------------


def _template_message(message: schema.Message, i: int) -> dict[str, Any]:
    """Return a message as templates expect it: plain values, text content in one piece."""
    fields: dict[str, Any] = to_builtins(message)
    if isinstance(message.content, list):
        fields["content"] = "".join(_text_of(chunk, i) for chunk in message.content)
    elif message.content is None and message.tool_calls is None:
        raise schema.invalid_value(f"messages[{i}]", "needs `content` or `tool_calls`")
    if message.tool_calls is not None:
        fields["tool_calls"] = [_template_call(each) for each in message.tool_calls]
    return {name: value for name, value in fields.items() if value is not None}


def _text_of(chunk: schema.MessageChunk, i: int) -> str:
    if chunk.type == "image_url":
        text = f"messages[{i}] holds an image, and images are not supported yet"
        raise Refused(422, f"Input validation error: {text}", "validation")
    if chunk.text is None:
        raise schema.invalid_value(f"messages[{i}].content", "a text part needs `text`")
    return chunk.text


def _template_call(each: schema.ToolCall) -> dict[str, Any]:
    """Return a call of an earlier turn; templates write its arguments as JSON themselves."""
    function, arguments = each.function, each.function.arguments
    if arguments is None:
        arguments = function.parameters if function.parameters is not None else {}
    if isinstance(arguments, str):
        with suppress(msgspec.DecodeError):  # text that is no JSON is shown as it is
            arguments = msgspec.json.decode(arguments or "{}")
    made = {"type": each.type, "function": {"name": function.name, "arguments": arguments}}
    return made if each.id is None else {"id": each.id, **made}


def _flatten_content(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose calls are text, for a template that would drop them."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    form = format_of("")
    text = form.write((c["function"]["name"], c["function"]["arguments"]) for c in calls)
    return {**message, "content": "\n".join(filter(None, (message.get("content"), text)))}
