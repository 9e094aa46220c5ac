"""OpenAI's Responses that are kept: going on from them, showing and forgetting them."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio

from tests.router.http.dialects.conversations import ROME, engine
from tests.router.http.dialects.responses_answers import PATH, TOOLS, error, events, final
from tests.router.http.fake_engine import FakeEngine
from tests.router.http.image_requests import data_url, seeing_engine
from tests.router.http.served import Answer, Client, Server, served, until
from tests.router.http.thinking import let_think
from tests.router.media.image_files import encode, noise
from tgi_trio.router.http.call import HttpSettings
from tgi_trio.router.http.dialects.responses import history, replies
from tgi_trio.router.http.dialects.responses.history import decode_items
from tgi_trio.router.request import Request
from tgi_trio.router.text.tools.call_formats import HERMES

pytestmark = pytest.mark.trio

THOUGHTS = "<think>Hm, rain.</think>It rains."
CALL = "<think>Where?</think>" + HERMES.write([ROME])
USER = {"role": "user", "content": "And tomorrow?"}


class Talk:
    """A client, and the prompts that its requests became."""

    def __init__(self, server: Server, client: Client) -> None:
        self._server, self._client = server, client

    async def ask(self, input: Any, **more: Any) -> Answer:
        body = {"model": "test/model", "input": input, "tools": TOOLS, **more}
        return await self._client.post(PATH, body)

    async def answer(self, input: Any, **more: Any) -> replies.ResponseReply:
        """Return a response that must be complete, streamed or not."""
        answer = await self.ask(input, **more)
        if more.get("stream"):
            return final(events(answer))
        assert answer.status == 200, answer.body
        return msgspec.json.decode(answer.body, type=replies.ResponseReply)

    async def do(self, method: str, path: str, **headers: str) -> Answer:
        return await self._client.ask(method, path, **headers)

    def request(self) -> Request:
        """Return what the last one became."""
        return self._server.engine.submitted[-1]

    def prompt(self) -> str:
        """Return the last prompt."""
        found: str = self._server.engine.tokenizer.decode(self.request().prompt_ids)
        return found


@asynccontextmanager
async def talk(engine: FakeEngine, http: HttpSettings | None = None) -> AsyncIterator[Talk]:
    async with served(engine, http) as server:
        yield Talk(server, await server.connect())


def sent_back(response: replies.ResponseReply) -> list[Any]:
    """Return the items of an answer as a client sends them that keeps the history itself."""
    return list(msgspec.to_builtins(response.output))


def result_of(response: replies.ResponseReply) -> dict[str, Any]:
    call = response.output[-1]
    assert isinstance(call, replies.FunctionCallItem)
    return {"type": "function_call_output", "call_id": call.call_id, "output": "wet"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["It rains.", THOUGHTS, CALL])
async def test_going_on_is_sending_the_whole_conversation(monkeypatch, text, stream):
    let_think(monkeypatch)
    async with talk(engine(text)) as one:
        first = await one.answer("Rain?", stream=stream)
        assert first.store and first.previous_response_id is None
        more = [result_of(first)] if text is CALL else [USER]
        second = await one.answer(more, stream=stream, previous_response_id=first.id)
        going_on = one.prompt()
        assert second.previous_response_id == first.id
        whole = [{"role": "user", "content": "Rain?"}, *sent_back(first), *more]
        await one.answer(whole)
        assert one.prompt() == going_on
        # What was answered there is part of the conversation as well.
        await one.answer("So?", previous_response_id=second.id)
        third = one.prompt()
        await one.answer([*whole, *sent_back(second), {"role": "user", "content": "So?"}])
        assert one.prompt() == third
        # Another branch does not know of it.
        await one.answer(more, previous_response_id=first.id)
        assert one.prompt() == going_on


async def test_instructions_do_not_go_on():
    async with talk(engine()) as one:
        first = await one.answer("Rain?", instructions="Be brief.")
        assert "Be brief." in one.prompt()
        await one.answer("Why?", instructions="Be long.", previous_response_id=first.id)
        assert "Be brief." not in one.prompt() and "Be long." in one.prompt()


async def test_a_response_is_decoded_once_however_many_of_its_items_are_named(monkeypatch):
    """It may hold the conversation with its images: 20 MB of them take a tenth of a second."""
    decoded: list[int] = []

    def decode(lists: Any) -> Any:
        decoded.append(len(lists))
        return decode_items(lists)

    async with talk(engine()) as one:
        first = await one.answer([{**USER, "id": f"msg_{i}"} for i in range(30)])
        monkeypatch.setattr(history, "decode_items", decode)
        named = [{"type": "item_reference", "id": f"msg_{i}"} for i in range(30)]
        await one.answer([*named, *named, {"type": "item_reference", "id": first.output[0].id}])
    assert decoded == [2]  # lists: what was given, what was answered


async def test_items_may_be_named_instead_of_sent(monkeypatch):
    """As Vercel's AI SDK does, which takes it that OpenAI keeps them."""
    let_think(monkeypatch)
    async with talk(engine(CALL)) as one:
        first = await one.answer("Rain?")
        user = {"role": "user", "content": "Rain?"}
        named = [{"type": "item_reference", "id": item.id} for item in first.output]
        second = await one.answer([user, *named, result_of(first)])
        by_name = one.prompt()
        await one.answer([user, *sent_back(first), result_of(first)])
        assert one.prompt() == by_name
        # The next request names what both answers consist of; a reference may lack its type.
        more = [{"id": item.id} for item in second.output]
        await one.answer([user, *named, result_of(first), *more, result_of(second)])
        assert one.prompt().startswith(by_name.removesuffix("<assistant>"))


@pytest.mark.parametrize(
    ("http", "store", "words"),
    [
        (HttpSettings(response_store_bytes=0), True, "--response-store-bytes 0"),
        (HttpSettings(response_store_bytes=0), ..., "--response-store-bytes 0"),
        (HttpSettings(), False, "was not stored"),
        (HttpSettings(response_store_bytes=1500), True, "no longer"),
    ],
)
async def test_what_is_not_kept_is_not_found(http, store, words):
    async with talk(engine("Yes. " * 100), http) as one:
        more = {} if store is ... else {"store": store}
        first = await one.answer("Rain?", **more)
        assert first.store == (http.response_store_bytes > 0 and store is True)
        answer = await one.ask("Why?", previous_response_id=first.id)
        status, _, code, said = error(answer)
        assert (status, code) == (404, "previous_response_not_found") and words in said
        assert json.loads(answer.body)["error"]["param"] == "previous_response_id"
        assert answer.headers["x-tgi-elsewhere"] == "1"
        answer = await one.ask([USER, {"type": "item_reference", "id": first.output[0].id}])
        status, _, code, said = error(answer)
        assert (status, code) == (404, "item_not_found") and words in said
        assert json.loads(answer.body)["error"]["param"] == "input[1]"
        assert answer.headers["x-tgi-elsewhere"] == "1"
        shown = error(await one.do("GET", f"{PATH}/{first.id}"))
        assert shown[0] == 404 and shown[2] == "response_not_found" and words in shown[3]


async def test_a_response_is_its_callers_alone():
    http = HttpSettings(api_keys=("mine", "theirs"))
    async with served(engine(), http) as server:
        client = await server.connect()
        mine: dict[str, str] = {"authorization": "Bearer mine"}
        body = {"model": "test/model", "input": "Rain?"}
        id = (await client.post(PATH, body, **mine)).json()["id"]
        for headers, status in ((mine, 200), ({"x_api_key": "mine"}, 200), ({}, 401)):
            assert (await client.get(f"{PATH}/{id}", **headers)).status == status
        other = {"authorization": "Bearer theirs"}
        for method, path in (
            ("GET", f"{PATH}/{id}"),
            ("GET", f"{PATH}/{id}/input_items"),
            ("POST", f"{PATH}/{id}/cancel"),
            ("DELETE", f"{PATH}/{id}"),
        ):
            assert (await client.ask(method, path, **other)).status == 404
        going_on = await client.post(PATH, {**body, "previous_response_id": id}, **other)
        assert error(going_on)[2] == "previous_response_not_found"
        assert (await client.get(f"{PATH}/{id}", **mine)).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_it_is_shown_as_it_was_answered_until_it_is_deleted(stream):
    async with talk(engine()) as one:
        first = await one.answer("Rain?", stream=stream, metadata={"a": "b"})
        shown = await one.do("GET", f"{PATH}/{first.id}?include[]=x")
        assert msgspec.json.decode(shown.body, type=replies.ResponseReply) == first
        refused = error(await one.do("GET", f"{PATH}/{first.id}?stream=true"))
        assert refused[0] == 400 and "`stream` needs a response that was" in refused[3]
        refused = error(await one.do("POST", f"{PATH}/{first.id}/cancel"))
        assert refused[0] == 400 and "background" in refused[3]
        second = await one.answer("Why?", previous_response_id=first.id)
        gone = await one.do("DELETE", f"{PATH}/{first.id}")
        assert gone.json() == {"id": first.id, "object": "response", "deleted": True}
        for method in ("GET", "DELETE"):
            assert error(await one.do(method, f"{PATH}/{first.id}"))[0] == 404
        await one.answer("So?", previous_response_id=second.id)  # goes on from both all the same
        assert "Rain?" in one.prompt() and "Why?" in one.prompt()


async def test_the_items_that_a_response_answers():
    async with talk(engine(HERMES.write([ROME]))) as one:
        first = await one.answer("Rain?", instructions="Be brief.")
        given = [result_of(first), {**USER, "id": "mine"}]
        second = await one.answer(given, previous_response_id=first.id)

        async def page(query: str = "") -> dict[str, Any]:
            answer = await one.do("GET", f"{PATH}/{second.id}/input_items{query}")
            assert answer.status == 200, answer.body
            found: dict[str, Any] = answer.json()
            return found

        found = await page()
        assert found["object"] == "list" and found["has_more"] is False
        items = found["data"]
        assert [found["first_id"], found["last_id"]] == [items[0]["id"], items[-1]["id"]]
        assert items[0]["id"] == "mine" and len({item["id"] for item in items}) == 4
        kinds = ["message", "function_call_output", "function_call", "message"]
        assert [item["type"] for item in items] == kinds
        assert items[3]["content"] == [{"type": "input_text", "text": "Rain?"}]
        assert items[2]["id"] == first.output[0].id and items[1]["output"] == "wet"
        assert (await page("?order=asc"))["data"] == items[::-1]
        two = await page("?limit=2")
        assert two["data"] == items[:2] and two["has_more"]
        rest = await page(f"?limit=2&after={two['last_id']}")
        assert rest["data"] == items[2:] and not rest["has_more"]
        assert (await page(f"?after={items[-1]['id']}"))["first_id"] is None
        for query, words in (
            ("?limit=" + 5000 * "9", "Given: 999"),  # more than Python reads as a number
            ("?limit=0", "`limit` must be >= 1 and <= 100. Given: 0"),
            ("?limit=x", "Given: x"),
            ("?limit=101", "Given: 101"),
            ("?order=up", "`order` must be `asc` or `desc`. Given: up"),
            ("?after=me", "`after` must be the id of one of the items. Given: me"),
        ):
            answer = await one.do("GET", f"{PATH}/{second.id}/input_items{query}")
            status, _, code, text = error(answer)
            assert (status, code) == (400, "invalid_value") and words in text
            assert f"?{answer.json()['error']['param']}=" in query


@pytest.mark.parametrize("stream", [False, True])
async def test_an_item_that_a_limit_ended_is_shown_as_incomplete(stream):
    async with talk(engine("It rains, and it will rain.")) as one:
        first = await one.answer("Rain?", stream=stream, max_output_tokens=3)
        assert first.output[-1].status == "incomplete"
        # Sent back by a client that keeps the history itself, and gone on from.
        sent = [{**USER, "status": "in_progress"}, *sent_back(first), {**USER, "status": 5}]
        ids = [(await one.answer([USER], previous_response_id=first.id)).id]
        ids.append((await one.answer(sent)).id)
        for id, middle in zip(ids, ("completed", "in_progress"), strict=True):
            found = (await one.do("GET", f"{PATH}/{id}/input_items?order=asc")).json()["data"]
            assert [item["status"] for item in found] == [middle, "incomplete", "completed"]


@pytest.mark.parametrize("reference", [{}, {"id": None}])
async def test_a_reference_needs_an_id(reference):
    async with talk(engine()) as one:
        answer = await one.ask([USER, {"type": "item_reference", **reference}])
        status, _, code, said = error(answer)
        assert (status, code) == (400, "missing_required_parameter") and "field `id`" in said
        assert answer.json()["error"]["param"] == "input[1].id"


@pytest.mark.parametrize("size", [28, 200])
async def test_an_image_goes_on(size):
    """Also a large one, which was cut out of the body that it came in."""
    image = {"type": "input_image", "image_url": data_url(encode(noise(size, size)))}
    turn = {"role": "user", "content": [{"type": "input_text", "text": "See "}, image]}
    async with seeing_engine(most=400) as seeing, served(seeing) as server:
        client = await server.connect()
        first = await client.post(PATH, {"input": [turn]})
        assert first.status == 200, first.body
        going_on = {"input": "So?", "previous_response_id": first.json()["id"]}
        second = await client.post(PATH, going_on)
        assert second.status == 200, second.body
        before, after = seeing.submitted
        assert [each.key for each in after.images] == [each.key for each in before.images]
        shown = await client.get(f"{PATH}/{first.json()['id']}/input_items")
        assert shown.json()["data"][0]["content"][1] == image


def noting_threads(act: Callable[[Any], Any], beside: list[bool]) -> Callable[[Any], Any]:
    """Return what does the same, and notes whether that is beside the loop."""

    def noted(given: Any) -> Any:
        beside.append(threading.current_thread() is not threading.main_thread())
        return act(given)

    return noted


@pytest.mark.parametrize(("size", "beside"), [(28, False), (200, True)])
async def test_large_items_are_written_and_read_beside_the_loop(size, beside, monkeypatch):
    where: dict[str, list[bool]] = {"write_items": [], "decode_items": []}
    for name, threads in where.items():
        monkeypatch.setattr(history, name, noting_threads(getattr(history, name), threads))
    image = {"type": "input_image", "image_url": data_url(encode(noise(size, size)))}
    turn = {"role": "user", "content": [{"type": "input_text", "text": "See "}, image]}
    async with seeing_engine(most=1000) as seeing, served(seeing) as server:
        client = await server.connect()
        first = await client.post(PATH, {"input": [turn]})
        assert first.status == 200, first.body
        assert where["write_items"] == [beside]
        id = first.json()["id"]
        second = await client.post(PATH, {"input": "So?", "previous_response_id": id})
        assert second.status == 200, second.body
        assert (await client.get(f"{PATH}/{id}/input_items")).status == 200
    assert where["write_items"] == [beside, False]
    assert where["decode_items"] == [beside, beside]


async def test_the_prompt_is_counted_with_what_it_goes_on_from():
    async with talk(engine()) as one:
        first = await one.answer("Rain?")
        counted = await one._client.post(
            f"{PATH}/input_tokens",
            {"input": "Why?", "tools": TOOLS, "previous_response_id": first.id},
        )
        second = await one.answer("Why?", previous_response_id=first.id)
        assert second.usage is not None
        assert counted.json()["input_tokens"] == second.usage.input_tokens


async def test_an_answer_that_was_given_up_is_not_kept():
    fake = engine("ab" * 3000)
    async with served(fake, running=False) as server:
        client = await server.connect()
        await client.send("POST", PATH, {"input": "Rain?", "stream": True})
        await until(lambda: len(fake.submitted) == 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fake.run)
            await client.event()
            begun = (await client.event()).data.partition(b"data: ")[2].partition(b"\n")[0]
            id = json.loads(begun)["response"]["id"]
            await client.stream.aclose()
            await until(lambda: not fake.live)
            other = await server.connect()
            assert (await other.get(f"{PATH}/{id}")).status == 404
            nursery.cancel_scope.cancel()
