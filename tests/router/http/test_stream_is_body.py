"""Random requests in every dialect: what a stream says, put together, is what the body says."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.router.http.served import served
from tests.router.http.thinking_answers import CALL, MAY, SPECIAL, THINKS, engine
from tests.router.http.thinking_answers import WEATHER as TOOL

pytestmark = pytest.mark.trio

PIECES = (
    "Hm. ",
    "<think>",
    "</think>",
    "\n\n",
    "é😀",
    " 日本",
    "END",
    CALL,
    "<tool_call>",
    "<b>",
    "x",
)
STOPS = (["END"], ["x", "日"], ["<"], ["\n"], ["�"])
USER = [{"role": "user", "content": "Rain?"}]
SKIPPED = ("id", "call_id", "index", "created", "created_at", "completed_at", "prompt_token_ids")
Event = dict[str, Any]


def plain(value: Any) -> Any:
    """Return JSON without what differs between two calls, and without what says nothing."""
    if isinstance(value, dict):
        kept = {k: plain(v) for k, v in value.items() if k not in SKIPPED}
        return {k: v for k, v in kept.items() if v not in (None, "", [], {})}
    return [plain(each) for each in value] if isinstance(value, list) else value


def events(body: bytes) -> list[Event]:
    lines = [line[5:] for line in body.decode().splitlines() if line.startswith("data:")]
    return [json.loads(line) for line in lines if line.strip() != "[DONE]"]


def grow(whole: Event, piece: Event, *, texts: tuple[str, ...]) -> None:
    """Append to `whole` what a chunk adds to texts and lists; other fields are replaced."""
    for name, value in piece.items():
        old = whole.get(name)
        if value is None or name == "index":
            continue
        if isinstance(value, dict):
            grow(whole.setdefault(name, {}), value, texts=texts)
        elif name == "tool_calls":
            calls = whole.setdefault(name, [])
            for call in value:
                calls += [{}] if call["index"] == len(calls) else []
                grow(calls[call["index"]], call, texts=texts)
        elif old is not None and (isinstance(value, list) or name in texts):
            whole[name] = old + value
        else:
            whole[name] = value


def openai(found: list[Event]) -> Event:
    """Put the chunks of chats and completions together."""
    choices: dict[int, Event] = {}
    usage = None
    for event in found:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            renamed = {"message" if k == "delta" else k: v for k, v in choice.items()}
            texts = ("content", "text", "reasoning", "reasoning_content", "arguments")
            grow(choices.setdefault(choice["index"], {}), renamed, texts=texts)
    return {"choices": [choices[i] for i in sorted(choices)], "usage": usage}


def anthropic(found: list[Event]) -> Event:
    """Put the events of a message together."""
    message: Event = {}
    for event in found:
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                message["content"].append(event["content_block"] | {"partial_json": ""})
            case "content_block_delta":
                texts = ("text", "thinking", "partial_json")
                delta = {k: v for k, v in event["delta"].items() if k != "type"}
                grow(message["content"][event["index"]], delta, texts=texts)
            case "message_delta":
                grow(message, event["delta"] | {"usage": event["usage"]}, texts=())
    for block in message["content"]:
        text = block.pop("partial_json")
        if block["type"] == "tool_use":
            try:
                block["input"] = json.loads(text)
            except ValueError:  # cut off
                block["input"] = {}
    return message


def responses(found: list[Event]) -> Event:
    """Return the response that the last event has, whose texts are those of the deltas."""
    deltas: dict[tuple[int, str], str] = {}
    for event in found:
        if event["type"].endswith(".delta"):
            key = event["output_index"], event["type"].split(".")[1]
            deltas[key] = deltas.get(key, "") + event["delta"]
    response: Event = found[-1]["response"]
    for i, item in enumerate(response["output"]):
        if item["type"] == "message":
            said = "".join(part["text"] for part in item["content"])
            assert deltas.get((i, "output_text"), "") == said
        elif item["type"] == "function_call":
            assert deltas.get((i, "function_call_arguments"), "") == item["arguments"]
    return response


def native(found: list[Event]) -> Event:
    """Return TGI's body for the events of a stream."""
    last = found[-1]
    details = last["details"] | {"tokens": [event["token"] for event in found], "prefill": []}
    details.pop("input_length", None)
    if any(event.get("top_tokens") for event in found):
        details["top_tokens"] = [event["top_tokens"] for event in found]
    return {"generated_text": last["generated_text"], "details": details}


def chat(draw: random.Random) -> Event:
    body: Event = {"messages": USER, "n": draw.choice([1, 1, 3])}
    if draw.random() < 0.5:
        body |= {"logprobs": True, "top_logprobs": draw.choice([0, 2])}
    if draw.random() < 0.6:
        body["tools"] = [TOOL]
    for name in ("return_token_ids", "include_stop_str_in_output", "separate_reasoning"):
        body |= {name: draw.random() < 0.5} if draw.random() < 0.4 else {}
    return body


def completion(draw: random.Random) -> Event:
    body: Event = {"prompt": draw.choice(["x", ["x", "é"], [[9, 8]]]), "n": draw.choice([1, 2])}
    body |= {"logprobs": draw.choice([0, 2])} if draw.random() < 0.5 else {}
    body |= {"return_token_ids": True, "echo": "logprobs" not in body}
    return body


def message(draw: random.Random) -> Event:
    tool = {"name": "weather", "input_schema": TOOL["function"]["parameters"]}  # type: ignore[index]
    return {"model": "tgi", "messages": USER} | ({"tools": [tool]} if draw.random() < 0.6 else {})


def response(draw: random.Random) -> Event:
    body: Event = {"model": "tgi", "input": "Rain?"}
    if draw.random() < 0.6:
        body["tools"] = [{"type": "function", **TOOL["function"]}]  # type: ignore[dict-item]
    if draw.random() < 0.5:
        body |= {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    return body


# dialect -> its path, a random body, how a stream is put together, and names of limit and stops
DIALECTS: dict[str, Any] = {
    "chat": ("/v1/chat/completions", chat, openai, "max_tokens", "stop"),
    "completions": ("/v1/completions", completion, openai, "max_tokens", "stop"),
    "messages": ("/v1/messages", message, anthropic, "max_tokens", "stop_sequences"),
    "responses": ("/v1/responses", response, responses, "max_output_tokens", ""),
}


@pytest.mark.parametrize("dialect", [*DIALECTS, "native"])
async def test_a_stream_says_what_the_body_says(dialect: str) -> None:
    draw = random.Random(dialect)
    for _ in range(40):
        text = "".join(draw.choices(PIECES, k=draw.randrange(7)))
        most, stops = draw.choice([1, 3, 9, 30, 500]), draw.choice(STOPS)
        stopped = draw.random() < 0.4
        found = engine(text, draw.choice([THINKS, MAY]), draw.choice([(), SPECIAL]))
        found.tokens_per_step = draw.choice([1, 2, 5, 1000])
        if dialect == "native":
            given = {"details": True, "max_new_tokens": most, "top_n_tokens": draw.choice([0, 2])}
            body: Event = {
                "inputs": "x",
                "parameters": given | ({"stop": stops} if stopped else {}),
            }
            paths, streamed, put_together = ("/generate", "/generate_stream"), body, native
        else:
            path, make, put_together, limit, stop = DIALECTS[dialect]
            body = make(draw) | {limit: most} | ({stop: stops} if stop and stopped else {})
            paths, streamed = (path, path), body | {"stream": True}
            if put_together is openai:
                streamed["stream_options"] = {"include_usage": True}
        async with served(found) as server:
            client = await server.connect()
            whole = await client.post(paths[0], body)
            stream = await client.post(paths[1], streamed)
        assert whole.status == stream.status == 200, (body, whole.body, stream.body)
        expected = plain(whole.json())
        told = plain(put_together(events(stream.body)))
        assert told == {name: expected.get(name) for name in told}, (text, body)
