"""OpenAI's Conversations: kept, changed, forgotten, and told what responses say."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio

from tests.router.http.dialects.conversations import ROME, engine
from tests.router.http.dialects.responses_answers import PATH, TOOLS, error
from tests.router.http.dialects.test_responses_kept import result_of, sent_back
from tests.router.http.fake_engine import FakeEngine
from tests.router.http.image_requests import data_url, seeing_engine
from tests.router.http.served import Answer, Client, Server, served
from tests.router.http.thinking import let_think
from tests.router.media.image_files import encode, noise
from tgi_trio.router.http.call import HttpSettings
from tgi_trio.router.http.dialects.responses import replies
from tgi_trio.router.text.tools.call_formats import HERMES

pytestmark = pytest.mark.trio

ALL = "/v1/conversations"
CALL = "<think>Where?</think>" + HERMES.write([ROME])
USER = {"role": "user", "content": "Rain?"}


class Talk:
    """A client of /v1/conversations and /v1/responses."""

    def __init__(self, server: Server, client: Client) -> None:
        self.server, self.client = server, client
        self.engine, self.store = server.engine, server.app.responses

    async def do(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        found = await self.client.ask(method, f"{ALL}{path}", body, **headers)
        self.store.check()
        return found

    async def keep(self, **body: Any) -> str:
        answer = await self.do("POST", "", body)
        assert answer.status == 200, answer.body
        shown = msgspec.json.decode(answer.body, type=replies.ConversationReply)
        assert shown.object == "conversation" and shown.id.startswith("conv_")
        return shown.id

    async def items(self, id: str, query: str = "?order=asc") -> list[dict[str, Any]]:
        answer = await self.do("GET", f"/{id}/items{query}")
        assert answer.status == 200, answer.body
        found: list[dict[str, Any]] = answer.json()["data"]
        return found

    async def ask(self, input: Any, **more: Any) -> Answer:
        body = {"model": "test/model", "input": input, "tools": TOOLS, **more}
        found = await self.client.post(PATH, body)
        self.store.check()
        return found

    async def answer(self, input: Any, **more: Any) -> replies.ResponseReply:
        answer = await self.ask(input, **more)
        assert answer.status == 200, answer.body
        return msgspec.json.decode(answer.body, type=replies.ResponseReply)


@asynccontextmanager
async def talk(fake: FakeEngine, http: HttpSettings | None = None) -> AsyncIterator[Talk]:
    async with served(fake, http) as server:
        yield Talk(server, await server.connect())


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("text", ["It rains.", CALL])
async def test_a_response_goes_on_and_adds_what_is_said(monkeypatch: Any, text: str, store: bool):
    """Its prompts are those of the whole conversation, sent by a client that keeps it."""
    let_think(monkeypatch)
    async with talk(engine(text)) as one:
        id = await one.keep(items=[{"role": "system", "content": "Be brief."}])
        within: dict[str, Any] = {"conversation": id, "store": store}
        first = await one.answer("Rain?", **within)
        assert first.conversation == replies.ConversationName(id) and first.store is store
        more = [result_of(first)] if text is CALL else [{"role": "user", "content": "So?"}]
        second = await one.answer(more, **{**within, "conversation": {"id": id}})
        going_on = one.engine.prompts[-1]
        whole = [{"role": "system", "content": "Be brief."}, USER, *sent_back(first), *more]
        await one.answer(whole, store=False)
        assert one.engine.prompts[-1] == going_on
        items = await one.items(id, "?order=asc&limit=100")
        kinds = [item["type"] for item in items]
        said = [item.id for item in (*first.output, *second.output)]
        assert [each["id"] for each in items if each["id"] in said] == said
        assert kinds[:2] == ["message", "message"] and len(items) == 3 + len(said)
        # A later response goes on from the conversation, or from one of its responses.
        await one.answer("Why?", conversation=id, store=False)
        by_conversation = one.engine.prompts[-1]
        if store:
            await one.answer("Why?", previous_response_id=second.id)
            assert one.engine.prompts[-1] == by_conversation


async def test_what_responses_go_on_from_is_kept_once() -> None:
    async with talk(engine("Yes.")) as one:
        id = await one.keep(items=[USER])
        ids = [(await one.answer(f"{i}", conversation=id)).id for i in range(3)]
        found = [one.store.find(each, read_caller_of(one)) for each in ids]
        first, second, third = [each.turn for each in found if each is not None]
        assert third.before is second and second.before is first
        for each in ids[1:]:
            await one.client.ask("DELETE", f"{PATH}/{each}")
        del found, second, third
        last = await one.answer("So?", conversation=id)  # the turns are gone, the items are not
        assert all(f"{i}" in one.engine.prompts[-1] for i in range(3))
        await one.answer("Why?", previous_response_id=last.id)
        assert all(f"{i}" in one.engine.prompts[-1] for i in range(3))


def read_caller_of(one: Talk) -> bytes:
    return next(iter(one.store._kept.values())).caller


async def test_a_conversation_that_was_changed_is_what_it_is_now() -> None:
    """What is added or removed between two responses counts, for the later ones as well."""
    async with talk(engine("Yes.")) as one:
        id = await one.keep()
        first = await one.answer("Rain?", conversation=id)
        added = await one.do("POST", f"/{id}/items", {"items": [{**USER, "content": "Snow?"}]})
        (snow,) = added.json()["data"]
        assert snow["content"] == [{"type": "input_text", "text": "Snow?"}]
        second = await one.answer("Hail?", conversation=id)
        assert "Rain?" in one.engine.prompts[-1] and "Snow?" in one.engine.prompts[-1]
        gone = await one.do("DELETE", f"/{id}/items/{snow['id']}")
        assert gone.json()["id"] == id
        third = await one.answer("Fog?", conversation=id)
        assert "Rain?" in one.engine.prompts[-1] and "Snow?" not in one.engine.prompts[-1]
        for response, word, other in ((third, "Fog?", "Snow?"), (second, "Snow?", "Fog?")):
            await one.answer("So?", previous_response_id=response.id)
            assert word in one.engine.prompts[-1] and other not in one.engine.prompts[-1]
        assert len(await one.items(id)) == 6
        await one.client.ask("DELETE", f"{PATH}/{first.id}")
        one.store.check()
        await one.answer("And?", conversation=id)
        assert "Rain?" in one.engine.prompts[-1] and "Fog?" in one.engine.prompts[-1]


async def test_two_responses_at_once_add_what_they_said_one_after_the_other() -> None:
    async with talk(engine("Yes.")) as one:
        id = await one.keep()
        async with trio.open_nursery() as nursery:
            for word in ("Rain?", "Snow?"):
                nursery.start_soon(ask_alone, one, id, word)
        items = await one.items(id)
        texts = [item["content"][0]["text"] for item in items]
        assert texts in (["Rain?", "Yes.", "Snow?", "Yes."], ["Snow?", "Yes.", "Rain?", "Yes."])
        last = await one.answer("So?", conversation=id)
        assert all(word in one.engine.prompts[-1] for word in ("Rain?", "Snow?"))
        await one.answer("Why?", previous_response_id=last.id)
        assert all(word in one.engine.prompts[-1] for word in ("Rain?", "Snow?"))


async def ask_alone(one: Talk, id: str, word: str) -> None:
    body = {"model": "test/model", "input": word, "conversation": id}
    assert (await (await one.server.connect()).post(PATH, body)).status == 200


async def test_what_is_noted_of_it_and_what_it_is_to_forget_it() -> None:
    async with talk(engine()) as one:
        id = await one.keep(metadata={"topic": "rain"}, items=[USER])
        shown = (await one.do("GET", f"/{id}")).json()
        assert shown["metadata"] == {"topic": "rain"} and shown["created_at"] > 1e9
        changed = await one.do("POST", f"/{id}", {"metadata": {"topic": "snow", "x": "y" * 512}})
        assert changed.json()["metadata"] == {"topic": "snow", "x": "y" * 512}
        assert (await one.do("GET", f"/{id}")).json() == changed.json()
        (item,) = await one.items(id)
        assert (await one.do("GET", f"/{id}/items/{item['id']}")).json() == item
        gone = await one.do("DELETE", f"/{id}")
        assert gone.json() == {"id": id, "object": "conversation.deleted", "deleted": True}
        assert one.store.used == 0
        for method, path in (
            *(("GET", f"/{id}"), ("DELETE", f"/{id}"), ("GET", f"/{id}/items")),
            *(("GET", f"/{id}/items/x"), ("DELETE", f"/{id}/items/x")),
        ):
            answer = await one.do(method, path)
            assert answer.headers["x-tgi-elsewhere"] == "1"  # another replica may know it
            assert error(answer)[:3] == (404, "invalid_request_error", "conversation_not_found")
        refused = await one.ask("Rain?", conversation=id)
        assert error(refused)[2] == "conversation_not_found"
        assert json.loads(refused.body)["error"]["param"] == "conversation"


async def test_items_come_page_by_page() -> None:
    async with talk(engine()) as one:
        id = await one.keep(items=[{**USER, "content": f"{i}"} for i in range(30)])
        newest = await one.items(id, "")
        assert [item["content"][0]["text"] for item in newest] == [f"{29 - i}" for i in range(20)]
        rest = await one.items(id, f"?after={newest[-1]['id']}")
        assert [item["content"][0]["text"] for item in rest] == [f"{9 - i}" for i in range(10)]
        named = {"type": "item_reference", "id": newest[0]["id"]}
        assert (await one.do("GET", f"/{id}/items/none")).status == 404
        # Items of responses may be named, as in requests.
        first = await one.answer("Rain?")
        named["id"] = first.output[0].id
        added = await one.do("POST", f"/{id}/items", {"items": [named]})
        assert added.json()["data"][0]["role"] == "assistant"


async def test_an_item_that_comes_again_takes_its_place() -> None:
    async with talk(engine("Yes.")) as one:
        id = await one.keep(items=[{**USER, "id": "a"}, {**USER, "id": "b"}])
        await one.do("POST", f"/{id}/items", {"items": [{**USER, "id": "a", "content": "Snow?"}]})
        items = await one.items(id)
        assert [(each["id"], each["content"][0]["text"]) for each in items] == [
            ("a", "Snow?"),
            ("b", "Rain?"),
        ]
        again = await one.answer([{**USER, "id": "b", "content": "Hail?"}], conversation=id)
        await one.answer("So?", previous_response_id=again.id)
        assert len(await one.items(id)) == 3


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("", {"items": 5}, "items: Expected `array"),
        ("", {"metadata": {"a": 5}}, "Expected `str"),
        ("", {"metadata": {"a": "x" * 513}}, "metadata"),
        ("", {"metadata": {f"{i}": "x" for i in range(17)}}, "metadata"),
        ("", {"items": [{"id": "msg_1"}]}, "Item with id 'msg_1' not found"),
        ("/<id>", {}, "missing required field `metadata`"),
        ("/<id>/items", {}, "missing required field `items`"),
    ],
)
async def test_what_is_wrong_is_said(path: str, body: Any, words: str) -> None:
    async with talk(engine()) as one:
        id = await one.keep()
        answer = await one.do("POST", path.replace("<id>", id), body)
        assert answer.status in (400, 404) and words in error(answer)[3], answer.body


async def test_it_is_its_callers_alone() -> None:
    async with talk(engine(), HttpSettings(api_keys=("mine", "theirs"))) as one:
        mine, theirs = ({"authorization": f"Bearer {key}"} for key in ("mine", "theirs"))
        id = (await one.do("POST", "", {"items": [USER]}, **mine)).json()["id"]
        for method, path, body in (
            ("GET", f"/{id}", None),
            ("POST", f"/{id}", {"metadata": {}}),
            ("DELETE", f"/{id}", None),
            ("GET", f"/{id}/items", None),
            ("POST", f"/{id}/items", {"items": []}),
        ):
            assert (await one.do(method, path, body, **theirs)).status == 404
            assert (await one.do(method, path, body)).status == 401
        body = {"model": "test/model", "input": "x", "conversation": id}
        assert (await one.client.post(PATH, body, **theirs)).status == 404
        assert (await one.do("GET", f"/{id}", **mine)).status == 200


async def test_conversations_are_bounded_with_responses() -> None:
    async with talk(engine("Yes."), HttpSettings(response_store_bytes=20_000)) as one:
        kept = [await one.keep(items=[{**USER, "content": "x" * 900}]) for _ in range(4)]
        await one.do("GET", f"/{kept[0]}")  # used last
        responses = [await one.answer("y" * 900) for _ in range(3)]
        assert (await one.do("GET", f"/{kept[0]}")).status == 200
        assert (await one.do("GET", f"/{kept[1]}")).status == 404
        assert (await one.client.get(f"{PATH}/{responses[-1].id}")).status == 200
        # Clients cannot make one that outgrows all that may be kept, and lose nothing by trying.
        used, large = one.store.used, {"items": [{**USER, "content": "x" * 20_000}]}
        for path in ("", f"/{kept[0]}/items"):
            refused = error(await one.do("POST", path, large))
            assert refused[0] == 400 and "--response-store-bytes" in refused[3]
        assert one.store.used == used and (await one.do("GET", f"/{kept[0]}")).status == 200


async def test_a_conversation_that_responses_make_too_large_is_forgotten_alone() -> None:
    async with talk(engine("Yes."), HttpSettings(response_store_bytes=20_000)) as one:
        id, large = await one.keep(), "\1" * 1_500  # six bytes each, in JSON
        await one.answer(large, conversation=id, store=False)
        other = await one.answer("z")
        assert (await one.do("GET", f"/{id}")).status == 200
        await one.answer(large, conversation=id, store=False)
        assert (await one.do("GET", f"/{id}")).status == 404
        assert (await one.client.get(f"{PATH}/{other.id}")).status == 200


async def test_none_is_kept_without_room_for_any() -> None:
    async with talk(engine(), HttpSettings(response_store_bytes=0)) as one:
        refused = error(await one.do("POST", "", {}))
        assert refused[0] == 400 and "--response-store-bytes 0" in refused[3]


async def test_one_that_is_forgotten_while_a_response_runs_is_not_brought_back() -> None:
    async with served(engine("Yes."), running=False) as server:
        one = Talk(server, await server.connect())
        id = await one.keep()
        begun = await one.answer("Rain?", conversation=id, background=True)
        await one.do("DELETE", f"/{id}")
        while one.engine.live:
            one.engine.step()
        one.store.check()
        assert (await one.do("GET", f"/{id}")).status == 404
        assert (await one.client.get(f"{PATH}/{begun.id}")).json()["status"] == "completed"


async def test_what_is_cancelled_or_fails_is_not_said() -> None:
    async with served(engine("Yes."), running=False) as server:
        one = Talk(server, await server.connect())
        id = await one.keep()
        begun = await one.answer("Rain?", conversation=id, background=True)
        await one.client.ask("POST", f"{PATH}/{begun.id}/cancel")
        assert await one.items(id) == []
        await one.answer("Rain?", conversation=id, background=True)
        while one.engine.live:
            one.engine.step()
        assert len(await one.items(id)) == 2


async def test_both_ways_to_go_on_exclude_one_another() -> None:
    async with talk(engine()) as one:
        first = await one.answer("Rain?")
        refused = error(
            await one.ask("So?", conversation=await one.keep(), previous_response_id=first.id)
        )
        assert refused[0] == 400 and "exclude one another" in refused[3]


@pytest.mark.parametrize("size", [28, 200])
async def test_an_image_is_kept(size: int) -> None:
    """Also a large one, which was cut out of the body that it came in."""
    image = {"type": "input_image", "image_url": data_url(encode(noise(size, size)))}
    turn = {"role": "user", "content": [{"type": "input_text", "text": "See "}, image]}
    async with seeing_engine(most=400) as seeing, served(seeing) as server:
        client = await server.connect()
        kept = await client.post(ALL, {"items": [turn]})
        assert kept.status == 200, kept.body
        id = kept.json()["id"]
        shown = await client.get(f"{ALL}/{id}/items")
        assert shown.json()["data"][0]["content"][1] == image
        answer = await client.post(PATH, {"input": "So?", "conversation": id})
        assert answer.status == 200, answer.body
        assert len(seeing.submitted[-1].images) == 1
