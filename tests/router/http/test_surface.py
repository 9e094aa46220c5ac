"""Around the routes: keys, CORS, ids, unknown paths, documentation."""

from __future__ import annotations

import re
from typing import Any, cast

import msgspec
import pytest
import trio

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.served import served
from tgi_trio.router.http.app import ROUTES, Application
from tgi_trio.router.http.call import HttpSettings
from tgi_trio.router.http.messages import replies, service_replies

pytestmark = pytest.mark.trio

KEYS = HttpSettings(api_keys=("Secret", "other", "Schlüssel-Ü"))


async def test_keys_guard_what_tgi_guards():
    async with served(http=KEYS) as server:
        client = await server.connect()
        for method, path in [(route.method, route.path) for route in ROUTES]:
            stored = path.startswith(("/v1/responses/<id>", "/v1/conversations/<id>"))
            path = re.sub("<[a-z:]+>", "nick", path)
            body: dict[str, Any] = {
                "inputs": "x",
                "prompt": "x",
                "messages": [{"role": "a", "content": "b"}],
            }
            body["instances"], body["tokens"] = [{"inputs": "x"}], [5]
            if path.endswith("/infer"):
                text = {"name": "x", "shape": [1, 1], "datatype": "BYTES", "data": [65]}
                body = {"inputs": [text], "outputs": [{"name": "y"}]}
            answer = await client.ask(method, path, body if method == "POST" else None)
            guarded = (method == "POST" and path != "/chat_tokenize") or stored
            assert (answer.status == 401) == guarded, path
            assert answer.status in (200, 401)
            if guarded and path.startswith(("/v1/", "/infill")):
                assert "API key" in answer.json()["error"]["message"]
            elif guarded:
                assert answer.body == b""


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x_api_key": "Secret"}, 200),
        ({"x_api_key": "secret"}, 200),
        ({"x_api_key": "Schlüssel-Ü".encode()}, 200),
        ({"x_api_key": "Secret", "authorization": "Bearer wrong"}, 200),
        ({"x_api_key": "wrong", "authorization": "Bearer Secret"}, 200),
        ({"x_api_key": "Bearer Secret"}, 401),
        ({"x_api_key": "Secre"}, 401),
        ({"x_api_key": ""}, 401),
    ],
)
async def test_a_key_may_come_in_a_header_of_its_own(headers, status):
    async with served(http=KEYS) as server:
        client = await server.connect()
        answer = await client.post("/v1/completions", {"prompt": "x"}, **headers)
    assert answer.status == status


@pytest.mark.parametrize(
    ("value", "status"),
    [("Bearer Secret", 200), ("bearer SECRET", 200), ("Bearer other", 200), ("Bearer x", 401),
     ("Secret", 401), ("Basic Secret", 401), ("Bearer Schlüssel-Ü".encode(), 200),
     ("bearer SCHLüSSEL-Ü".encode(), 200), ("Bearer Schlüssel-ü".encode(), 401)],
)  # fmt: skip
async def test_any_of_the_keys_opens(value, status):
    async with served(http=KEYS) as server:
        client = await server.connect()
        answer = await client.post("/generate", {"inputs": "x"}, authorization=value)
    assert answer.status == status


async def test_cors_for_everybody(http):
    async with served(http=http) as server:
        client = await server.connect()
        answers = [
            await client.get("/info", origin="http://a"),
            await client.post("/generate_stream", {"inputs": "x"}),
            await client.get("/nowhere"),
        ]
        preflight = await client.ask(
            "OPTIONS", "/generate", origin="http://a", access_control_request_method="POST"
        )
    for answer in [*answers, preflight]:
        assert answer.headers["access-control-allow-origin"] == "*"
        assert answer.headers["vary"] == (
            "origin, access-control-request-method, access-control-request-headers"
        )
    assert (preflight.status, preflight.body) == (200, b"")
    # all that a route has, so that a page can delete a response
    methods = {route.method for route in ROUTES}
    assert set(preflight.headers["access-control-allow-methods"].split(",")) == methods
    allowed = preflight.headers["access-control-allow-headers"].split(",")
    assert {"content-type", "authorization", "x-api-key"} <= set(allowed)


async def test_a_page_may_send_the_headers_that_its_browser_asks_for():
    # Those of OpenAI's and Anthropic's SDKs are many, and more with each release.
    asked = "authorization,content-type,x-stainless-arch,x-stainless-retry-count,openai-project"
    async with served() as server:
        client = await server.connect()
        preflight = await client.ask(
            "OPTIONS",
            "/v1/chat/completions",
            origin="http://a",
            access_control_request_method="POST",
            access_control_request_headers=asked,
        )
    assert preflight.headers["access-control-allow-headers"] == asked


@pytest.mark.parametrize("state", [(True, ""), (False, "the server shuts down")])
async def test_options_of_a_health_check_tell_the_health(state):
    # What HAProxy asks unless told otherwise; a browser asks before `POST /`, and says so.
    async with served() as server:
        server.engine.healthy = state
        client = await server.connect()
        check = await client.ask("OPTIONS", "/")
        browser = await client.ask(
            "OPTIONS", "/", origin="http://a", access_control_request_method="POST"
        )
    assert check.status == (200 if state[0] else 503)
    assert browser.status == 200 and "access-control-allow-methods" in browser.headers


async def test_cors_for_some():
    async with served(http=HttpSettings(cors_allow_origin=("http://a", "http://b"))) as server:
        client = await server.connect()
        ours = await client.get("/info", origin="http://b")
        other = await client.get("/info", origin="http://c")
    assert ours.headers["access-control-allow-origin"] == "http://b"
    assert "access-control-allow-origin" not in other.headers


async def test_request_ids_are_taken_over_or_made():
    async with served() as server:
        client = await server.connect()
        first, second = [await client.get("/info") for _ in range(2)]
        own = await client.get("/info", x_request_id="abc-1")
        long = await client.get("/info", x_request_id="x" * 500)
        odd = await client.get("/info", x_request_id=b"caf\xe9")
        await client.post("/generate", {"inputs": "x"}, x_request_id="named")
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert own.headers["x-request-id"] == "abc-1"
    assert long.headers["x-request-id"] == "x" * 128
    assert odd.headers["x-request-id"].isascii()
    assert server.engine.submitted[0].name == "named"


async def test_unknown_paths_and_methods_are_told_as_json(http):
    async with served(http=http) as server:
        client = await server.connect()
        for method, path in (
            *(("GET", "/nowhere"), ("GET", "/generate/"), ("POST", "/v1/x")),
            *(("GET", "//info"), ("POST", "//"), ("DELETE", "///generate")),
        ):
            answer = await client.ask(method, path)
            error = msgspec.json.decode(answer.body, type=replies.OpenAIErrorResponse).error
            assert answer.headers["content-type"] == "application/json"
            assert (answer.status, error.http_status_code, error.type) == (404, 404, "not_found")
            assert f"`{path}`" in error.message
        long = await client.get("/" + "x" * 5000)
        assert len(long.json()["error"]["message"]) < 300
        answer = await client.get("/generate")
        error = msgspec.json.decode(answer.body, type=replies.OpenAIErrorResponse).error
        assert (answer.status, error.type) == (405, "method_not_allowed")
        assert error.message == "`/generate` does not answer GET; it answers POST"
        assert answer.headers["allow"] == "POST"
        answer = await client.ask("PUT", "/")
        assert answer.status == 405
        assert answer.headers["allow"] == "GET,HEAD,POST"  # in the same order at every start


@pytest.mark.parametrize(
    ("path", "status"), [(b"/info", b"200"), (b"/nowhere", b"404"), (b"//info", b"404")]
)
async def test_head_works_where_get_does(http, path, status):
    async with served(http=http) as server:
        stream = await server.raw()
        await stream.send_all(b"HEAD %b HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n" % path)
        data = b""
        while more := await stream.receive_some(65536):
            data += more
    head, _, body = data.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %b " % status)
    assert body == b""


async def test_health_tells_why():
    async with served() as server:
        client = await server.connect()
        for path in ("/health", "/ping", "/"):
            answer = await client.get(path)
            assert (answer.status, answer.body) == (200, b"")
        server.engine.healthy = (False, "no step for 40 s")
        answer = await client.get("/health")
    assert answer.status == 503
    assert answer.json() == {
        "error": "unhealthy: no step for 40 s",
        "error_type": "healthcheck",
    }


async def test_ready_tells_why_and_live_is_red_only_for_good():
    async with served() as server:
        client = await server.connect()
        answer = await client.get("/ready")
        assert (answer.status, answer.json()["ready"]) == (200, True)
        server.engine.healthy = (False, "no step for 40 s")
        answer = await client.get("/ready")
        assert answer.status == 503
        assert answer.json() == {"ready": False, "why": "no step for 40 s"}
        answer = await client.get("/live")
        assert (answer.status, answer.json()) == (200, {"live": True})
        server.engine.living = (False, "it crashed 6 times in a row")
        answer = await client.get("/live")
        assert (answer.status, answer.json()["live"]) == (503, False)


def model_info(name: str) -> dict[str, Any]:
    return {
        "id": name, "object": "model", "created": 0, "owned_by": "test/model",
        "root": "test/model", "parent": None, "max_model_len": 2048,
    }  # fmt: skip


async def test_info_and_models():
    async with served() as server:
        client = await server.connect()
        info = await client.get("/info")
        models = await client.get("/v1/models")
    decoded = msgspec.json.decode(info.body, type=service_replies.Info)
    assert list(info.json()) == list(decoded.__struct_fields__)
    assert (decoded.model_id, decoded.router) == ("test/model", "text-generation-router")
    assert models.json()["data"] == [model_info("test/model"), model_info("nick")]


@pytest.mark.parametrize("path", ["test/model", "test%2Fmodel", "nick"])
async def test_a_model_is_looked_up_by_any_of_its_names(path):
    async with served() as server:
        client = await server.connect()
        answer = await client.get(f"/v1/models/{path}")
    assert answer.status == 200
    assert answer.json() == model_info(path.replace("%2F", "/"))


async def test_an_unknown_model_is_a_404_that_lists_what_is_served():
    async with served() as server:
        client = await server.connect()
        for path in ("/v1/models/gpt-4", "/v1/models/other/model", "/v1/models/nick/"):
            answer = await client.get(path)
            assert answer.status == 404
            error = answer.json()["error"]
            assert "`test/model`" in error["message"] and "`nick`" in error["message"]
            assert (error["type"], error["http_status_code"]) == ("not_found", 404)
        empty = await client.get("/v1/models/")
    assert empty.status == 404
    assert "Nothing is served at `/v1/models/`" in empty.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/v1/embeddings", "makes no embeddings"),
        ("/v1/rerank", "ranks none"),
        ("/score/", "ranks none"),
        ("/pooling", "makes no embeddings"),
        ("/v1/files/file-1/content", "nothing is stored here"),
        ("/v1/batches", "`tgi-trio batch` asks a server the requests of a file"),
        ("/classify", "`choice` in `structured_outputs`"),
        ("/v1/realtime", "/v1/audio/transcriptions"),
        ("/api/chat", "use OpenAI's: /v1/chat/completions"),
        ("/chat/completions", "`/v1/chat/completions` is;"),
        ("/v1/v1/chat/completions", "`/v1/chat/completions` is;"),
        ("/v1/chat/completions/", "`/v1/chat/completions` is;"),
        ("//v1/chat/completions", "`/v1/chat/completions` is;"),
        ("/v1//chat/completions", "`/v1/chat/completions` is;"),
        ("//generate", "`/generate` is;"),
        ("///", "`/` is;"),
        ("/v1/generate", "`/generate` is;"),
    ],
)
async def test_paths_of_other_servers_say_what_is_served_instead(path, why):
    async with served() as server:
        client = await server.connect()
        answer = await client.post(path, {"input": "x"})
    said = answer.json()["error"]["message"]
    assert answer.status == 404 and f"Nothing is served at `{path}`: " in said and why in said


async def test_anthropics_clients_are_told_of_models_in_their_shape():
    told: dict[str, Any] = {
        "type": "model",
        "id": "nick",
        "display_name": "nick",
        "lifecycle": "active",
    }
    told |= {"created_at": "1970-01-01T00:00:00Z", "max_input_tokens": 1024, "max_tokens": 2047}
    version = {"anthropic_version": "2023-06-01"}
    async with served() as server:
        client = await server.connect()
        models = (await client.get("/v1/models", **version)).json()
        one = await client.get("/v1/models/nick", **version)
        other = await client.get("/v1/models/other", **version)
        plain = await client.get("/v1/models", x_api_key="k")  # our key, in any client's hands
    assert one.json() == models["data"][-1] == told and one.headers["request-id"]
    del models["data"]
    assert models == {"first_id": "test/model", "last_id": "nick", "has_more": False}
    assert other.status == 404 and other.json()["error"]["type"] == "not_found_error"
    assert plain.json()["object"] == "list"


async def test_tokenize_gives_byte_offsets():
    async with served() as server:
        client = await server.connect()
        answer = await client.post("/tokenize", {"inputs": "né" + "x" * 300})
    tokens = msgspec.json.decode(answer.body, type=list[service_replies.SimpleToken])
    assert (tokens[0].text, tokens[0].start, tokens[0].stop) == ("", 0, 0)
    assert (tokens[1].text, tokens[1].start, tokens[1].stop) == ("n", 0, 1)
    assert (tokens[2].text, tokens[2].start, tokens[2].stop) == ("é", 1, 3)
    assert tokens[-1].stop == 303


async def test_a_path_neither_ends_nor_disguises_its_line_of_the_log(http, caplog):
    with caplog.at_level("INFO", "tgi_trio.access"):
        async with served(http=http) as server:
            client = await server.connect()
            await client.get("/a%0A2026%1b[31m%E2%80%A8b%20caf%C3%A9")
    (line,) = [each.getMessage() for each in caplog.records if each.name == "tgi_trio.access"]
    assert line == "GET /a%0A2026%1B[31m%E2%80%A8b café 404"


async def test_a_defect_is_a_500_that_names_the_request(http, caplog):
    async with served(http=http) as server:
        client = await server.connect()
        server.engine.validator = cast("Any", None)  # as a bug would
        answer = await client.post("/generate", {"inputs": "x"}, x_request_id="bad-one")
        health = await client.get("/health")
    assert answer.status == 500
    assert "bad-one" in answer.json()["error"]
    assert answer.json()["error_type"] == "internal"
    assert "bad-one" in caplog.text
    assert health.status == 200


async def test_nothing_is_compiled_that_would_build_urls():
    """A method of werkzeug's own stands back for it: twelve times as long a start of the routes."""
    for rule in Application(FakeEngine()).url_map.iter_rules():
        with pytest.raises(RuntimeError, match="are not built here"):
            rule.build({}, append_unknown=True)


async def test_quarts_test_client_reaches_the_routes():
    from tgi_trio.router.http.app import Application

    # Its client reads an answer when all of it was sent, into a channel for ten messages.
    engine = FakeEngine(lambda prompt: "Hello")
    app = Application(engine)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.run, 0.01)  # seconds: each event is a message of its own
        client = app.test_client()
        whole = await client.post("/generate", json={"inputs": "x"})
        stream = await client.post("/generate_stream", json={"inputs": "x"})
        assert await whole.get_json() == {"generated_text": "Hello"}
        assert bytes(await stream.get_data(as_text=False)).count(b"data: ") == 6
        nursery.cancel_scope.cancel()


async def test_documentation_is_served_and_whole():
    async with served() as server:
        client = await server.connect()
        answer = await client.get("/api-doc/openapi.json")
        page = await client.get("/docs")
    api = answer.json()
    assert api["openapi"].startswith("3.")
    for route in ROUTES:
        if route.path not in ("/ping", "/docs", "/api-doc/openapi.json") and (
            not route.path.startswith("/ui")
        ):
            path = re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", route.path)
            known = api["paths"].get(path, {})
            assert route.method.lower() in known or route.path == "/", route.path
    assert page.headers["content-type"].startswith("text/html")
    assert b"https://" not in page.body, "the page loads nothing from elsewhere"
