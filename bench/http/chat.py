"""What chats cost beyond plain text: reading answers, and tool prompts that come again.

    python -m bench.http.chat --json bench/out/chat.json

Reading is measured in this process, CPU time of a thread: a token from its id to its event, with a
thought, prose and a call to be told apart, and with none; and what is read as the events of each
API. The prompt is 64 kB of tools, sent to a
server whose shard has no model and takes 20 us a token, as a fast device does: what is left of the
time to a first token when it comes again is the router's.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tqdm import tqdm

from bench.harness.server import running
from bench.harness.stats import add_output_flags, reporting, table
from tgi_trio.demo import model_path
from tgi_trio.router.http.dialects.anthropic.answer import AnswerEnd, MessageEvents
from tgi_trio.router.http.dialects.responses.answer import ResponseEvents
from tgi_trio.router.http.dialects.responses.schema import ResponsesRequest
from tgi_trio.router.http.dialects.responses.tools import Toolbox
from tgi_trio.router.http.dialects.responses.writing import (
    ItemWriter,
    ResponseWriter,
    copy_settings,
)
from tgi_trio.router.http.messages.events import ChatEvents, Envelope, Events
from tgi_trio.router.http.messages.tool_calls import AnswerReader, ReadChatEvents
from tgi_trio.router.http.messages.usage import UsageCount
from tgi_trio.router.request import StoppingCriteria
from tgi_trio.router.text.answer import CallOpening
from tgi_trio.router.text.answer_form import ReadForm
from tgi_trio.router.text.answer_text import AnswerText
from tgi_trio.router.text.output import OutputText
from tgi_trio.router.text.thoughts.marks import Marks
from tgi_trio.router.text.tokenizer import Tokenizer
from tgi_trio.router.text.tools.call_formats import HERMES
from tgi_trio.router.text.tools.call_parser import CallParser

GOAL_US = 3.0  # a token, read, beyond one that is not
GOAL_RATIO = 0.1  # of the time to a first token
PROMPT_BYTES = 1 << 16
_CONTEXT = 60_000  # tokens
_ENVELOPE = Envelope("chatcmpl-0", 1, "model", "0")
_ANSWER = (
    "<think>"
    + "The user asks for the weather. I shall look it up, for one city at a time. " * 12
    + "</think>\n\n"
    + "Let me look at the weather of Rome for you now, in detail. " * 6
    + HERMES.write(
        [("get_weather", {"city": "Rome", "note": "words that make it long, and longer"})]
    )
)
_TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_WORDS = (
    "read write file path text found lines shown people ask needed list search edit run".split()
)


# ---- reading -----------------------------------------------------------------------------------


def reading_costs(runs: int) -> dict[str, float]:
    """Return microseconds of CPU per token: text that is not read, and the same that is.

    What is read is written as the events of chats, Responses and Messages.
    """
    tokenizer = Tokenizer.from_folder(model_path())
    ids = tokenizer.encode_ids(_ANSWER, add_special_tokens=False).tolist()
    names = tuple(name + HERMES.middle for name in ("get_weather", "clock"))
    form = ReadForm(
        thoughts=Marks("<think>", "</think>"),
        inside=False,
        calls=lambda: CallParser(HERMES, lambda name: "abcdefgh1"),
        opening=CallOpening(HERMES.trigger + HERMES.opening, names),
        marks={},
    )
    criteria = StoppingCriteria(max_new_tokens=len(ids))

    def plain() -> Callable[[int], object]:
        text = OutputText(tokenizer, [5], criteria)
        events = ChatEvents(_ENVELOPE, 0, UsageCount(1))
        return lambda id: events.step([text.push(id, -0.5)])

    def reading(make: Callable[[], Events]) -> Callable[[], Callable[[int], object]]:
        def read() -> Callable[[int], object]:
            text, events = AnswerText(tokenizer, [5], criteria, form), make()
            return lambda id: events.step([text.push(id, -0.5)])

        return read

    made = {
        "plain": plain,
        "read": reading(lambda: ReadChatEvents(_ENVELOPE, 0, UsageCount(1), AnswerReader())),
        "responses": reading(_response_events),
        "messages": reading(
            lambda: MessageEvents(
                "msg_0", "model", AnswerReader(), AnswerEnd(1, False), show_thoughts=True
            )
        ),
    }
    best = dict.fromkeys(made, float("inf"))
    for _ in tqdm(range(runs), desc="reading", unit="run"):
        for name, make in made.items():  # in turns
            best[name] = min(best[name], _thread_ns(make(), ids) / len(ids) / 1e3)
    return best


def _response_events() -> ResponseEvents:
    settings = copy_settings(ResponsesRequest(input="?"), "model", store=False)
    source = random.Random(1)
    writer, items = ResponseWriter(settings, 1, source), ItemWriter(Toolbox(), False, False, source)
    return ResponseEvents(writer, items, AnswerReader(), lambda: 1, lambda *_: None)


def _thread_ns(push: Callable[[int], object], ids: Sequence[int]) -> int:
    began = time.thread_time_ns()
    for id in ids:
        push(id)
    return time.thread_time_ns() - began


# ---- prompts -----------------------------------------------------------------------------------


def tool_prompt(seed: int) -> bytes:
    """Return the body of a chat with about 64 kB of tools, unlike any other's."""
    source = random.Random(seed)

    def words(count: int) -> str:
        return " ".join(source.choice(_WORDS) for _ in range(count))

    tools: list[dict[str, Any]] = []
    while len(json.dumps(tools)) < PROMPT_BYTES:
        fields = {
            f"field_{i}": {
                "type": source.choice(["string", "integer", "boolean"]),
                "description": words(40),
            }
            for i in range(5)
        }
        schema = {"type": "object", "properties": fields, "required": ["field_0"]}
        tools.append(
            {
                "type": "function",
                "function": {
                    "name": f"tool_{len(tools)}",
                    "description": words(300),
                    "parameters": schema,
                },
            }
        )
    message = {"role": "user", "content": f"Do it, number {seed}."}
    return json.dumps(
        {"messages": [message], "tools": tools, "stream": True, "max_tokens": 4, "temperature": 0}
    ).encode()


def first_token_times(prompts: int, repeats: int) -> dict[str, list[float]]:
    """Return milliseconds to the first event, of prompts that are new and of the same again."""
    fake = json.dumps({"token_us": 20, "step_ms": 1, "blocks": 1 << 14})
    times: dict[str, list[float]] = {"first": [], "again": []}
    with TemporaryDirectory() as folder:
        write_long_model(Path(folder))
        flags = ["--model-id", folder, "--chat-template", _TEMPLATE]
        flags += ["--max-total-tokens", str(_CONTEXT)]
        with running(flags, fake=fake) as server:
            _measure_first_tokens(server.port, prompts, repeats, times)
    return times


def _measure_first_tokens(
    port: int, prompts: int, repeats: int, times: dict[str, list[float]]
) -> None:
    first_event_ms(port, tool_prompt(0))  # processes and imports are there
    for seed in tqdm(range(1, prompts + 1), desc="prompts", unit="prompt"):
        body = tool_prompt(seed)
        times["first"].append(first_event_ms(port, body))
        times["again"] += [first_event_ms(port, body) for _ in range(repeats)]


def write_long_model(folder: Path) -> None:
    """Write the embedded model's folder with a longer context; its weights are never read."""
    for file in model_path().iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((model_path() / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": _CONTEXT}))


def first_event_ms(port: int, body: bytes) -> float:
    """Send a chat and return the milliseconds until its first event; reads it to its end."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    began = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    line = response.readline()
    passed = 1e3 * (time.perf_counter() - began)
    if response.status != 200 or not line.startswith(b"data: "):
        raise RuntimeError(f"status {response.status}: {line[:300]!r}")
    response.read()
    connection.close()
    return passed


# ---- what it comes to --------------------------------------------------------------------------


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="bench.http.chat", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200, help="answers that are read")
    parser.add_argument("--prompts", type=int, default=5, help="different tool prompts")
    parser.add_argument("--repeats", type=int, default=5, help="times that each comes again")
    add_output_flags(parser)
    arguments = parser.parse_args()
    costs: dict[str, float] = {}
    times: dict[str, list[float]] = {}

    def summary() -> tuple[str, dict[str, Any]]:
        over = costs["read"] - costs["plain"]
        rows: list[list[object]] = [
            ["a token, read, beyond plain", f"<= {GOAL_US} us", f"{over:.2f} us", over <= GOAL_US]
        ]
        for name in ("responses", "messages"):
            more = costs[name] - costs["plain"]
            what = f"the same as events of {name.capitalize()}"
            rows.append([what, f"<= {GOAL_US} us", f"{more:.2f} us", more <= GOAL_US])
        results: dict[str, Any] = {"us_per_token": {**costs, "over": over}}
        if times.get("again"):
            first, again = (statistics.median(times[name]) for name in ("first", "again"))
            ratio = again / first
            shown = f"{ratio:.3f} ({first:.0f} ms, {again:.1f} ms)"
            what = "first token of a prompt again / new"
            rows.append([what, f"<= {GOAL_RATIO}", shown, ratio <= GOAL_RATIO])
            results["first_token_ms"] = {**times, "ratio": ratio}
        return table(("what", "goal", "reached", "met"), rows), results

    with reporting(arguments.json, "http.chat", summary):
        costs.update(reading_costs(arguments.runs))
        times.update(first_token_times(arguments.prompts, arguments.repeats))


if __name__ == "__main__":
    main()
