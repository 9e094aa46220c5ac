"""Converts Anthropic's messages into conversations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import msgspec

from tgi_trio.errors import ToolError, ValidationError
from tgi_trio.router.http.conversation import Conversation
from tgi_trio.router.http.dialects.anthropic import schema
from tgi_trio.router.http.dialects.anthropic.client_tools import find_client_tool
from tgi_trio.router.http.dialects.anthropic.updates import read_updates
from tgi_trio.router.http.dialects.thought_codec import decode_thought
from tgi_trio.router.http.messages.body_reader import convert_body, invalid_value, read_variables
from tgi_trio.router.http.messages.problems import Refused
from tgi_trio.router.http.messages.shared_fields import read_seed
from tgi_trio.router.media.links import MediaLink, Piece
from tgi_trio.router.parameters import GenerationParameters
from tgi_trio.router.text import grammars
from tgi_trio.router.text.tools.functions import NO_PARAMETERS, Function
from tgi_trio.router.text.turns import PastCall, Turn

CALL_PREFIX: Final = "toolu_"  # of ids, as of Anthropic's; the template gets the rest

# Claude Code begins its system prompt with this; a part of it changes with every request, which
# would keep the whole prompt out of the prefix cache.
_BILLING: Final = "x-anthropic-billing-header:"
_BREAK: Final = "\n\n"  # between the texts of one turn
_NO_IMAGE: Final = "[An image was here; results are read as text.]"
# What is a part of other dialects' messages, and of none of this one.
_NO_BLOCKS: Final = ("audio", "audio_url", "input_audio", "video", "video_url")
_ROLES: Final[Mapping[str, str]] = {
    "user": "user",
    "assistant": "assistant",
    "system": "system",
    "developer": "developer",
    "ctx": "user",
    "msg": "user",
}
_CHOICES: Final[Mapping[str, str | None]] = {"auto": None, "any": "required", "none": None}


def to_conversation(request: schema.CountTokensRequest) -> Conversation:
    """Return the conversation of a body; sampling parameters are read elsewhere.

    Raises BodyRejected, Refused and ToolError.
    """
    if request.thread is not None:
        raise ValidationError(
            "`thread` is not supported: no conversation is held here, send all of it as `messages`"
        )
    choice, updates = request.tool_choice, read_updates(request)
    silent = choice is not None and choice.type == "none"
    tools = [] if silent else [each for each in updates.tools if _served(each)]
    named = choice is not None and choice.type == "tool"
    wanted = None if choice is None else choice.name if named else _CHOICES[choice.type]
    if named and wanted is None:
        raise invalid_value("tool_choice", "`tool` needs `name`")
    functions = [
        _function(tool, i) for i, tool in enumerate(tools) if tool.name not in updates.removed
    ]
    if wanted == "required" and not functions:
        raise ToolError("`tool_choice` is `any`, and there are no tools")
    thinking, output = request.thinking, request.output_config
    return Conversation(
        turns=[*_system_turns(request.system), *_turns(updates.messages)],
        tools=[_listed_tool(tool) for tool in tools],
        functions=functions,
        choice=wanted,
        named=named,
        loose={tool.name or "" for tool in tools if tool.strict is not True},
        parallel=choice is None or choice.disable_parallel_tool_use is not True,
        variables=read_variables(request.chat_template_kwargs),
        effort=updates.effort or (None if output is None else output.effort),
        thinking=None if thinking is None else thinking.type in ("enabled", "adaptive"),
        budget=None if thinking is None else thinking.budget_tokens or None,
        budget_is_wish=True,
    )


def to_parameters(request: schema.MessagesRequest, most: int) -> GenerationParameters:
    """Return the sampling and stopping parameters; `most`: bytes of a schema.

    Raises ValidationError and BodyRejected.
    """
    stops = request.stop_sequences or []
    if len(stops) > schema.MOST_STOPS:
        raise ValidationError(
            f"`stop_sequences` may have {schema.MOST_STOPS} texts. Given: {len(stops)}"
        )
    if request.compaction is not None:
        raise ValidationError(
            "`compaction` is not supported: ask for a summary as for any other answer, or "
            "/v1/responses/compact for one"
        )
    if request.max_tokens == 0 and request.stream:
        raise ValidationError("`max_tokens` of 0 has no stream: leave `stream` out")
    greedy = request.temperature == 0
    return GenerationParameters(
        temperature=None if greedy else request.temperature,
        do_sample=not greedy,
        top_p=None if greedy else request.top_p,
        top_k=None if greedy or request.top_k in (0, -1) else request.top_k,
        max_new_tokens=max(1, request.max_tokens),
        stop=tuple(stops),
        seed=read_seed(request.seed),
        grammar=_grammar(request, most),
        keep_stop=False,
        accept_neutral=True,
        stops_allowed=schema.MOST_STOPS,
        clip_max_new_tokens=True,
    )


def _grammar(request: schema.CountTokensRequest, most: int) -> str | None:
    """Return the grammar for the answer's form, if it has one."""
    output = request.output_config
    form = (None if output is None else output.format) or request.output_format
    if form is None or form.type == "text":
        return None
    if form.type != "json_schema":
        raise invalid_value("output_config.format", f"`{form.type}` is no type: `json_schema` is")
    if not isinstance(form.schema, dict):
        raise invalid_value("output_config.format", "missing field `schema`")
    grammars.check_size(form.schema, most)
    return grammars.json_schema(form.schema)


# ---- tools -------------------------------------------------------------------------------------


def _served(tool: schema.ToolDefinition) -> bool:
    """Return whether the client runs a tool, and not Anthropic's servers."""
    return tool.type in (None, "custom") or find_client_tool(tool.type or "") is not None


def _function(tool: schema.ToolDefinition, i: int) -> Function:
    if tool.name is None:
        raise invalid_value(f"tools[{i}]", "missing field `name`")
    known = find_client_tool(tool.type or "")
    parameters = tool.input_schema if known is None else known.accepted
    return Function.of(tool.name, parameters, part="input_schema")


def _listed_tool(tool: schema.ToolDefinition) -> Mapping[str, Any]:
    """Return a tool as templates expect it."""
    known = find_client_tool(tool.type or "")
    description = tool.description if known is None else known.description
    function: dict[str, Any] = {"name": tool.name}
    if description is not None:
        function["description"] = description
    parameters = tool.input_schema if known is None else known.shown
    function["parameters"] = parameters or NO_PARAMETERS
    return {"type": "function", "function": function}


# ---- turns -------------------------------------------------------------------------------------


def _system_turns(system: schema.Content | None, role: str = "system") -> Iterator[Turn]:
    texts = [text for text in _texts(system or "") if not text.startswith(_BILLING)]
    if any(texts):
        yield Turn(role, _BREAK.join(texts))


def _turns(messages: Iterable[tuple[int, schema.InputMessage]]) -> Iterator[Turn]:
    """Yield the turns of messages, each with its place in the request."""
    names: dict[str, str] = {}  # of functions, by the ids of their calls
    for i, message in messages:
        content = message.content or ""
        role = _ROLES.get(message.role)
        if role is None:
            roles = ", ".join(f"`{each}`" for each in ("user", "assistant", "system"))
            raise invalid_value(f"messages[{i}].role", f"`{message.role}` is none of {roles}")
        if role == "assistant":
            turn = _assistant_turn(content)
            names |= {call.id: call.name for call in turn.calls or () if call.id is not None}
            yield turn
        elif role == "user":
            yield from _user_turns(content, names, i)
        else:
            yield from _system_turns(content, role)


def _texts(content: schema.Content) -> list[str]:
    """Return the texts of a message; blocks of other kinds are left out."""
    if isinstance(content, str):
        return [content]
    return [block.text for block in content if block.type == "text" and block.text]


def _assistant_turn(content: schema.Content) -> Turn:
    """Return an earlier answer; blocks of Anthropic's server tools are left out."""
    if isinstance(content, str):
        return Turn("assistant", content)
    thoughts = [
        each.thinking or decode_thought(each.signature)
        for each in content
        if each.type == "thinking"
    ]
    calls = [
        PastCall(
            block.name or "", {} if block.input is None else block.input, _strip_prefix(block.id)
        )
        for block in content
        if block.type == "tool_use"
    ]
    return Turn(
        role="assistant",
        text=_BREAK.join(_texts(content)),  # templates may append to it, so it is never null
        calls=calls or None,
        thought=_BREAK.join(filter(None, thoughts)) or None,
    )


def _user_turns(content: schema.Content, names: Mapping[str, str], i: int) -> Iterator[Turn]:
    """Yield the results of tools, then the user's text and images."""
    if isinstance(content, str):
        yield Turn("user", content)
        return
    pieces: list[Piece] = []
    results = 0
    for block in content:
        if block.type == "tool_result":
            results += 1
            id = _strip_prefix(block.tool_use_id)
            text = _result_text(block, i)
            yield Turn("tool", text, name=names.get(id or ""), call_id=id)
        else:
            pieces += _user_pieces(block, i)
    if pieces or not results:
        yield Turn.of("user", pieces, _BREAK)


def _user_pieces(block: schema.ContentBlock, i: int) -> list[Piece]:
    """Return the text or image of a user's block. Raises Refused for unreadable ones."""
    if block.type == "image":
        return [_image(block, i)]
    text = _block_text(block, i)
    if text is None and block.type in ("document", "search_result"):
        kind = block.type.replace("_", " ")
        why = f"messages[{i}] holds a {kind} that is no plain text, and only such are read"
        raise Refused(400, why, "validation")
    if block.type in _NO_BLOCKS:
        why = (
            f"messages[{i}] holds `{block.type}`, and this API has texts, images and documents "
            "alone: /v1/chat/completions takes others"
        )
        raise Refused(400, why, "validation")
    if block.type == "container_upload":
        why = f"messages[{i}] refers to a file, and files are not stored here: send its text"
        raise Refused(400, why, "validation")
    return [text] if text else []


def _image(block: schema.ContentBlock, i: int) -> MediaLink:
    source = block.source if isinstance(block.source, dict) else {}
    where, kind = f"messages[{i}]", source.get("type")
    data, url = source.get("data"), source.get("url")
    if kind == "base64" and isinstance(data, str):
        return MediaLink(f"data:{source.get('media_type')};base64,{data}", where)
    if kind == "url" and isinstance(url, str):
        return MediaLink(url, where)
    text = f"{where} holds an image whose `source` is neither `base64` with `data` nor `url`"
    raise Refused(400, text, "validation")


def _block_text(block: schema.ContentBlock, i: int) -> str | None:
    """Return what a block says; None if that is no text, or not text alone."""
    if block.type == "search_result":
        place = block.source if isinstance(block.source, str) else None
        texts = _plain_texts(block.content, i)
        return None if texts is None else _BREAK.join(filter(None, (block.title, place, *texts)))
    if block.type == "document":
        source = block.source if isinstance(block.source, dict) else {}
        kind = source.get("type")
        field = "data" if kind == "text" else "content" if kind == "content" else ""
        texts = _plain_texts(source.get(field), i)
        before = (block.title, block.context)
        return None if texts is None else _BREAK.join(filter(None, (*before, *texts)))
    return block.text


def _plain_texts(content: Any, i: int) -> list[str] | None:
    """Return the texts of a text or of blocks; None if there is anything else."""
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        return None
    blocks = convert_body(content, list[schema.ContentBlock], f"messages[{i}].content")
    return _texts(blocks) if all(block.type == "text" for block in blocks) else None


def _result_text(block: schema.ContentBlock, i: int) -> str:
    """Return a tool's result as text; parts that cannot be read become notes.

    They are not refused: the history comes again with every request, so a refusal would end the
    session for good.
    """
    content = block.content
    if content is None or isinstance(content, str):
        text = content or ""
    else:
        parts = convert_body(content, list[schema.ContentBlock], f"messages[{i}].content")
        text = "\n".join(_part_text(part, i) for part in parts)
    if block.is_error and not text.lstrip().lower().startswith(("error", "<tool_use_error>")):
        return f"Error: {text}"
    return text


def _part_text(part: schema.ContentBlock, i: int) -> str:
    if part.type == "image":
        return _NO_IMAGE
    if (text := _block_text(part, i)) is not None:
        return text
    return msgspec.json.encode(part.content).decode() if part.content else f"[{part.type}]"


def _strip_prefix(id: str | None) -> str | None:
    """Return the id of a call without the prefix that it got for the client."""
    return None if id is None else id.removeprefix(CALL_PREFIX)
