"""OpenAI's Responses in the background: asked for, looked at, read again, cancelled, forgotten."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import trio

from tests.router.http.dialects.conversations import ROME, engine
from tests.router.http.dialects.responses_answers import PATH, TOOLS, error, events, plain
from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import Answer, Client, Server, served, until
from tests.router.http.thinking import let_think
from tgi_trio.errors import GenerationError
from tgi_trio.router.http.call import HttpSettings
from tgi_trio.router.http.dialects.responses import replies
from tgi_trio.router.http.response_store import ResponseStore
from tgi_trio.router.text.tools.call_formats import HERMES

pytestmark = pytest.mark.trio

ASKED: dict[str, Any] = {"model": "test/model", "input": "Rain?", "background": True}
CALL = "<think>Where?</think>Let me see. " + HERMES.write([ROME])
SECRET = "s" * 32
FRONT = HttpSettings(front_secret=SECRET.encode())
SHOWN = {"x_tgi_front": SECRET}


class Background:
    """A client of an engine that makes a step when it is told to."""

    def __init__(self, server: Server, client: Client) -> None:
        self.server, self.client, self.engine = server, client, server.engine

    async def ask(self, **more: Any) -> Answer:
        return await self.client.post(PATH, {**ASKED, **more})

    async def start(self, **more: Any) -> replies.ResponseReply:
        answer = await self.ask(**more)
        assert answer.status == 200, answer.body
        return read(answer)

    async def get(self, id: str, query: str = "") -> Answer:
        return await self.client.get(f"{PATH}/{id}{query}")

    async def look(self, id: str) -> replies.ResponseReply:
        return read(await self.get(id))

    async def cancel(self, id: str) -> Answer:
        return await self.client.ask("POST", f"{PATH}/{id}/cancel")

    def finish(self) -> None:
        while self.engine.live:
            self.engine.step()


@asynccontextmanager
async def background(
    fake: FakeEngine | None = None, http: HttpSettings | None = None
) -> AsyncIterator[Background]:
    async with served(fake or engine(), http, running=False) as server:
        yield Background(server, await server.connect())


def read(answer: Answer) -> replies.ResponseReply:
    assert answer.status == 200, answer.body
    return msgspec.json.decode(answer.body, type=replies.ResponseReply)


@pytest.mark.parametrize("text", ["It rains.", CALL])
async def test_it_is_looked_at_until_it_has_ended(monkeypatch: Any, text: str) -> None:
    let_think(monkeypatch)
    async with background(engine(text)) as one:
        begun = await one.start(tools=TOOLS)
        assert (begun.status, begun.background, begun.store) == ("queued", True, True)
        assert begun.output == [] and begun.usage is None
        assert one.engine.permits == 1  # a server that drains waits for it
        assert (await one.look(begun.id)).status == "queued"
        one.engine.step()
        assert (await one.look(begun.id)).status == "in_progress"
        items = (await one.get(f"{begun.id}/input_items")).json()["data"]
        assert [each["content"][0]["text"] for each in items] == ["Rain?"]
        while len((await one.look(begun.id)).output) == 0:
            one.engine.step()
        one.finish()
        found = await one.look(begun.id)
        assert found.status == "completed" and found.background and found.usage is not None
        assert not one.engine.permits and not one.engine.left
        assert b"tgi_request_success 1" in one.engine.metrics.render()
        # As if somebody had waited for it.
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.engine.run)
            waited = await one.start(tools=TOOLS, background=False)
            going_on = await one.start(previous_response_id=found.id, background=False)
            nursery.cancel_scope.cancel()
        assert plain(list(waited.output)) == plain(list(found.output))
        assert going_on.status == "completed" and "Rain?<" in one.engine.prompts[-1]
        shown = (await one.get(f"{begun.id}/input_items")).json()["data"]
        assert shown == items


async def test_its_events_are_read_from_any_of_them_on(monkeypatch: Any) -> None:
    """While it runs and afterwards; a client that leaves changes nothing."""
    let_think(monkeypatch)
    async with background(engine(CALL)) as one:
        leaving = await one.server.connect()
        await leaving.send("POST", PATH, {**ASKED, "tools": TOOLS, "stream": True})
        await leaving.event()
        created = (await leaving.event()).data.partition(b"data: ")[2].partition(b"\n")[0]
        response = json.loads(created)["response"]
        assert response["status"] == "queued"
        for _ in range(20):
            one.engine.step()
        await leaving.stream.aclose()
        late = await one.server.connect()
        answers: list[Answer] = []

        async def follow() -> None:
            answers.append(await late.get(f"{PATH}/{response['id']}?stream=true"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            while one.engine.live:
                await trio.testing.wait_all_tasks_blocked(0.001)
                one.engine.step()
        told = events(answers[0])
        kinds = [each.type for each in told]
        assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
        assert kinds[-1] == "response.completed" and not one.engine.left
        found = await one.look(response["id"])
        assert told[-1].response == found
        texts = "".join(
            str(each.delta) for each in told if each.type == "response.output_text.delta"
        )
        assert texts.strip() == "Let me see."
        for after in (0, 5, len(told) - 2, len(told) - 1, 10_000):
            again = await one.get(response["id"], f"?stream=true&starting_after={after}")
            assert again.headers["content-type"] == "text/event-stream"
            numbers = [
                json.loads(each.partition(b"data: ")[2])["sequence_number"]
                for each in again.body.split(b"\n\n")[:-1]
            ]
            assert numbers == list(range(after + 1, len(told)))
        for wrong in ("x", "-1", "9" * 40):
            refused = error(await one.get(response["id"], f"?stream=true&starting_after={wrong}"))
            assert refused[0] == 400 and "`starting_after` must be" in refused[3]


async def test_a_long_stream_is_read_piece_by_piece() -> None:
    """None of it is copied for a reader, and none is lost between two pieces."""
    async with background(engine("ab" * 900)) as one:
        reading = await one.server.connect()
        await reading.send("POST", PATH, {**ASKED, "stream": True})
        await until(lambda: bool(one.engine.live))
        (id,) = store_of(one).running
        one.finish()
        told = events(await one.get(id, "?stream=true"))
        assert len(told) > 900 and told[-1].type == "response.completed"
        assert [each.type for each in events(await reading.answer())] == [
            each.type for each in told
        ]


async def test_a_reader_is_told_that_it_goes_on() -> None:
    async with background(http=HttpSettings(silence=0.01)) as one:
        await one.client.send("POST", PATH, {**ASKED, "stream": True})
        await one.client.event()
        for _ in range(2):
            await one.client.event()
        assert (await one.client.event()).data == b":\n\n"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("steps", [0, 40])
async def test_it_is_cancelled_for_good(monkeypatch: Any, stream: bool, steps: int) -> None:
    let_think(monkeypatch)
    async with background(engine(CALL)) as one:
        reading = await one.server.connect()
        await reading.send("POST", PATH, {**ASKED, "stream": stream})
        await until(lambda: bool(one.engine.live))
        (id,) = store_of(one).running
        for _ in range(steps):
            one.engine.step()
        before = await one.look(id)
        cancelled = read(await one.cancel(id))
        assert cancelled.status == "cancelled" and cancelled.output == before.output
        assert bool(cancelled.output) is bool(steps)  # the thought has ended, what is said has not
        assert len(one.engine.left) == 1 and not one.engine.live and not one.engine.permits
        assert (await one.cancel(id)).body == (await one.get(id)).body
        assert await one.look(id) == cancelled
        told = await reading.answer()  # ends
        assert told.status == 200
        if stream:
            assert [each.type for each in events(told)][-1] != "response.completed"
        store_of(one).check()


def store_of(one: Background) -> ResponseStore:
    return one.server.app.responses


async def test_one_that_runs_is_forgotten() -> None:
    async with background() as one:
        begun = await one.start()
        gone = await one.client.ask("DELETE", f"{PATH}/{begun.id}")
        assert gone.json()["deleted"] is True
        assert len(one.engine.left) == 1 and not one.engine.permits
        assert (await one.get(begun.id)).status == 404
        assert store_of(one).used == 0


async def test_it_is_its_callers_alone() -> None:
    async with background(http=HttpSettings(api_keys=("mine", "theirs"))) as one:
        mine, theirs = ({"authorization": f"Bearer {key}"} for key in ("mine", "theirs"))
        id = (await one.client.post(PATH, ASKED, **mine)).json()["id"]
        for method, path in (
            ("GET", f"{PATH}/{id}"),
            ("GET", f"{PATH}/{id}?stream=true"),
            ("GET", f"{PATH}/{id}/input_items"),
            ("POST", f"{PATH}/{id}/cancel"),
            ("DELETE", f"{PATH}/{id}"),
        ):
            assert (await one.client.ask(method, path, **theirs)).status == 404
        assert one.engine.live
        assert (await one.client.ask("POST", f"{PATH}/{id}/cancel", **mine)).status == 200


async def test_what_fails_says_why() -> None:
    fake = engine()
    fake.fail_after = 3
    async with background(fake) as one:
        begun = await one.start()
        one.finish()
        found = await one.look(begun.id)
        assert found.status == "failed" and found.error is not None
        assert found.error.code == "server_error" and "the shard gave up" in found.error.message
        assert not one.engine.permits
        store_of(one).check()


async def test_a_defect_ends_it_and_not_the_engine(monkeypatch: Any) -> None:
    async with background() as one:
        begun = await one.start()
        monkeypatch.setattr(
            "tgi_trio.router.http.dialects.responses.answer.ResponseEvents.step", raise_defect
        )
        one.engine.step()
        found = await one.look(begun.id)
        assert found.status == "failed" and not one.engine.permits


def raise_defect(*_: Any) -> bytes:
    raise RuntimeError("a defect")


async def test_the_log_tells_of_its_end(caplog: Any) -> None:
    caplog.set_level("INFO", "tgi_trio.access")
    async with background() as one:
        ended, cancelled, deleted = [(await one.start()).id for _ in range(3)]
        await one.cancel(cancelled)
        await one.client.ask("DELETE", f"{PATH}/{deleted}")
        one.finish()
    told = {each.getMessage(): each for each in caplog.records if "background" in each.msg}
    assert set(told) == {
        *(f"background {ended} ended", f"background {cancelled} cancelled"),
        f"background {deleted} deleted",
    }
    one_told = vars(told[f"background {ended} ended"])
    assert one_told["request_id"] and one_told["prompt_tokens"] > 0
    assert "prompt_tokens" not in vars(told[f"background {cancelled} cancelled"])


async def test_going_on_from_one_that_runs_is_refused() -> None:
    async with background() as one:
        begun = await one.start()
        refused = error(await one.ask(previous_response_id=begun.id))
        assert refused[0] == 400 and "has not ended yet" in refused[3]


async def test_it_must_be_kept() -> None:
    async with background() as one:
        refused = error(await one.ask(store=False))
        assert refused[0] == 400 and "`store` is false" in refused[3]
    async with background(http=HttpSettings(response_store_bytes=0)) as one:
        refused = error(await one.ask())
        assert refused[0] == 400 and "--response-store-bytes is 0" in refused[3]
    async with background(http=HttpSettings(response_store_bytes=100)) as one:
        refused = error(await one.ask(input="Rain? " * 100))
        assert refused[0] == 400 and "`background` needs room" in refused[3]
        assert not one.engine.permits and not one.engine.live and store_of(one).used == 0


async def test_one_that_outgrows_the_store_fails() -> None:
    async with background(engine("ab" * 3000), HttpSettings(response_store_bytes=20_000)) as one:
        answers: list[Answer] = []

        async def follow() -> None:
            answers.append(await one.client.post(PATH, {**ASKED, "stream": True}))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            await until(lambda: bool(one.engine.live))
            (id,) = store_of(one).running
            other = await one.server.connect()
            while one.engine.live:
                one.engine.step()
                store_of(one).check()
        found = read(await other.get(f"{PATH}/{id}"))
        assert found.status == "failed" and found.error is not None
        assert "--response-store-bytes" in found.error.message
        assert len(one.engine.left) == 1 and not one.engine.permits
        store_of(one).check()


async def test_those_that_run_are_not_forgotten_for_others() -> None:
    fake = engine()
    fake.answer = lambda prompt: "ab" * 900 if "Rain?" in prompt else "Yes."
    async with background(fake, HttpSettings(response_store_bytes=9000)) as one:
        begun = await one.start()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.engine.run, 0.0001)
            others = [
                await one.start(input=f"{number}" * 200, background=False) for number in range(10)
            ]
            store_of(one).check()
            assert begun.id in store_of(one).running
            assert (await one.get(others[0].id)).status == 404
            assert (await one.get(others[-1].id)).status == 200
            nursery.cancel_scope.cancel()
        assert (await one.look(begun.id)).status == "in_progress"


async def test_a_server_that_ends_fails_it() -> None:
    async with background() as one:
        begun = await one.start()
        (stream,) = one.engine.live.values()
        one.engine.live.clear()
        stream.deliver([], GenerationError("the server ends"))
        assert (await one.look(begun.id)).status == "failed"
        assert not one.engine.permits


async def test_a_front_passes_its_events_on_and_resumes_none() -> None:
    async with background(http=FRONT) as one:
        answers: list[Answer] = []

        async def follow() -> None:
            answers.append(await one.client.post(PATH, {**ASKED, "stream": True}, **SHOWN))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow)
            await until(lambda: bool(one.engine.live))
            one.finish()
        pieces = answers[0].body.split(b"\n\n")
        assert pieces[-2].startswith(b":i 0:\nevent: response.completed\n")
        refused = error(
            await one.client.post(PATH, {**ASKED, "stream": True}, **SHOWN, x_tgi_emitted="0:")
        )
        assert refused[0] == 400 and "`x-tgi-emitted` is not for `background`" in refused[3]
