"""What clients ask over HTTP: kinds of wishes, and bodies of routes that have them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from tests.company.covering import Factors
from tgi_trio.ipc.messages import SamplingParameters
from tgi_trio.router.request import Request, StoppingCriteria

MOST_TOKENS: Final = 352  # of a prompt with tools, and its answer
_TEXT: Final = "the rain in tone is no more than the other ones were in the late hours. "
_PLACE: Final = {
    "type": "object",
    "properties": {"sky": {"enum": ["red", "grey"]}, "wet": {"type": "boolean"}},
    "required": ["sky", "wet"],
}
_TOOLS: Final = [
    {"type": "function", "function": {"name": "rain", "parameters": _PLACE}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}},
]
# A text of one letter begins a tag, so that models which say anything say some.
_TAG: Final = {"type": "tag", "begin": "e", "content": {"type": "regex", "pattern": "[a-d]{1,3}"}}
_TAGS: Final = {"type": "triggered_tags", "triggers": ["e"], "tags": [{**_TAG, "end": "!"}]}
_FORCED: Final = {"type": "function", "function": {"name": "rain"}}
# The routes have what they can have of each kind.
CALLED: Final[Factors] = {
    "route": ["generate", "completions", "chat"],
    "stream": ["no", "yes"],
    "text": ["short", "long", "shared"],
    "length": ["few", "many"],
    "choice": ["best", "drawn"],
    # `n`, `best_of`; TGI's route draws seeds for these, and so says other things each time
    "answers": ["one", "several"],
    "truncate": ["no", "yes"],
    "tools": ["none", "auto", "required", "named"],
    "format": ["text", "json", "tags"],  # tags hold beside tools, which any other form excludes
    "stop": ["none", "string"],
    "told": ["text", "log-probabilities"],
}


@dataclass(frozen=True)
class ClientCall:
    """A request as its client makes it."""

    path: str
    body: Mapping[str, Any]

    @property
    def largest(self) -> Request:
        """What is at least as large as anything that is made of it."""
        most = MOST_TOKENS // 4
        ids = np.zeros(MOST_TOKENS - most, np.int32)
        return Request(ids, SamplingParameters(), StoppingCriteria(most))


def write_call(chosen: Mapping[str, str], seed: int) -> ClientCall:
    """Return a call with the wishes of `chosen`, kind -> name; the rest is drawn by `seed`."""
    draw = random.Random(seed)
    most = draw.randint(2, 6) if chosen["length"] == "few" else draw.randint(14, 28)
    seeded: dict[str, Any] = {"seed": draw.getrandbits(40)} if chosen["choice"] == "drawn" else {}
    match chosen["route"]:
        case "generate":
            return _generate(chosen, _write(chosen, draw), most, seeded)
        case "completions":
            return _complete(chosen, _write(chosen, draw), most, seeded)
        case _:
            return _chat(chosen, _write(chosen, draw), most, seeded)


def _write(chosen: Mapping[str, str], draw: random.Random) -> str:
    """Return the text of a prompt."""
    words = [draw.choice(_TEXT.split()) for _ in range(draw.randint(1, 4))]
    if chosen["text"] == "shared":
        return f"{_TEXT} {' '.join(words)}"
    return " ".join(words * (6 if chosen["text"] == "long" else 1))


def _generate(
    chosen: Mapping[str, str], text: str, most: int, seeded: dict[str, Any]
) -> ClientCall:
    streams = chosen["stream"] == "yes"
    parameters: dict[str, Any] = {"max_new_tokens": most, **seeded}
    parameters["do_sample"] = bool(seeded)
    if chosen["truncate"] == "yes":
        parameters["truncate"] = 5
    if chosen["format"] == "json":
        parameters["grammar"] = {"type": "json", "value": _PLACE}
    elif chosen["format"] == "tags":
        parameters["grammar"] = {"type": "structural_tag", "value": {"format": _TAGS}}
    if chosen["stop"] == "string":
        parameters["stop"] = ["e", "th"]
    if chosen["told"] != "text":
        parameters |= {"details": True, "top_n_tokens": 2}
        parameters["decoder_input_details"] = not streams
    path = "/generate_stream" if streams else "/generate"
    return ClientCall(path, {"inputs": text, "parameters": parameters})


def _openai(chosen: Mapping[str, str], most: int, seeded: dict[str, Any]) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": most, "temperature": 1.0 if seeded else 0.0, **seeded}
    body["stream"] = chosen["stream"] == "yes"
    if chosen["answers"] == "several":
        body["n"] = 2
    if chosen["stop"] == "string":
        body["stop"] = ["e", "th"]
    return body


def _complete(
    chosen: Mapping[str, str], text: str, most: int, seeded: dict[str, Any]
) -> ClientCall:
    body = _openai(chosen, most, seeded) | {"prompt": text}
    if chosen["told"] != "text":
        body["logprobs"] = 2
    if chosen["answers"] == "several" and not body["stream"]:
        body["best_of"] = 3
    return ClientCall("/v1/completions", body)


def _chat(chosen: Mapping[str, str], text: str, most: int, seeded: dict[str, Any]) -> ClientCall:
    body = _openai(chosen, most, seeded) | {"messages": [{"role": "user", "content": text}]}
    if chosen["told"] != "text":
        body |= {"logprobs": True, "top_logprobs": 2}
    if chosen["tools"] != "none":
        choice = _FORCED if chosen["tools"] == "named" else chosen["tools"]
        body |= {"tools": _TOOLS, "tool_choice": choice, "max_tokens": most + 30}
    if chosen["format"] == "tags":
        body["structural_tag"] = {"format": _TAGS}
    elif chosen["tools"] == "none" and chosen["format"] == "json":
        body["response_format"] = {"type": "json_schema", "json_schema": {"schema": _PLACE}}
    return ClientCall("/v1/chat/completions", body)
