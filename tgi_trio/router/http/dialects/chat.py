"""Converts OpenAI's chat completions into conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from tgi_trio.errors import ToolError
from tgi_trio.router.http.call import Call
from tgi_trio.router.http.conversation import Conversation
from tgi_trio.router.http.dialects.chat_thinking import read_thinking
from tgi_trio.router.http.dialects.chat_tools import Choice, GivenTools, to_past_call
from tgi_trio.router.http.messages import schema
from tgi_trio.router.http.messages.body_reader import invalid_value
from tgi_trio.router.http.messages.problems import Refused
from tgi_trio.router.http.messages.response_format import are_tags, forms
from tgi_trio.router.http.messages.tool_schema import ToolCall
from tgi_trio.router.media.links import MediaLink, Piece, to_audio_link
from tgi_trio.router.text.turns import PastCall, Turn

_MOST_FPS: Final = 1000
_SHOWN: Final = 60  # most characters of an unknown type in its error


def to_conversation(call: Call, request: schema.ChatRequest) -> Conversation:
    """Return the conversation of a chat request; sampling parameters are read elsewhere.

    Raises BodyRejected, Refused, ToolError and ValidationError.
    """
    choice = Choice.of(request.tool_choice)
    given = {} if choice.none or request.tools is None else forms(request)
    if given and not are_tags(given):
        form = ", ".join(f"`{each}`" for each in given)
        raise ToolError(
            f"Grammar and tools are mutually exclusive: {form} beside `tools` (leave one of them "
            'out, set `tool_choice` to "none", or give a structural tag)'
        )
    most = call.engine.limits.max_grammar_bytes
    tools = GivenTools.of([] if choice.none else request.tools or [], most)
    functions = choice.narrow(tools.functions)
    thoughts = read_thinking(call, request, tools=bool(functions))
    return Conversation(
        turns=_turns(request),
        tools=tools.listed,
        functions=functions,
        custom=tools.custom,
        choice=None if choice.none else choice.tool,
        named=choice.named,
        parallel=request.parallel_tool_calls is not False,
        tagged=bool(given),
        tool_prompt=request.tool_prompt,
        begins=request.add_generation_prompt,
        continues=_continues(request),
        documents=request.documents,
        variables=thoughts.variables,
        effort=thoughts.effort,
        thinking=thoughts.thinking,
        budget=thoughts.budget,
        read_thoughts=request.separate_reasoning is not False,
        show_thoughts=thoughts.shown,
    )


def _continues(request: schema.ChatRequest) -> bool | None:
    """Return whether the answer continues the last message; None if not given. Raises Refused."""
    if request.add_generation_prompt is True and request.continue_final_message:
        text = (
            "`continue_final_message` and `add_generation_prompt` cannot both be true: the one "
            "goes on with the last message, the other begins a new one"
        )
        raise Refused(422, f"Input validation error: {text}", "validation")
    return request.continue_final_message


# ---- messages ----------------------------------------------------------------------------------


def _turns(request: schema.ChatRequest) -> list[Turn]:
    """Return the messages as turns. Raises BodyRejected and Refused."""
    turns = [_turn(message, i) for i, message in enumerate(request.messages)]
    fps, num_frames = _frames(request.mm_processor_kwargs or {})
    if fps is None and num_frames is None:
        return turns

    def sampled(piece: Piece) -> Piece:
        if isinstance(piece, str) or piece.kind != "video":
            return piece
        return replace(piece, fps=fps, num_frames=num_frames)

    return [replace(turn, parts=tuple(map(sampled, turn.parts))) for turn in turns]


def _frames(given: Mapping[str, Any]) -> tuple[float | None, int | None]:
    """Return how many frames are to be seen in a second, or in all. Raises BodyRejected."""
    path = "mm_processor_kwargs"
    fps, number = given.get("fps"), given.get("num_frames")
    if isinstance(fps, list) and len(fps) == 1:  # some clients send one for each video
        (fps,) = fps
    if others := given.keys() - {"fps", "num_frames", "do_sample_frames"}:
        name = sorted(others)[0][:_SHOWN]
        raise invalid_value(path, f"`{name}` is not read, only `fps` and `num_frames`")
    if given.get("do_sample_frames", True) is not True:
        raise invalid_value(path, "frames are sampled in any case: give `num_frames`")
    if fps is not None and number is not None:
        raise invalid_value(path, "`fps` and `num_frames` exclude each other")
    if fps is not None and (type(fps) not in (int, float) or not 0 < fps <= _MOST_FPS):
        raise invalid_value(path, f"`fps` must be above 0, and {_MOST_FPS} at most")
    if number is not None and (type(number) is not int or not 0 < number < 2**31):
        raise invalid_value(path, "`num_frames` must be a positive number")
    return fps, number


def _turn(message: schema.Message, i: int) -> Turn:
    """Return a message as a turn, its text joined. Raises BodyRejected and Refused."""
    if message.function_call is not None:
        raise invalid_value(f"messages[{i}].function_call", "not read: use `tool_calls`")
    content = message.content if message.content is not None else message.refusal or None
    pieces: list[Piece] = []
    thinking: list[str | None] = []
    if isinstance(content, list):
        thinking = [each.thinking for each in content if each.type == "thinking"]
        pieces = [
            _piece_of(chunk, i, j) for j, chunk in enumerate(content) if chunk.type != "thinking"
        ]
    elif content is not None:
        pieces = [content]
    calls = message.tool_calls
    within = "\n".join(filter(None, thinking)) or None
    thoughts = (message.reasoning_content, message.thinking, message.reasoning, within)
    # An answer that was cut off in its thought has neither, and clients send it back like that:
    # without the thought where that was not shown, or is not kept.
    silent = content is None and calls is None and not any(thoughts)
    if silent and message.role != "assistant":
        raise invalid_value(f"messages[{i}]", "needs `content` or `tool_calls`")
    turn = Turn.of(
        message.role,
        pieces,
        calls=None if calls is None else _past_calls(calls, f"messages[{i}]"),
        name=message.name,
        call_id=message.tool_call_id,
        thought=next((each for each in thoughts if each is not None), None),
    )
    return replace(turn, text=None) if content is None and calls is not None else turn


def _past_calls(calls: Sequence[ToolCall], path: str) -> list[PastCall]:
    return [to_past_call(each, f"{path}.tool_calls[{j}]") for j, each in enumerate(calls)]


def _piece_of(chunk: schema.MessageChunk, i: int, j: int) -> Piece:
    field = f"messages[{i}].content[{j}].{chunk.type}"
    if chunk.type == "image_url":
        if chunk.image_url is None:
            raise invalid_value(f"messages[{i}].content", "an image needs `image_url`")
        return MediaLink(chunk.image_url.url, f"messages[{i}]", field)
    if chunk.type == "video_url":
        if chunk.video_url is None:
            raise invalid_value(f"messages[{i}].content", "a video needs `video_url`")
        return MediaLink(chunk.video_url.url, f"messages[{i}]", field, kind="video")
    if chunk.type == "audio_url":
        if chunk.audio_url is None:
            raise invalid_value(f"messages[{i}].content", "audio needs `audio_url`")
        return MediaLink(chunk.audio_url.url, f"messages[{i}]", field, kind="audio")
    if chunk.type == "input_audio":
        if chunk.input_audio is None:
            raise invalid_value(f"messages[{i}].content", "audio needs `input_audio`")
        return to_audio_link(chunk.input_audio.data, f"messages[{i}]", field)
    if chunk.type == "refusal" and chunk.refusal is not None:
        return chunk.refusal
    if chunk.type != "text":
        raise invalid_value(
            f"messages[{i}].content",
            f"parts of type `{chunk.type[:_SHOWN]}` are not read, only `text`, `image_url`, "
            "`video_url`, `input_audio` and `audio_url`",
        )
    if chunk.text is None:
        raise invalid_value(f"messages[{i}].content", "a text part needs `text`")
    return chunk.text
