"""OpenAI's chats, and what they share with completions: TGI's bytes, OpenAI's meanings."""

from __future__ import annotations

import json

import msgspec
import orjson
import pytest
import trio

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.openai_answers import (
    EOS,
    GOING_ON,
    LENGTH,
    NAMES,
    engine,
    frames,
    undated,
    usage,
    usage_text,
)
from tests.router.http.served import served
from tgi_trio.router.http.call import HttpSettings
from tgi_trio.router.http.engine_api import ServedLimits
from tgi_trio.router.http.messages import replies

pytestmark = pytest.mark.trio

USER = [{"role": "user", "content": "Yo"}]


def chat_chunk(content: str, finish: str = GOING_ON, logprobs: str = "null") -> str:
    return (
        f'{{"object":"chat.completion.chunk","id":"chatcmpl","created":0,{NAMES},"choices":[{{"index":0,'
        f'"delta":{{"role":"assistant","content":"{content}"}},"logprobs":{logprobs},'
        f'"finish_reason":{finish}}}],"usage":null}}'
    )


async def test_chat_body(http):
    async with served(engine(), http) as server:
        client = await server.connect()
        answer = await client.post("/v1/chat/completions", {"messages": USER})
    assert undated(answer) == (
        f'{{"object":"chat.completion","id":"chatcmpl","created":0,{NAMES},"choices":[{{"index":0,'
        '"message":{"role":"assistant","content":"Hi"},"logprobs":null,'
        f'"finish_reason":{EOS}}}],"usage":{usage_text(20, 3)}}}'
    )
    assert answer.headers["x-compute-characters"] == "20"
    assert answer.headers["x-generated-tokens"] == "3"
    prompt = server.engine.tokenizer.decode(server.engine.submitted[0].prompt_ids)
    assert prompt == "<user>Yo\n<assistant>"


async def test_chat_stream_with_usage(http):
    async with served(engine(), http) as server:
        client = await server.connect()
        body = {"messages": USER, "stream": True, "stream_options": {"include_usage": True}}
        answer = await client.post("/v1/chat/completions", body)
    last = (
        f'{{"object":"chat.completion.chunk","id":"chatcmpl","created":0,{NAMES},"choices":[],'
        f'"usage":{usage_text(20, 3)}}}'
    )
    assert undated(answer) == frames(
        chat_chunk("H"), chat_chunk("i"), chat_chunk("", EOS), last, "[DONE]"
    )
    assert answer.headers["x-accel-buffering"] == "no"


async def test_chat_logprobs_are_the_same_in_stream_and_body(http):
    async with served(engine(), http) as server:
        client = await server.connect()
        body = {"messages": USER, "logprobs": True, "top_logprobs": 2, "max_tokens": 1}
        whole = await client.post("/v1/chat/completions", body)
        stream = await client.post("/v1/chat/completions", {**body, "stream": True})
    logprobs = (
        '{"content":[{"token":"H","logprob":-0.5,"bytes":[72],"top_logprobs":['
        '{"token":"H","logprob":-0.5,"bytes":[72]},{"token":"!","logprob":-1.25,"bytes":[33]}]}]}'
    )
    assert f'"logprobs":{logprobs},"finish_reason":"length"' in whole.body.decode()
    assert undated(stream) == frames(chat_chunk("H", LENGTH, logprobs), "[DONE]")


async def test_stop_text_is_dropped_and_finish_reason_is_openais(http):
    async with served(engine("one two three"), http) as server:
        client = await server.connect()
        body = {"messages": USER, "stop": "two"}
        whole = (await client.post("/v1/chat/completions", body)).json()
        stream = await client.post("/v1/chat/completions", {**body, "stream": True})
        listed = (await client.post("/v1/completions", {"prompt": "x", "stop": [" t"]})).json()
    assert whole["choices"][0]["message"]["content"] == "one "
    assert whole["choices"][0]["finish_reason"] == "stop"
    chunks = [
        msgspec.json.decode(e, type=replies.ChatCompletionChunk) for e in stream.events()[:-1]
    ]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "one "
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert listed["choices"][0]["text"] == "one"


async def test_several_choices_share_one_stream(http):
    async with served(engine(), http) as server:
        client = await server.connect()
        body = {"messages": USER, "n": 3, "seed": 7, "stream_options": {"include_usage": True}}
        whole = (await client.post("/v1/chat/completions", body)).json()
        stream = await client.post("/v1/chat/completions", {**body, "stream": True})
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert whole["usage"] == usage(20, 9)
    *events, done = stream.events()
    assert done == b"[DONE]"
    chunks = [msgspec.json.decode(event, type=replies.ChatCompletionChunk) for event in events]
    assert msgspec.to_builtins(chunks.pop().usage) == usage(20, 9)
    texts = dict.fromkeys(range(3), "")
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == dict.fromkeys(range(3), "Hi")
    assert [request.sampling.seed for request in server.engine.submitted[:3]] == [7, 8, 9]


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("chat/completions", {"messages": USER}),
        ("completions", {"prompt": "Hi"}),
        ("messages", {"messages": USER, "max_tokens": 4}),
        ("responses", {"input": "Hi"}),
    ],
)
async def test_a_seed_of_minus_one_is_a_random_one(path, prompt):
    """As in vLLM and llama.cpp; OpenAI takes negative seeds, so others are as good as any."""
    asked = {"model": "tgi", **prompt}
    async with served(engine()) as server:
        client = await server.connect()
        for seed in (-1, -1, -2, -(2**63), 2**64 - 1):
            assert (await client.post(f"/v1/{path}", {**asked, "seed": seed})).status == 200, seed
        for wrong in (2**64, -(2**63) - 1, 0.5):
            body = json.dumps({**asked, "seed": wrong}).encode()
            refused = await client.post(f"/v1/{path}", body)
            assert refused.status in (400, 422)
            said = refused.json()["error"]["message"]
            assert (
                wrong == 0.5
                or ">= -2^63 and < 2^64" in said
                or (f">= {-(2**63)} and <= {2**64 - 1}" in said)
            )
        strict = await client.post("/generate", {"inputs": "Hi", "parameters": {"seed": -1}})
    assert strict.status == 422  # TGI's seeds have no sign
    assert f"parameters.seed: Expected `int` >= 0 and <= {2**64 - 1}" in strict.body.decode()
    seeds = [request.sampling.seed for request in server.engine.submitted]
    assert seeds[2:] == [2**64 - 2, 2**63, 2**64 - 1] and len({*seeds[:2], seeds[4]}) == 3


async def test_parameters_mean_what_openai_says():
    async with served(engine()) as server:
        client = await server.connect()
        body = {
            "messages": USER,
            "top_p": 1.0,
            "presence_penalty": 0.5,
            "frequency_penalty": -0.25,
            "logit_bias": {"5": -100, "6": 3.5},
            "max_completion_tokens": 4,
            "min_tokens": 2,
            "ignore_eos": True,
            "seed": 3,
        }
        assert (await client.post("/v1/chat/completions", body)).status == 200
        greedy = {"messages": USER, "temperature": 0, "top_p": 0.3}
        assert (await client.post("/v1/chat/completions", greedy)).status == 200
    first, second = server.engine.submitted
    sampling = first.sampling
    assert sampling.sample
    assert sampling.absolute_penalties
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -0.25)
    assert sampling.repetition_penalty == 1.0
    assert dict(sampling.logit_bias) == {5: -100, 6: 3.5}
    assert sampling.ignore_eos
    assert sampling.seed == 3
    assert (first.stopping.max_new_tokens, first.stopping.min_new_tokens) == (4, 2)
    assert not second.sampling.sample


@pytest.mark.parametrize(
    "name", ["test/model", "nick", "tgi", "dummy", "http://localhost:3000", "https://a.b/v1", None]
)
async def test_served_names(name):
    async with served(engine()) as server:
        client = await server.connect()
        answer = await client.post("/v1/chat/completions", {"messages": USER, "model": name})
        text = await client.post("/v1/completions", {"prompt": "x", "model": name})
    assert answer.json()["model"] == ("nick" if name == "nick" else "test/model")
    assert text.json()["model"] == "test/model"


@pytest.mark.parametrize("stream", [False, True])
async def test_failures_before_the_first_byte_have_real_statuses(http, stream):
    limits = ServedLimits(max_concurrent_requests=2)
    async with served(FakeEngine(limits=limits), http) as server:
        client = await server.connect()

        async def ask(**body):
            return await client.post(
                "/v1/chat/completions", {"messages": USER, "stream": stream, **body}
            )

        unknown = await ask(model="gpt-4")
        invalid = await ask(temperature=-1)
        overloaded = await ask(n=2)
        assert overloaded.status == 200
        server.engine.permits = 1  # taken by somebody else
        overloaded = await client.post("/v1/completions", {"prompt": ["a", "b"], "stream": stream})
    assert unknown.status == 404
    error = unknown.json()["error"]
    assert "`test/model`" in error["message"]
    assert "`nick`" in error["message"]
    assert error == {
        "message": error["message"],
        "type": "not_found",
        "param": "model",
        "code": "model_not_found",
        "http_status_code": 404,
    }
    assert unknown.json()["error_type"] == "not_found"
    assert invalid.status == 422
    assert invalid.json()["error_type"] == "validation"
    assert overloaded.status == 429
    assert overloaded.headers["retry-after"] == "2"


async def test_an_error_mid_stream_is_one_event_and_then_done(http):
    fake = engine("Hello")
    fake.fail_after = 1
    async with served(fake, http) as server:
        client = await server.connect()
        for path, body in (
            ("/v1/chat/completions", {"messages": USER}),
            ("/v1/completions", {"prompt": "x"}),
        ):
            answer = await client.post(path, {**body, "stream": True})
            *_, error, done = answer.events()
            error = orjson.loads(error)
            assert error.pop("id") == orjson.loads(answer.events()[0])["id"]
            message = "Request failed during generation: the shard gave up"
            told = {"message": message, "http_status_code": 424, "type": "generation"}
            assert error == {"error": {**told, "param": None, "code": "server_error"}}
            assert done == b"[DONE]"
            assert (await client.post(path, body)).status == 424


async def test_a_token_that_cannot_be_written_ends_its_own_stream_only(http, caplog, monkeypatch):
    fake = engine("Hello")
    next_token = fake.next_token

    def spoilt(stream):
        token = next_token(stream)
        if stream.id == 1 and token.text == "l":
            token.text = "\ud800"  # no JSON can carry it
        return token

    monkeypatch.setattr(fake, "next_token", spoilt)
    async with served(fake, http) as server:
        client, other = await server.connect(), await server.connect()
        body = {"prompt": "x", "stream": True}
        await client.send("POST", "/v1/completions", body)
        while not fake.submitted:  # two that come at one time may be served in either order
            await trio.sleep(0.001)
        await other.send("POST", "/v1/completions", body)
        bad, good = await client.answer(), await other.answer()
        assert fake.permits == 0
        assert not fake.live
    *_, error, done = bad.events()
    assert b'"http_status_code":500' in error
    assert done == b"[DONE]"
    assert len(good.events()) == 7
    assert "defect" in caplog.text


@pytest.mark.parametrize("key", ["abc", "", "1.5", "1_0", " 7", "007", "1e2", "\uff19"])
@pytest.mark.parametrize(
    ("path", "body"),
    [("/v1/chat/completions", {"messages": USER}), ("/v1/completions", {"prompt": "x"})],
)
async def test_a_bias_of_what_is_no_token_id_names_the_key(path, body, key):
    async with served(engine()) as server:
        client = await server.connect()
        answer = await client.post(path, {**body, "logit_bias": {"5": 1, key: 1}})
    assert answer.status == 422
    text = f"logit_bias: the key `{key}` is no token id: keys are the ids of tokens as decimal"
    assert text in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("bias", "text"),
    [
        ({"-1": 1}, "must name token ids >= 0 and < 258. Given: -1"),
        ({"258": 1}, "must name token ids >= 0 and < 258. Given: 258"),
        ({"9": 100.5}, "must be >= -100.0 and <= 100.0. Given: 100.5 for 9"),
    ],
)
async def test_a_bias_out_of_range_names_key_and_range(bias, text):
    async with served(engine()) as server:
        client = await server.connect()
        answer = await client.post("/v1/completions", {"prompt": "x", "logit_bias": bias})
    assert answer.status == 422
    assert answer.json()["error"]["message"] == f"Input validation error: `logit_bias` {text}"


async def test_openai_allows_20_alternatives():
    async with served(engine()) as server:
        client = await server.connect()
        chat = {"messages": USER, "logprobs": True}
        for path, body, name in (
            ("/v1/chat/completions", chat, "top_logprobs"),
            ("/v1/completions", {"prompt": "x"}, "logprobs"),
        ):
            assert (await client.post(path, {**body, name: 20})).status == 200
            refused = await client.post(path, {**body, name: 21})
            assert refused.status == 422
            assert "must be >= 0 and <= 20. Given: 21" in refused.json()["error"]["message"]
        native = {"inputs": "x", "parameters": {"top_n_tokens": 6}}
        assert (await client.post("/generate", native)).status == 422


async def test_docker_label_is_in_the_fingerprint():
    async with served(engine(), HttpSettings(docker_label="sha-1")) as server:
        client = await server.connect()
        answer = await client.post("/v1/completions", {"prompt": "x"})
    assert answer.json()["system_fingerprint"] == "0.1.0-sha-1"
