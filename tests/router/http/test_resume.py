"""Streams that go on where another server was lost, cut wherever a front may be cut off."""

from __future__ import annotations

import re
from typing import Any

import h11
import pytest
import trio

from tests.router.http.dialects.conversations import CITY, PARIS, ROME
from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import Answer, Server, served, until
from tests.router.http.test_tools import engine
from tests.router.http.thinking import let_think
from tests.router.http.told import Told
from tgi_trio.errors import ServerEnding
from tgi_trio.router.http.call import HttpSettings
from tgi_trio.router.http.resume import SLICE
from tgi_trio.router.http.wire.server import ServerSettings
from tgi_trio.router.text.output import OutputText
from tgi_trio.router.text.tools.call_formats import HERMES

pytestmark = pytest.mark.trio

SECRET = "0123456789abcdef"
HTTP = HttpSettings(front_secret=SECRET.encode())
FRONT = {"x_tgi_front": SECRET, "x_tgi_seed": "7", "x_tgi_began": "1700000000"}
TEXT, CHAT, NATIVE = "/v1/completions", "/v1/chat/completions", "/generate_stream"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
SAYS = "Grüße, 世界! stop here"
CALLS = "<think>Hm.</think>Look: " + HERMES.write([ROME, PARIS])
USER = [{"role": "user", "content": "Rain?"}]
FUNCTION = {"name": "weather", "parameters": CITY}
TOOL = {"name": "weather", "input_schema": CITY}
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


async def streamed(found: FakeEngine, path: str, body: dict[str, Any], **more: str) -> Told:
    async with served(found, HTTP) as server:
        answer = await asked(server, path, body, **more)
        assert answer.status == 200, answer.body
        return Told(answer.body)


async def asked(server: Server, path: str, body: dict[str, Any], **more: str) -> Answer:
    client = await server.connect()
    return await client.post(path, body, **{**FRONT, "x_request_id": "r", **more})


CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "native": (NATIVE, SAYS, {"inputs": "x", "parameters": {"details": True, "top_n_tokens": 2}}),
    "native, stopped": (NATIVE, SAYS, {"inputs": "x", "parameters": {"stop": ["stop he"]}}),
    "queries": (NATIVE, SAYS, {"inputs": ["a", "b"], "parameters": {"return_full_text": True}}),
    "completions": (
        TEXT,
        SAYS,
        {"prompt": ["ab", "c"], "n": 2, "stream": True, "stop": "stop he", "echo": True, **USAGE},
    ),
    "log-probabilities": (
        TEXT,
        SAYS,
        {"prompt": "ab", "stream": True, "logprobs": 2, "echo": True},
    ),
    "chat": (CHAT, SAYS, {"messages": USER, "n": 2, "stream": True, "logprobs": True, **USAGE}),
    "thoughts": (CHAT, CALLS, {"messages": USER, "stream": True, "logprobs": True}),
    "tools": (
        CHAT,
        CALLS,
        {
            "messages": USER,
            "tools": [{"type": "function", "function": FUNCTION}],
            "stream": True,
            **USAGE,
        },
    ),
    "messages": (
        MESSAGES,
        CALLS,
        {"messages": USER, "max_tokens": 400, "model": "tgi", "tools": [TOOL], "stream": True},
    ),
    "responses": (
        RESPONSES,
        CALLS,
        {
            "input": "Rain?",
            "model": "tgi",
            "stream": True,
            "tools": [{"type": "function", **FUNCTION}],
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
async def test_a_stream_goes_on_wherever_it_was_cut(monkeypatch, name):
    """Byte for byte, but for what the last event tells of times."""
    let_think(monkeypatch)
    path, says, body = CASES[name]
    first = engine(says)
    first.tokens_per_step = 3
    whole = await streamed(first, path, body)
    count = len(whole.groups)
    assert count > 8
    cuts = {0, 1, 3, count // 2, count - 3, count - 2, count - 1, count}
    found = engine(says)
    async with served(found, HTTP) as server:
        for cut in sorted(cuts):
            found.tokens_per_step = 1 + cut % 4
            told = {"x_tgi_emitted": whole.emitted(cut)}
            rest = await asked(server, path, body, **told)
            assert rest.status == 200, rest.body
            if cut == count and path in (NATIVE, MESSAGES, RESPONSES):
                assert rest.body == b""  # everything was said
            elif cut == count:
                continue  # clients have left at [DONE]
            else:
                both = whole.client(cut) + Told(rest.body).client()
                assert sorted_choices(both) == sorted_choices(whole.client()), cut


async def test_long_streams_are_replayed_in_pieces(monkeypatch):
    """However many there are, a turn of the loop has one piece of one of them."""
    here: list[int] = []  # in this turn
    turns: list[int] = []

    class Turns(trio.abc.Instrument):
        def after_io_wait(self, timeout: float) -> None:
            turns.append(len(here))
            here.clear()

    push = OutputText.push

    def counted(*args: Any) -> Any:
        here.append(1)
        return push(*args)

    monkeypatch.setattr(OutputText, "push", counted)
    found = engine("Some more. " * 300)
    ids = found.tokenizer.encode_ids("Some more. " * 300, False).tolist()[: 3 * SLICE + 20]
    done = f"0:{','.join(map(str, ids))};1:{','.join(map(str, ids))}!"
    body = {"prompt": "a", "n": 2, "max_tokens": len(ids) + 2, "stream": True}
    trio.lowlevel.add_instrument(Turns())
    async with served(found, HTTP) as server, trio.open_nursery() as nursery:

        async def client() -> None:
            answer = await asked(server, TEXT, body, x_tgi_emitted=done)
            assert answer.body.count(b":i 0:") == 3, answer.body

        for _ in range(3):
            nursery.start_soon(client)
    assert sum(turns) == 6 * len(ids) + 3 * 2
    # New tokens of others may come beside a piece, but no second piece: the least has 20.
    assert SLICE <= max(turns) <= SLICE + 3 * 2


def sorted_choices(body: bytes) -> dict[bytes, list[bytes]]:
    """Return the events of each choice: those of several come in another order."""
    found: dict[bytes, list[bytes]] = {}
    for event in body.split(b"\n\n"):
        whose = re.search(rb'"query_id":\d+|"choices":\[\{"index":\d+', event)
        if whose is not None and whose[0].startswith(b'"query_id"'):
            event = re.sub(rb'"index":\d+', b"", event)  # of the stream, see below
        found.setdefault(whose[0] if whose else b"", []).append(event)
    return found


# ---- who may, and what is refused --------------------------------------------------------------

UNARY = {"inputs": "x", "parameters": {"do_sample": True, "max_new_tokens": 5}}


@pytest.mark.parametrize("secret", [None, SECRET.encode()])
@pytest.mark.parametrize(
    "name", ["x_tgi_front", "x_tgi_seed", "x_tgi_began", "x_tgi_emitted", "x_tgi_waited"]
)
@pytest.mark.parametrize("path", ["/generate", CHAT, MESSAGES, "/health"])
async def test_nobody_else_is_heard(secret, name, path):
    async with served(http=HttpSettings(front_secret=secret)) as server:
        client = await server.connect()
        answer = await (
            client.get(path, **{name: "0"})
            if path == "/health"
            else client.post(path, {}, **{name: "0"})
        )
        assert answer.status == 403
        assert b"is for fronts, which show the secret" in answer.body
        assert server.engine.submitted == []


async def test_a_deadline_counts_from_when_the_front_was_asked():
    async with served(http=HttpSettings(front_secret=SECRET.encode())) as server:
        client = await server.connect()
        front = {"x_tgi_front": SECRET, "x_request_timeout": "60"}
        now = trio.current_time()
        answer = await client.post("/generate", UNARY, x_tgi_waited="20000", **front)
        assert answer.status == 200
        (request,) = server.engine.submitted
        assert request.deadline is not None
        assert now + 40 <= request.deadline <= trio.current_time() + 40
        late = await client.post("/generate", UNARY, x_tgi_waited="60000", **front)
        assert late.status == 424
        assert b"the request's deadline has passed" in late.body


async def test_a_front_alone_is_told_the_load():
    async with served(http=HttpSettings(front_secret=SECRET.encode())) as server:
        client = await server.connect()
        told = await client.get("/health", x_tgi_front=SECRET)
        assert (told.status, told.headers["x-tgi-load"]) == (200, "0/8")
        assert "x-tgi-load" not in (await client.get("/health")).headers


@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"x_tgi_seed": "-1"}, "`x-tgi-seed` must be a number >= 0 and < 18446744073709551616"),
        ({"x_tgi_seed": str(1 << 64)}, "`x-tgi-seed` must be a number"),
        ({"x_tgi_began": "now"}, "`x-tgi-began` must be a number"),
        ({"x_tgi_emitted": "0:1;0:2"}, "`x-tgi-emitted` must be like 0:17,4;1:5! and says '0:2'"),
        ({"x_tgi_emitted": "0:1,"}, "says '0:1,'"),
        ({"x_tgi_emitted": "0:1;"}, "says ''"),
        ({"x_tgi_emitted": "1:5"}, "`x-tgi-emitted` names choice 1 of 1, from 0"),
        ({"x_tgi_emitted": "0:5000"}, "`x-tgi-emitted` must hold token ids < 258"),
        ({"x_tgi_emitted": "0:5,5,5,5,5"}, "has 5 tokens of choice 0, which has at most 5 and has"),
        ({"x_tgi_emitted": "0:5,5,5,5,5,5!"}, "has 6 tokens of choice 0"),
    ],
)
async def test_what_a_front_cannot_say(headers, message):
    async with served(http=HTTP) as server:
        answer = await asked(server, NATIVE, UNARY, **headers)
        assert answer.status == 400
        assert message in answer.json()["error"]
        assert server.engine.submitted == []


async def test_a_body_is_made_anew_and_not_resumed():
    async with served(http=HTTP) as server:
        answer = await asked(server, "/generate", UNARY, x_tgi_emitted="0:5")
        assert answer.status == 400
        assert answer.json()["error"] == "`x-tgi-emitted` is for streams: a body is made anew"


@pytest.mark.parametrize("marked", [True, False])
async def test_a_server_that_ends_has_another_one_go_on(marked):
    """Its streams are cut, and bodies are refused; clients of its own are told."""
    async with served(engine("ab" * 300), HTTP, running=False) as server:
        body = {"inputs": "x", "parameters": {"max_new_tokens": 500}}
        headers: dict[str, Any] = FRONT if marked else {}
        stream, whole = await server.connect(), await server.connect()
        await stream.send("POST", NATIVE, body, **headers)
        await whole.send("POST", "/generate", body, **headers)
        await until(lambda: len(server.engine.live) == 2)
        server.engine.step()
        for live in list(server.engine.live.values()):
            live.deliver([], ServerEnding("the server is shutting down"))
        answer = await whole.answer()
        assert answer.status == (503 if marked else 424)
        assert answer.json()["error"].endswith("the server is shutting down")
        if marked:
            with pytest.raises((h11.RemoteProtocolError, trio.BrokenResourceError)):
                await stream.answer()
        else:
            assert b"the server is shutting down" in (await stream.answer()).body


async def test_a_full_server_tells_the_front_by_its_status():
    """Clients of TGI's stream get status 200 and an event."""
    async with served(http=HTTP) as server:
        with server.engine.permit(server.engine.limits.max_concurrent_requests):
            client = await server.connect()
            plain = await client.post(NATIVE, UNARY)
            assert plain.status == 200 and b'"error_type":"overloaded"' in plain.body
            assert (await asked(server, NATIVE, UNARY)).status == 429


async def test_heads_may_be_as_long_as_answers():
    emitted = "0:" + ",".join(["5"] * 100_000)
    settings = ServerSettings(graceful_timeout=1.0, longest_head=1 << 20)
    async with served(http=HTTP, settings=settings) as server:
        answer = await asked(server, NATIVE, UNARY, x_tgi_emitted=emitted)
        assert answer.status == 400
        assert "has 100000 tokens of choice 0" in answer.json()["error"]


# ---- seeds and ids -----------------------------------------------------------------------------


async def test_seeds_are_the_clients_own_or_those_of_the_front():
    async with served(http=HTTP) as server:
        sample = {"prompt": ["ab", "ab"], "n": 2, "temperature": 0.7}
        await asked(server, TEXT, sample)
        await asked(server, TEXT, {**sample, "seed": 5})
        await asked(server, "/generate", UNARY)
        answer = await asked(
            server, "/generate", {"inputs": "x", "parameters": {"best_of": 2, "do_sample": True}}
        )
        assert answer.status == 200
        seeds = [request.sampling.seed for request in server.engine.submitted]
        apart = 1 << 32
        assert seeds == [7, 8, 7 + apart, 8 + apart, 5, 6, 5, 6, 7, 7, 8]


async def test_ids_are_the_same_for_the_same_seed_alone():
    async def id_of(**headers: str) -> str:
        async with served(http=HTTP) as server:
            answer = await asked(server, CHAT, {"messages": USER}, **headers)
            found: str = answer.json()["id"]
            return found

    assert await id_of() == await id_of() != await id_of(x_tgi_seed="8")
