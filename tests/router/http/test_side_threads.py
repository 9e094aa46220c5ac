"""Large bodies are read and rendered beside the loop, and say the same as on it."""

from __future__ import annotations

import sys
import threading
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import served, until
from tgi_trio.router.http import call as calls
from tgi_trio.router.http import generation, preparing
from tgi_trio.router.http.conversation import Conversation, choose_tools
from tgi_trio.router.http.dialects.responses import history, writing
from tgi_trio.router.http.dialects.responses import request as conversion
from tgi_trio.router.http.engine_api import ServedLimits
from tgi_trio.router.http.messages.schema import ChatRequest
from tgi_trio.router.http.routes import chat, completions, messages, native, responses, tokens
from tgi_trio.router.http.side_threads import SideThreads, switching_soon
from tgi_trio.router.text.tokenizer import Encoding, Tokenizer

pytestmark = pytest.mark.trio

LIMITS = ServedLimits(max_input_tokens=100_000, max_total_tokens=100_001)
MESSAGES = [{"role": "user", "content": f"message {i}"} for i in range(3000)]
BODIES: list[tuple[str, Any, dict[str, Any]]] = [
    ("/v1/chat/completions", chat, {"messages": MESSAGES, "max_tokens": 4}),
    ("/v1/messages", messages, {"messages": MESSAGES, "max_tokens": 4, "model": "test/model"}),
    ("/v1/responses", responses, {"input": MESSAGES, "max_output_tokens": 16}),
]


@pytest.mark.parametrize(("path", "route", "body"), BODIES, ids=[each[0] for each in BODIES])
async def test_a_large_chat_is_read_beside_the_loop_and_is_the_same(
    path: str, route: Any, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    where: list[bool] = []
    convert = route.to_conversation

    def convert_somewhere(*given: Any) -> Any:
        where.append(threading.current_thread() is threading.main_thread())
        return convert(*given)

    monkeypatch.setattr(route, "to_conversation", convert_somewhere)
    engine = FakeEngine(limits=LIMITS)
    async with served(engine) as server:
        client = await server.connect()
        assert (await client.post(path, body)).status == 200
        monkeypatch.setattr(calls, "LARGE", 1 << 30)
        assert (await client.post(path, body)).status == 200
    assert where == [False, True]
    beside, on_it = engine.submitted
    assert beside.prompt_ids.tolist() == on_it.prompt_ids.tolist()
    assert "message 2999" in engine.prompts[0]


async def test_a_large_response_takes_nothing_of_the_loop_by_its_items(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 130,000 items each of these took the loop 5 to 30 ms."""
    beside: dict[str, list[bool]] = {}

    def watch(module: Any, name: str) -> None:
        act, noted = getattr(module, name), beside.setdefault(name, [])

        def somewhere(*given: Any) -> Any:
            noted.append(threading.current_thread() is not threading.main_thread())
            return act(*given)

        monkeypatch.setattr(module, name, somewhere)

    watch(conversion, "read_updates")
    watch(history, "_find_references")
    watch(history, "write_items")
    watch(writing, "encode_list")
    freed: list[object] = []
    free = SideThreads.free

    def note_freed(threads: SideThreads, made: list[object]) -> None:
        freed.extend(type(each) for each in made)
        free(threads, made)

    monkeypatch.setattr(SideThreads, "free", note_freed)
    async with served(FakeEngine(limits=LIMITS)) as server:
        client = await server.connect()
        answer = await client.post("/v1/responses", {"input": MESSAGES, "max_output_tokens": 16})
        assert answer.status == 200
    items = beside.pop("write_items")
    assert items == [True], "what is answered is a part of the answer"
    assert beside == {name: [True] for name in beside}
    assert history.History in freed


TOOLS: list[tuple[int, bool]] = [(3, False), (150, True)]  # how many, and whether in a thread


@pytest.mark.parametrize(("count", "beside"), TOOLS)
async def test_the_grammar_of_many_tools_is_made_beside_the_loop_and_is_the_same(
    count: int, beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    where: list[bool] = []

    def choose_somewhere(*given: Any) -> Any:
        where.append(threading.current_thread() is not threading.main_thread())
        return choose_tools(*given)

    monkeypatch.setattr(preparing, "choose_tools", choose_somewhere)
    engine = FakeEngine(limits=LIMITS)
    functions = [{"name": f"f{i}", "parameters": {"type": "object"}} for i in range(count)]
    tools = [{"type": "function", "function": each} for each in functions]
    body = {"messages": MESSAGES[:1], "tools": tools, "max_tokens": 4}
    async with served(engine) as server:
        client = await server.connect()
        assert (await client.post("/v1/chat/completions", body)).status == 200
        monkeypatch.setattr(preparing, "takes_long", lambda *given: False)
        assert (await client.post("/v1/chat/completions", body)).status == 200
    assert where == [beside, False]
    first, second = engine.submitted
    assert first.sampling.grammar is not None
    assert first.sampling.grammar == second.sampling.grammar
    assert first.prompt_ids.tolist() == second.prompt_ids.tolist()


TOKENS: list[tuple[str, dict[str, Any]]] = [
    ("/tokenize", {"inputs": "n\u00e9" * 3000}),
    ("/tokenize", {"prompt": "n\u00e9" * 3000, "return_token_strs": True}),
    ("/chat_tokenize", {"messages": [{"role": "user", "content": "n\u00e9" * 3000}]}),
]


@pytest.mark.parametrize(("path", "body"), TOKENS)
async def test_many_tokens_are_written_beside_the_loop_and_are_the_same(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    beside: set[bool] = set()
    write, written = tokens.simple_tokens_json, Tokenizer.written

    def note() -> None:
        beside.add(threading.current_thread() is not threading.main_thread())

    def write_somewhere(encoding: Encoding) -> bytes:
        note()
        return write(encoding)

    def written_somewhere(self: Tokenizer, ids: Any) -> list[str]:
        note()
        return written(self, ids)

    monkeypatch.setattr(tokens, "simple_tokens_json", write_somewhere)
    monkeypatch.setattr(Tokenizer, "written", written_somewhere)
    async with served(FakeEngine(limits=LIMITS)) as server:
        client = await server.connect()
        first = await client.post(path, body)
        assert first.status == 200 and beside == {True}
        monkeypatch.setattr(tokens, "_MANY", 1 << 30)
        assert (await client.post(path, body)).body == first.body
        assert beside == {True, False}


SHOWN: list[tuple[str, Any, str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        chat,
        "_completion",
        {"messages": MESSAGES[:1], "max_tokens": 400, "logprobs": True, "top_logprobs": 2},
    ),
    (
        "/v1/completions",
        completions,
        "_completion",
        {"prompt": ["a", "b"], "max_tokens": 400, "logprobs": 2, "n": 2, "best_of": 2},
    ),
    (
        "/generate",
        native,
        "_details",
        {"inputs": "a", "parameters": {"max_new_tokens": 400, "details": True, "top_n_tokens": 2}},
    ),
    (
        "/v1/messages",
        messages,
        "message",
        {"model": "tgi", "messages": MESSAGES[:1], "max_tokens": 400},
    ),
    ("/v1/responses", responses, "response", {"input": "a", "max_output_tokens": 400}),
]


def _said(answer: dict[str, Any]) -> Any:
    """Return what an answer of any API says, without ids and times."""
    for name in ("choices", "content", "output"):
        if name in answer:
            return [{**each, "id": None} for each in answer[name]]
    return answer


@pytest.mark.parametrize(("path", "route", "name", "body"), SHOWN, ids=[each[0] for each in SHOWN])
async def test_an_answer_that_shows_many_tokens_is_written_beside_the_loop_and_is_the_same(
    path: str, route: Any, name: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    beside: list[bool] = []
    write = getattr(route, name)

    def write_somewhere(*given: Any, **named: Any) -> Any:
        beside.append(threading.current_thread() is not threading.main_thread())
        return write(*given, **named)

    monkeypatch.setattr(route, name, write_somewhere)
    engine = FakeEngine(lambda prompt: "long " * 60, limits=LIMITS)
    answers = []
    async with served(engine) as server:
        client = await server.connect()
        for most in (generation._MANY, 1 << 30):
            monkeypatch.setattr(generation, "_MANY", most)
            answer = await client.post(path, body)
            assert answer.status == 200, answer.body
            answers.append(answer.json())
    first, second = map(_said, answers)
    assert first == second and "long long" in str(first) and beside == [True, False]


@pytest.mark.parametrize("alternatives", [0, 5])
async def test_alternatives_count_among_the_tokens_that_are_shown(
    alternatives: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside: list[bool] = []
    write = native._details

    def write_somewhere(*given: Any) -> bytes:
        beside.append(threading.current_thread() is not threading.main_thread())
        return write(*given)

    monkeypatch.setattr(native, "_details", write_somewhere)
    engine = FakeEngine(lambda prompt: "long " * 12, limits=LIMITS)
    engine.tops = lambda id: [(34 + i, -1.0 - i) for i in range(5)]
    async with served(engine) as server:
        client = await server.connect()
        asked = {"max_new_tokens": 400, "details": True, "top_n_tokens": alternatives}
        answer = await client.post("/generate", {"inputs": "a", "parameters": asked})
    assert answer.status == 200 and len(answer.json()["details"]["tokens"]) < generation._MANY
    assert beside == [alternatives > 0]


async def test_what_is_wrong_with_a_large_body_is_told_as_ever() -> None:
    async with served() as server:
        client = await server.connect()
        wrong = await client.post("/v1/chat/completions", {"messages": [*MESSAGES, {"role": 5}]})
        assert wrong.status == 422
        assert b"messages[3000].role" in wrong.body
        empty = {"messages": [*MESSAGES, {"role": "user"}]}
        wrong = await client.post("/v1/chat/completions", empty)
        assert b"messages[3000]: needs `content` or `tool_calls`" in wrong.body


async def test_ids_of_a_long_prompt_are_those_of_a_short_one() -> None:
    engine = FakeEngine(limits=LIMITS)
    ids = [3 + i % 200 for i in range(50_000)]
    async with served(engine) as server:
        client = await server.connect()
        body = {"prompt": ids, "max_tokens": 1}
        answer = await client.post("/v1/completions", body)
        assert answer.status == 200, answer.body
        refused = await client.post("/v1/completions", {"prompt": [*ids, 300], "max_tokens": 1})
        mixed = await client.post("/v1/completions", {"prompt": [*ids, "x"], "max_tokens": 1})
    assert engine.submitted[0].prompt_ids.tolist() == ids
    assert b"must hold token ids >= 0 and < 258. Given: 300" in refused.body
    assert b"texts and token ids cannot be mixed" in mixed.body


async def test_two_compute_at_a_time_and_the_loop_goes_on() -> None:
    threads, release = SideThreads(), threading.Event()
    running: list[int] = []

    def compute(number: int) -> int:
        running.append(number)
        release.wait()
        return number

    found: list[int] = []

    async def run(number: int) -> None:
        found.append(await threads.run(partial(compute, number)))

    async with trio.open_nursery() as nursery:
        for number in range(5):
            nursery.start_soon(run, number)
        while len(running) < 2:
            await trio.sleep(0.001)
        await trio.testing.wait_all_tasks_blocked()
        assert len(running) == threads.running == 2
        release.set()
    assert sorted(found) == list(range(5))
    assert threads.running == 0


async def test_a_client_that_leaves_does_not_wait_and_its_thread_is_counted() -> None:
    threads, release = SideThreads(), threading.Event()
    try:
        with trio.move_on_after(0.01) as scope:
            await threads.run(release.wait)
        assert scope.cancelled_caught
        assert threads.running == 1
    finally:
        release.set()
    while threads.running:
        await trio.sleep(0.001)
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0)


async def test_a_large_body_is_freed_in_a_thread_once_it_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[list[type]] = []

    def free(self: SideThreads, made: list[object]) -> None:
        given.append([type(each) for each in made])

    monkeypatch.setattr(SideThreads, "free", free)
    async with served(FakeEngine(limits=LIMITS)) as server:
        client = await server.connect()
        large = {"messages": MESSAGES, "max_tokens": 4}
        wrong = {"messages": [*MESSAGES, {"role": "user"}]}
        small = {"messages": MESSAGES[:1], "max_tokens": 4}
        for body, status in ((large, 200), (wrong, 422), (small, 200)):
            assert (await client.post("/v1/chat/completions", body)).status == status
    assert given == [[ChatRequest, Conversation, preparing.Prepared], [ChatRequest], []]


async def test_the_interpreter_is_given_away_sooner_within_the_block_alone() -> None:
    usual = sys.getswitchinterval()
    with switching_soon():
        assert sys.getswitchinterval() == pytest.approx(0.0005)
    assert sys.getswitchinterval() == usual


async def test_a_request_whose_body_is_still_to_come_is_in_the_house() -> None:
    async with served() as server:
        stream = await server.raw()
        head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        await stream.send_all(head + b'content-length: 14\r\n\r\n{"inputs"')
        await until(lambda: server.app.count_requests() == 1)
        assert server.engine.permits == 0
        await stream.send_all(b':"x"}')
        await until(lambda: server.app.count_requests() == 0)
        stream.socket.close()
