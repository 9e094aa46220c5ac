"""Bodies of routes: what clients ask of each over HTTP."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.router.media.kinds import Kind
from tgi_trio.router.request import Request, StoppingCriteria

MOST_TEXT: Final = 320  # tokens of a prompt, without its images
MOST_FEATURES: Final = 320  # of its images
MOST_ANSWER: Final = 120  # tokens
ADAPTERS: Final = ("first", "other")  # names of those that are served
FOLDERS: Final = ("adapter-0", "adapter-1")  # of their files
LOADED: Final = "loaded"  # an adapter that is served for one client alone, and a part of its name
VISIT: Final = "{visit}"  # for the number of a visit
_PLACE: Final = {
    "type": "object",
    "properties": {"sky": {"enum": ["red", "grey"]}, "wet": {"type": "boolean"}},
    "required": ["sky", "wet"],
}
# A text of one letter begins a tag, so that models which say anything say some.
_TAG: Final = {"type": "tag", "begin": "e", "content": {"type": "regex", "pattern": "[a-d]{1,3}"}}
_TAGS: Final = {"type": "triggered_tags", "triggers": ["e"], "tags": [{**_TAG, "end": "!"}]}
_FUNCTIONS: Final = [
    {"name": "rain", "parameters": _PLACE},
    {"name": "time", "parameters": {"type": "object"}},
]
_FOR_CALLS: Final = 30  # tokens
_FOR_THOUGHTS: Final = 14
_BUDGET: Final = 8  # of a thought
_LATER: Final = ("and the late hours?", "or in tone?")  # what clients say when they go on
_MORE: Final = " in tone"  # that another prompt has
_NAME: Final = f"{LOADED}-{VISIT}"
_STOPS: Final = ["e", "th"]


class Medium(NamedTuple):
    """An image or a sound in a body."""

    number: int  # in a gallery
    kind: Kind
    features: int  # tokens that it takes

    @property
    def data(self) -> str:
        """What stands for its file; see `gallery.Studio`."""
        return base64.b64encode(b"%d" % self.number).decode()

    @property
    def url(self) -> str:
        return f"data:image/png;base64,{self.data}"

    @property
    def part(self) -> dict[str, Any]:
        """It as a part of a message, as in OpenAI's chats."""
        if self.kind == "image":
            return {"type": "image_url", "image_url": {"url": self.url}}
        return {"type": "input_audio", "input_audio": {"data": self.data, "format": "wav"}}


@dataclass(frozen=True)
class ClientCall:
    """A request as its client makes it, and those that it makes once it has been answered."""

    path: str  # `{id}` in it: of the response that it is about
    body: Mapping[str, Any] | None  # None: it has none
    method: str = "POST"
    # Which of the client's answers it goes on from, or is about, the first one behind `before`
    # being 0; None: of none. One that goes on has it in `previous_response_id`.
    of: int | None = None
    then: tuple[ClientCall, ...] = ()
    before: tuple[ClientCall, ...] = ()  # what it asks first
    shown: tuple[Medium, ...] = ()  # in its body

    @property
    def largest(self) -> Request:
        """What is at least as large as anything that is made of it."""
        ids = np.zeros(MOST_TEXT + sum(each.features for each in self.shown), np.int32)
        return Request(ids, SamplingParameters(), StoppingCriteria(MOST_ANSWER))

    @property
    def streams(self) -> bool:
        """Whether its client is told of tokens as they come."""
        streamed = self.body is not None and bool(self.body.get("stream"))
        return streamed or self.path == "/generate_stream"


@dataclass(frozen=True)
class Wanted:
    """What a call is made of."""

    chosen: Mapping[str, str]  # kind of wishes -> the wish
    text: str
    most: int  # tokens of an answer
    seeded: Mapping[str, Any]  # the seed of one that is drawn
    shown: tuple[Medium, ...] = ()

    def __getitem__(self, kind: str) -> str:
        return self.chosen[kind]

    @property
    def images(self) -> list[Medium]:
        """What is shown to routes that take no sounds."""
        return [each for each in self.shown if each.kind == "image"]

    @property
    def streams(self) -> bool:
        return self["stream"] == "yes"

    @property
    def thinks(self) -> bool:
        return self["thought"] != "none"

    @property
    def room(self) -> int:
        """Tokens of an answer with a thought and calls."""
        calls = _FOR_CALLS if self["tools"] != "none" else 0
        return self.most + calls + (_FOR_THOUGHTS if self.thinks else 0)

    @property
    def model(self) -> str:
        """The name of the model, or of an adapter."""
        return "tiny" if self["adapter"] == "none" else self.adapter

    @property
    def adapter(self) -> str:
        """The name of its adapter, where it has one."""
        return _NAME if self["adapter"] == LOADED else self["adapter"]

    @property
    def scheduled(self) -> dict[str, Any]:
        """Fields that all routes have."""
        found: dict[str, Any] = {}
        if self["priority"] != "plain":
            found["priority"] = -1 if self["priority"] == "urgent" else 1
        return found | ({"cache_salt": "salt"} if self["salt"] != "none" else {})


def _generate(wanted: Wanted) -> ClientCall:
    parameters: dict[str, Any] = {"max_new_tokens": wanted.most, **wanted.seeded}
    parameters |= {"do_sample": bool(wanted.seeded), **wanted.scheduled}
    if wanted["truncate"] == "yes" and not wanted.shown:  # which would be cut in two
        parameters["truncate"] = 5
    if wanted["format"] == "json":
        parameters["grammar"] = {"type": "json", "value": _PLACE}
    elif wanted["format"] == "tags":
        parameters["grammar"] = {"type": "structural_tag", "value": {"format": _TAGS}}
    if wanted["stop"] == "string":
        parameters["stop"] = _STOPS
    if wanted["told"] != "text":
        parameters |= {"details": True, "top_n_tokens": 2}
        parameters["decoder_input_details"] = not wanted.streams and wanted["told"] == "prompt"
    if wanted["adapter"] != "none":
        parameters["adapter_id"] = wanted.adapter
    shown = "".join(f"![]({each.url})" for each in wanted.images)
    inputs: Any = shown + wanted.text
    if wanted["answers"] == "to several prompts" and not wanted.streams:
        inputs = [inputs, wanted.text + _MORE]
    path = "/generate_stream" if wanted.streams else "/generate"
    return ClientCall(path, {"inputs": inputs, "parameters": parameters})


def _openai(wanted: Wanted) -> dict[str, Any]:
    """Return what completions and chats have in common."""
    body: dict[str, Any] = {"max_tokens": wanted.room, **_drawn(wanted), **wanted.scheduled}
    body |= {"stream": wanted.streams, "model": wanted.model}
    if wanted["answers"] == "several":
        body["n"] = 2
    if wanted["stop"] == "string":
        body["stop"] = _STOPS
    if wanted["told"] == "prompt" and not wanted.streams:
        body["prompt_logprobs"] = 1
    return body


def _drawn(wanted: Wanted) -> dict[str, Any]:
    return {"temperature": 1.0 if wanted.seeded else 0.0, **wanted.seeded}


def _complete(wanted: Wanted) -> ClientCall:
    body = _openai(wanted) | {"prompt": wanted.text, "max_tokens": wanted.most}
    if wanted["told"] != "text":
        body["logprobs"] = 2
    if wanted["answers"] == "several" and not wanted.streams:
        body["best_of"] = 3
    if wanted["answers"] == "to several prompts":
        body["prompt"] = [wanted.text, wanted.text + _MORE]
    if wanted["gap"] != "none":
        body["suffix"] = "in the rain."
    return ClientCall("/v1/completions", body)


def _chat(wanted: Wanted) -> ClientCall:
    content: Any = wanted.text
    if wanted.shown:
        parts = [each.part for each in wanted.shown]
        content = [*parts, {"type": "text", "text": wanted.text}]
    body = _openai(wanted) | {"messages": [{"role": "user", "content": content}]}
    if wanted["told"] != "text":
        body |= {"logprobs": True, "top_logprobs": 2}
    if wanted["tools"] != "none":
        forced = {"type": "function", "function": {"name": "rain"}}
        body["tools"] = [{"type": "function", "function": each} for each in _FUNCTIONS]
        body["tool_choice"] = forced if wanted["tools"] == "named" else wanted["tools"]
    if wanted["format"] == "tags":
        body["structural_tag"] = {"format": _TAGS}
    elif wanted["tools"] == "none" and wanted["format"] == "json":
        body["response_format"] = {"type": "json_schema", "json_schema": {"schema": _PLACE}}
    if wanted.thinks:
        body["chat_template_kwargs"] = {"enable_thinking": True}
    if wanted["thought"] == "short":
        body["thinking_token_budget"] = _BUDGET
    return ClientCall("/v1/chat/completions", body)


def _message(wanted: Wanted) -> ClientCall:
    """Return a call of Anthropic's route."""
    content: list[dict[str, Any]] = [{"type": "text", "text": wanted.text}]
    for each in wanted.images:
        source = {"type": "base64", "media_type": "image/png", "data": each.data}
        content.insert(0, {"type": "image", "source": source})
    body: dict[str, Any] = {"max_tokens": wanted.room, **_drawn(wanted), **wanted.scheduled}
    body |= {"model": wanted.model, "messages": [{"role": "user", "content": content}]}
    body["stream"] = wanted.streams
    if wanted["stop"] == "string":
        body["stop_sequences"] = _STOPS
    if wanted["tools"] != "none":
        body["tools"] = [
            {"name": each["name"], "input_schema": each["parameters"]} for each in _FUNCTIONS
        ]
        named = {"type": "tool", "name": "rain"}
        choices = {"auto": {"type": "auto"}, "required": {"type": "any"}, "named": named}
        body["tool_choice"] = choices[wanted["tools"]]
    elif wanted["format"] == "json":
        body["output_config"] = {"format": {"type": "json_schema", "schema": _PLACE}}
    if wanted.thinks:
        budget = {"budget_tokens": _BUDGET} if wanted["thought"] == "short" else {}
        body["thinking"] = {"type": "enabled" if budget else "adaptive", **budget}
    return ClientCall("/v1/messages", body)


def _respond(wanted: Wanted) -> ClientCall:
    """Return a call of OpenAI's newer route, of which later ones may go on."""
    content: list[dict[str, Any]] = [{"type": "input_text", "text": wanted.text}]
    for each in wanted.shown:
        image = {"type": "input_image", "image_url": each.url}
        content.insert(0, image if each.kind == "image" else each.part)
    body: dict[str, Any] = {"max_output_tokens": wanted.room, **_drawn(wanted)}
    body |= {"model": wanted.model, "stream": wanted.streams, **wanted.scheduled}
    if wanted["stop"] == "string":
        body["stop"] = _STOPS
    if wanted["told"] != "text":
        body["top_logprobs"] = 2
    if wanted["tools"] != "none":
        body["tools"] = [{"type": "function", **each} for each in _FUNCTIONS]
        forced = {"type": "function", "name": "rain"}
        body["tool_choice"] = forced if wanted["tools"] == "named" else wanted["tools"]
    elif wanted["format"] == "json":
        form = {"type": "json_schema", "name": "place", "schema": _PLACE}
        body["text"] = {"format": form}
    if wanted.thinks:
        body["reasoning"] = {"effort": "low"}
    first = body | {"input": [{"role": "user", "content": content}]}
    return ClientCall("/v1/responses", first, then=_go_on(wanted, body))


def _go_on(wanted: Wanted, body: Mapping[str, Any]) -> tuple[ClientCall, ...]:
    """Return what comes behind a first response; `body`: of each, without its input."""
    short = {**body, "max_output_tokens": min(wanted.room, 10 + _FOR_THOUGHTS)}
    second, third = (
        ClientCall("/v1/responses", short | {"input": text}, of=of)
        for of, text in enumerate(_LATER)
    )
    one = "/v1/responses/{id}"
    match wanted["then"]:
        case "goes on":
            return second, third, ClientCall(one, None, "GET", of=2)
        case "branches":
            items = ClientCall(f"{one}/input_items", None, "GET", of=1)
            return second, ClientCall("/v1/responses", third.body, of=0), items
        case "forgets":
            gone = ClientCall(one, None, "DELETE", of=0)
            return second, gone, ClientCall("/v1/responses", third.body, of=1)
        case _:
            return ()


def _infill(wanted: Wanted) -> ClientCall:
    """Return a call of llama.cpp's route."""
    half = len(wanted.text) // 2
    body: dict[str, Any] = {"input_prefix": wanted.text[:half], "input_suffix": wanted.text[half:]}
    body |= {"n_predict": wanted.most, "stream": wanted.streams, "model": wanted.model}
    body |= {"seed": 7, **_drawn(wanted), "samplers": ["temperature"], **wanted.scheduled}
    if wanted["stop"] == "string":
        body["stop"] = _STOPS
    if wanted["gap"] == "among files":
        body["input_extra"] = [{"filename": "tone.txt", "text": "the hours are late."}]
    if wanted["told"] != "text":
        body["return_tokens"] = True
    return ClientCall("/infill", body)


def load_adapter(call: ClientCall, folder: str) -> ClientCall:
    """Return a call whose client has an adapter served before it, and not any more behind it.

    `folder`: its name below the folder that adapters may be loaded from.
    """
    name = {"lora_name": _NAME}
    load = ClientCall("/v1/load_lora_adapter", {**name, "lora_path": folder})
    unload = ClientCall("/v1/unload_lora_adapter", name)
    return replace(call, before=(load,), then=(*call.then, unload))


UNSEEING: Final = ("completions", "infill")  # routes whose bodies have no images
# By the wish for a route.
BODIES: Final[Mapping[str, Callable[[Wanted], ClientCall]]] = {
    "generate": _generate,
    "completions": _complete,
    "chat": _chat,
    "messages": _message,
    "responses": _respond,
    "infill": _infill,
}
