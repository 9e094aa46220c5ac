"""Converts the items of a conversation into turns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from tgi_trio.router.http.dialects.responses import schema
from tgi_trio.router.http.dialects.responses.client_tools import CALLS, read_shell_output
from tgi_trio.router.http.dialects.responses.tools import model_name
from tgi_trio.router.http.dialects.summaries import tell_summary
from tgi_trio.router.http.dialects.thought_codec import decode_thought
from tgi_trio.router.http.messages.body_reader import convert_body, invalid_value
from tgi_trio.router.http.messages.problems import Refused
from tgi_trio.router.media.links import MediaLink, Piece, to_audio_link
from tgi_trio.router.text.tools.custom import INPUT
from tgi_trio.router.text.turns import PastCall, Turn, read_arguments

CALL_PREFIX: Final = "call_"  # of ids, as of OpenAI's; the template gets the rest
_BREAK: Final = "\n\n"  # between the texts of one turn
_NO_IMAGE: Final = "[An image was here; results are read as text.]"
_ROLES: Final = frozenset({"user", "system", "developer", "assistant"})
_CALLS: Final = frozenset({"function_call", "custom_tool_call", *CALLS})
_PATCH_ENDS: Final = ("completed", "failed")


@dataclass(slots=True)
class _Answer:
    """An earlier answer, collected from its items."""

    thoughts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[PastCall] = field(default_factory=list)

    def turn(self) -> Iterator[Turn]:
        """Yield the turn, if there are texts or calls; a thought alone is not a turn."""
        if self.texts or self.calls:
            yield Turn(
                role="assistant",
                text=_BREAK.join(self.texts),  # templates may append to it, so it is never null
                calls=self.calls or None,
                thought=_BREAK.join(self.thoughts) or None,
            )


def to_turns(items: Sequence[schema.InputItem], kept: int = 0) -> Iterator[Turn]:
    """Yield the turns of a conversation. Raises BodyRejected and Refused.

    `kept`: how many of the items, the first ones, are those of an earlier response. Items of
    unknown kinds come from OpenAI's own tools and are ignored; `updates.py` reads some others.
    """
    names: dict[str, str] = {}  # of functions, by the ids of their calls
    shells: dict[str, str | None] = {}  # ids of calls of the local shell, by those of their items
    answer = _Answer()
    for i, item in enumerate(items):
        path = name_place(i, kept)
        match item.type or "message":
            case "message" if item.role == "assistant":
                answer.texts += _texts(item.content, path)
            case "reasoning":
                answer.thoughts += _thoughts(item, path)
            case "compaction":
                answer.texts.append(_summary(item, path))
            case "compaction_trigger" if i == len(items) - 1:
                why = "compactions are made at /v1/responses/compact, not by an item"
                raise invalid_value(path, why)
            case kind if kind in _CALLS:
                call = _call(item, path)
                names[call.id or ""] = call.name
                if item.type == "local_shell_call" and item.id is not None:
                    shells[item.id] = call.id
                answer.calls.append(call)
            case "message":
                yield from answer.turn()
                answer = _Answer()
                yield _message_turn(item, path)
            case kind if kind.removesuffix("_output") in _CALLS:
                yield from answer.turn()
                answer = _Answer()
                # OpenAI's types know results of the local shell by `id` alone, that of the call.
                given = item.id if item.call_id is None else item.call_id
                id = shells.get(given or "", _strip_prefix(given))
                yield Turn("tool", _output(item, path), name=names.get(id or ""), call_id=id)
    yield from answer.turn()


def name_place(i: int, kept: int) -> str:
    """Return the path of an item for errors; `kept`: as `to_turns` has it."""
    return "previous_response_id" if i < kept else f"input[{i - kept}]"


def is_reference(item: schema.InputItem) -> bool:
    """Whether an item stands for another one, which has its id; such may leave their type out."""
    if item.type is not None:
        return item.type == "item_reference"
    return item.id is not None and item.role is None and item.content is None


def _thoughts(item: schema.InputItem, path: str) -> list[str]:
    texts: list[str] = []
    if item.content is not None:
        parts = convert_body(item.content, list[schema.ReasoningText], f"{path}.content")
        texts = [part.text for part in parts]
    if not any(texts):
        texts = [decode_thought(item.encrypted_content)]
    if not any(texts):
        texts = [part.text for part in item.summary or []]
    return list(filter(None, texts))


def _summary(item: schema.InputItem, path: str) -> str:
    """Return what stands for an earlier part of the conversation. Raises BodyRejected."""
    text = decode_thought(item.encrypted_content)
    if not text:
        why = "no compaction of this server's: send the items that it stands for"
        raise invalid_value(f"{path}.encrypted_content", why)
    return tell_summary(text)


def _message_turn(item: schema.InputItem, path: str) -> Turn:
    if item.role not in _ROLES:
        roles = ", ".join(f"`{each}`" for each in sorted(_ROLES))
        given = "missing, expected one" if item.role is None else f"`{item.role}` is none"
        raise invalid_value(f"{path}.role", f"{given} of {roles}")
    return Turn.of(item.role, _pieces(item.content, path), _BREAK)


def _pieces(content: Any, path: str) -> list[Piece]:
    """Return the texts and images of a message. Raises Refused for other parts."""
    found: list[Piece] = []
    for i, part in enumerate(_parts(content, path)):
        text = part.text if part.text is not None else part.refusal
        if text is not None:
            found.append(text)
        elif part.type == "input_image" and part.image_url is not None:
            # Codex leaves such an image out of its history where an error names it like that.
            field = f"{path}.content[{i}].image_url"
            found.append(MediaLink(part.image_url, path, field))
        elif part.type == "input_audio" and part.input_audio is not None:
            field = f"{path}.content[{i}].input_audio"
            found.append(to_audio_link(part.input_audio.data, path, field))
        elif part.type == "input_image":
            why = f"{path} holds an image without `image_url`: files are not stored here"
            raise Refused(400, why, "validation")
        else:
            why = (
                f"{path} holds `{part.type}`: `input_text`, `input_image` and `input_audio` are "
                "read"
            )
            raise Refused(400, why, "validation")
    return list(filter(None, found))


def _texts(content: Any, path: str) -> list[str]:
    """Return the texts of an earlier answer or of a result; other parts become notes."""
    found: list[str] = []
    for part in _parts(content, path):
        text = part.text if part.text is not None else part.refusal
        if text is None:
            text = _NO_IMAGE if "image" in part.type else f"[{part.type}]"
        found.append(text)
    return list(filter(None, found))


def _parts(content: Any, path: str) -> list[schema.InputPart]:
    if content is None or isinstance(content, str):
        return [schema.InputPart("input_text", content or "")]
    return convert_body(content, list[schema.InputPart], f"{path}.content")


def _call(item: schema.InputItem, path: str) -> PastCall:
    id = _strip_prefix(item.call_id)
    match item.type:
        case "custom_tool_call":
            name = model_name(item.namespace, item.name or "")
            return PastCall(name, {INPUT: item.input or ""}, id)
        case kind if (own := CALLS.get(str(kind))) is not None:
            return PastCall(own.name, own.read_call(item), id)
    if item.arguments is not None and not isinstance(item.arguments, str):
        raise invalid_value(f"{path}.arguments", "expected a text, JSON, of a `function_call`")
    arguments = read_arguments(item.arguments or "")
    return PastCall(model_name(item.namespace, item.name or ""), arguments, id)


def _output(item: schema.InputItem, path: str) -> str:
    """Return a tool's result; what is neither text nor parts is shown as JSON."""
    output = item.output
    if isinstance(output, list):
        said = read_shell_output(output) if output else None
        return said if said is not None else "\n".join(_texts(output, path))
    if output is None or isinstance(output, str):
        # Of a patch, whose result may say no more.
        status = item.status if item.status in _PATCH_ENDS else ""
        return output or (status if item.type == "apply_patch_call_output" else "")
    if isinstance(output, Mapping) and isinstance(content := output.get("content"), str):
        return content
    return msgspec.json.encode(output).decode()


def _strip_prefix(id: str | None) -> str | None:
    """Return the id of a call without the prefix that it got for the client."""
    return None if id is None else id.removeprefix(CALL_PREFIX)
