"""Renders a conversation with the model's chat template: turns, media, tools."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tgi_trio.errors import CannotContinue, TemplateError
from tgi_trio.router.http.call import Call
from tgi_trio.router.http.call_validation import refuse_media
from tgi_trio.router.http.conversation import ChatTools, Conversation, choose_tools
from tgi_trio.router.media.image_prompt import ImagePrompt, Prompt
from tgi_trio.router.media.kinds import Kind, name_kinds
from tgi_trio.router.media.layouts.layout import Layout
from tgi_trio.router.media.links import MediaLink
from tgi_trio.router.text.chat_template import ChatTemplate
from tgi_trio.router.text.tools.arguments_json import write_json
from tgi_trio.router.text.tools.call_formats import Format
from tgi_trio.router.text.tools.ids import fit_ids
from tgi_trio.router.text.tools.probe import CallStyle
from tgi_trio.router.text.turns import Turn, arrange_turns

# Conversations of which preparing takes a few milliseconds, or more.
_MANY_PARTS: Final = 256  # turns, calls in them, and tools
_LONG_TEXT: Final = 1 << 19  # characters
_LARGE_TOOLS: Final = 1 << 13  # bytes of a body with tools: a grammar takes up to 5 ms for 20 kB

# For templates that know nothing of tools; the format is the one `find_format` gives for them.
_TOOL_PROMPT = """
These are functions you can call. To call one, answer with its name and its arguments as JSON:
<tool_call>
{"name": the function's name, "arguments": an object of its parameters}
</tool_call>
Write values, not variables. If no function helps, answer in your own words.
"""


async def render_prompt(call: Call, conversation: Conversation) -> Prompt:
    """Return the prompt for turns and tools, by the model's chat template.

    Raises TemplateError, ToolError and ValidationError.
    """

    def render() -> Prompt:
        return render_with_tools(call, conversation, choose_tools(call, conversation))

    return await call.compute(render, long=takes_long(call, conversation))


def takes_long(call: Call, conversation: Conversation) -> bool:
    """Return whether a conversation is prepared beside the loop, as others wait for it."""
    turns, tools = conversation.turns, conversation.tools
    if tools and len(call.body) >= _LARGE_TOOLS:
        return True
    if (parts := len(turns) + len(tools)) >= _MANY_PARTS:  # first: they may be very many
        return True
    if parts + sum(len(turn.calls or ()) for turn in turns) >= _MANY_PARTS:
        return True
    return sum(len(turn.text or "") for turn in turns) >= _LONG_TEXT


def render_with_tools(call: Call, conversation: Conversation, tools: ChatTools | None) -> Prompt:
    """Do what `render_prompt` does, on this thread and with tools that are chosen."""
    template = call.text_processor.chat_template
    if template is None:
        raise TemplateError("template not found")
    links = [link for turn in conversation.turns for link in turn.images]
    for link in links:
        refuse_media(call, link)
    shown = tools is not None and template.uses("tools", tools=True)
    style = call.text_processor.call_style
    turns = conversation.turns
    if "tool_calls" not in template.source(tools=shown):
        turns = [_flatten_calls(turn, style.format) for turn in turns]
    turns = arrange_turns(turns, template.roles(tools=shown))
    messages = [turn.message() for turn in fit_ids(turns, style.format)]
    if call.text_processor.thoughts is not None and call.text_processor.thoughts.parts:
        messages = [_with_thought_part(message) for message in messages]
    messages = [_shape_arguments(message, style) for message in messages]
    if tools is not None and tools.use.functions:
        _append_tool_prompt(messages, conversation.tool_prompt, None if shown else tools.listed)
    given: dict[str, Any] = {
        "tools": tools.listed if tools is not None and shown else None,
        "documents": conversation.documents,
        **_switches(conversation, template, tools=shown),
        **conversation.variables,
    }
    how: dict[str, Any] = {
        "add_generation_prompt": conversation.begins is not False,
        "continue_final_message": _continues(conversation, messages),
    }
    try:
        return _render(call, template, messages, links, given, how)
    except CannotContinue:
        if conversation.continues:
            raise
        # As in TGI, where nobody has asked for it: a new turn begins.
        how["continue_final_message"] = False
        return _render(call, template, messages, links, given, how)


def _render(
    call: Call,
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    links: Sequence[MediaLink],
    given: Mapping[str, Any],
    how: Mapping[str, Any],
) -> Prompt:
    """Return the prompt for messages as the template takes them; raises TemplateError."""
    if not links or call.engine.images is None:
        return template.render(messages, **given, **how)
    pictures, others = call.engine.images.layout, call.engine.images.others
    marks = [] if pictures is None else [Mark("image", pictures)]
    marks += [Mark(kind, layout) for kind, layout in others.items()]
    return _render_images(template, messages, links, marks, given, how)


@dataclass(frozen=True, slots=True)
class Mark:
    """What stands in a rendered text for a part of a message."""

    kind: Kind  # the part's type
    layout: Layout
    # Stands for placeholders of clients meanwhile, so that they never become images.
    word: str = field(default_factory=lambda: f"typed{secrets.token_hex(12)}")


def _render_images(
    template: ChatTemplate,
    messages: list[dict[str, Any]],
    links: Sequence[MediaLink],
    marks: Sequence[Mark],
    given: Mapping[str, Any],
    how: Mapping[str, Any],
) -> ImagePrompt:
    """Return a prompt with images in place of the placeholders that the template has written."""
    for mark in marks:
        messages, given = _reword((messages, given), mark.layout.placeholder, mark.word)
    first, *_ = marks
    if not template.writes_parts(first.layout.placeholder, first.kind):
        shown: dict[str, str] = {
            mark.kind: f"{mark.layout.placeholder}{mark.layout.line_end}" for mark in marks
        }
        apart: dict[str, str] = {
            mark.kind: mark.layout.apart for mark in marks if mark.layout.apart
        }
        messages = [_with_placeholders(message, shown, apart) for message in messages]
    else:
        for mark in marks:
            if not template.writes_parts(mark.layout.placeholder, mark.kind):
                messages = [_with_text(message, mark) for message in messages]
    kinds = {mark.layout.placeholder: mark.kind for mark in marks}
    text = template.render(messages, **given, **how)
    pieces = re.split(f"({'|'.join(map(re.escape, kinds))})", text)
    written = [kinds[each] for each in pieces[1::2]]
    wanted = [link.kind for link in links]
    if written != wanted:
        name = name_kinds({first.kind, *wanted})
        raise TemplateError(
            f"the chat template writes {len(written)} {name} of {len(links)}: not every message "
            "may hold some"
        )
    texts = pieces[::2]
    for mark in marks:
        texts = [each.replace(mark.word, mark.layout.placeholder) for each in texts]
    begin, *rest = texts
    behind = (each for pair in zip(links, rest, strict=True) for each in pair)
    return ImagePrompt(tuple(filter(None, (begin, *behind))))


def _reword(value: Any, old: str, new: str) -> Any:
    """Return JSON values with a word of all their texts replaced."""
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, Mapping):
        return {_reword(key, old, new): _reword(each, old, new) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_reword(each, old, new) for each in value]
    return value


def _with_text(message: dict[str, Any], mark: Mark) -> dict[str, Any]:
    """Return a message whose parts of a kind are text, for a template that knows none of them."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    before, after = mark.layout.around
    text = {"type": "text", "text": f"{before}{mark.layout.placeholder}{after}"}
    return {**message, "content": [text if p["type"] == mark.kind else p for p in content]}


def _with_placeholders(
    message: dict[str, Any], shown: Mapping[str, str], apart: Mapping[str, str]
) -> dict[str, Any]:
    """Return a message whose images are in its text, for a template that takes nothing else.

    `shown`: what is written for parts by their types; `apart`: between such and what is beside
    them.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    written = ""
    for i, part in enumerate(content):
        kinds = {part["type"], content[i - 1]["type"]} if i else set()
        between = next((apart[kind] for kind in kinds if kind in apart), "")
        text = part["text"] if part["type"] == "text" else shown[part["type"]]
        if not (written.endswith(between) or text.startswith(between)):
            written += between
        written += text
    return {**message, "content": written}


def _switches(
    conversation: Conversation, template: ChatTemplate, *, tools: bool
) -> Mapping[str, Any]:
    """Return the template variables that control thinking.

    If a template has no variable for the effort, it still gets whether to think at all.
    """
    effort, thinking = conversation.effort, conversation.thinking
    found: dict[str, Any] = {}
    if effort is not None and template.uses("reasoning_effort", tools=tools):
        found["reasoning_effort"] = effort
    elif effort is not None and thinking is None:
        thinking = effort != "none"
    if thinking is not None:
        found |= {"enable_thinking": thinking, "thinking": thinking}
    return found


def _continues(conversation: Conversation, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether the answer continues the last message."""
    if conversation.continues is not None:
        return conversation.continues
    # TGI continues a final message of the assistant by itself.
    last = messages[-1] if messages else {}
    begins = conversation.begins is True
    return not begins and last.get("role") == "assistant" and bool(last.get("content"))


def _append_tool_prompt(
    messages: Sequence[dict[str, Any]], prompt: str | None, tools: Sequence[Any] | None
) -> None:
    """Tell the model of its tools in the last message, as TGI does it.

    `tools` are those that the template does not show. One that shows them speaks for itself, so
    that only a prompt of the client's own is added.
    """
    if tools is not None:
        text = f"{write_json(tools)}\n{prompt or _TOOL_PROMPT}"
    elif prompt:
        text = prompt
    else:
        return
    content = messages[-1].get("content") if messages else None
    if isinstance(content, str):
        messages[-1]["content"] = f"{content}\n---\n{text}"
    elif isinstance(content, list):
        content.append({"type": "text", "text": f"\n---\n{text}"})


def _with_thought_part(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose thought is a part of its content, as Mistral's templates read it."""
    thought, content = message.get("reasoning_content"), message.get("content")
    if thought is None or not isinstance(content, str | None):
        return message
    parts = [{"type": "thinking", "thinking": thought}]
    return {**message, "content": parts + ([{"type": "text", "text": content}] if content else [])}


def _shape_arguments(message: dict[str, Any], style: CallStyle) -> dict[str, Any]:
    """Return a message whose calls have arguments as the template takes them."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    shaped = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": style.shape(call["function"]["arguments"]),
            },
        }
        for call in calls
    ]
    return {**message, "tool_calls": shaped}


def _flatten_calls(turn: Turn, form: Format) -> Turn:
    """Return a turn whose calls are text, for a template that would drop them."""
    if not turn.calls:
        return turn
    text = form.write((call.name, call.arguments) for call in turn.calls)
    whole = "\n".join(filter(None, (turn.text, text)))
    parts = (*turn.parts, f"\n{text}") if turn.parts else ()
    return replace(turn, text=whole, parts=parts, calls=None)
