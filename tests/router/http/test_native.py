"""TGI's own API, to the byte."""

from __future__ import annotations

import json

import msgspec
import pytest
from packaging.version import Version

from tests.router.http.fake_engine import FakeEngine, byte_tokenizer
from tests.router.http.served import served
from tgi_trio import __version__
from tgi_trio.router.http.engine_api import ModelCard, ServedLimits
from tgi_trio.router.http.messages import replies
from tgi_trio.router.text.structural_tags import structural_tag

pytestmark = pytest.mark.trio

H = '{"id":41,"text":"H","logprob":-0.5,"special":false}'
I = '{"id":74,"text":"i","logprob":-0.5,"special":false}'  # noqa: E741
EOS = '{"id":1,"text":"</s>","logprob":-0.5,"special":true}'
ALTERNATIVE = '{"id":2,"text":"!","logprob":-1.25,"special":false}'


def engine() -> FakeEngine:
    return FakeEngine(lambda prompt: "Hi")


async def test_generate_is_one_object_with_the_text(http):
    async with served(engine(), http) as server:
        client = await server.connect()
        answer = await client.post("/generate", {"inputs": "Yo"})
    assert answer.status == 200
    assert answer.body == b'{"generated_text":"Hi"}'


async def test_details_come_in_tgis_order(http):
    async with served(engine(), http) as server:
        client = await server.connect()
        parameters = {"details": True, "decoder_input_details": True, "top_n_tokens": 2}
        answer = await client.post("/generate", {"inputs": "Yo", "parameters": parameters})
    tops = [f"[{token},{ALTERNATIVE}]" for token in (H, I, EOS)]
    expected = (
        '{"generated_text":"Hi","details":{"finish_reason":"eos_token","generated_tokens":3,'
        '"seed":null,"prefill":[{"id":0,"text":"<s>","logprob":null},'
        '{"id":58,"text":"Y","logprob":-1.0},{"id":80,"text":"o","logprob":-1.0}],'
        f'"tokens":[{H},{I},{EOS}],"top_tokens":[{",".join(tops)}]}}}}'
    )
    assert answer.body.decode() == expected
    msgspec.json.decode(answer.body, type=replies.GenerateResponse)


async def test_stream_events_come_in_tgis_order_without_a_marker(http):
    async with served(engine(), http) as server:
        client = await server.connect()
        answer = await client.post(
            "/generate_stream", {"inputs": "Yo", "parameters": {"details": True}}
        )
    tail = '"generated_text":null,"details":null}'
    details = '{"finish_reason":"eos_token","generated_tokens":3,"seed":null,"input_length":3}'
    assert answer.text == (
        f'data: {{"index":1,"token":{H},{tail}\n\n'
        f'data: {{"index":2,"token":{I},{tail}\n\n'
        f'data: {{"index":3,"token":{EOS},"generated_text":"Hi","details":{details}}}\n\n'
    )
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.headers["x-compute-characters"] == "2"
    assert "x-total-time" not in answer.headers
    receipt = msgspec.json.decode(answer.events()[-1], type=replies.StreamResponse).receipt
    assert isinstance(receipt, replies.StreamReceipt)
    assert (receipt.prompt_tokens, receipt.cached_tokens, receipt.output_tokens) == (3, 0, 3)
    assert min(receipt.queue_ms, receipt.prefill_ms, receipt.decode_ms) >= 0


async def test_stream_events_without_details_and_with_top_tokens(http):
    async with served(engine(), http) as server:
        client = await server.connect()
        parameters = {"top_n_tokens": 2, "max_new_tokens": 1, "return_full_text": True}
        answer = await client.post("/generate_stream", {"inputs": "Yo", "parameters": parameters})
    assert answer.text == (
        f'data: {{"index":1,"token":{H},"top_tokens":[{H},{ALTERNATIVE}],'
        '"generated_text":"YoH","details":null}\n\n'
    )


async def test_several_tokens_of_one_step_are_several_events(http):
    fake = FakeEngine(lambda prompt: "Hello world")
    fake.tokens_per_step = 5
    async with served(fake, http) as server:
        client = await server.connect()
        answer = await client.post("/generate_stream", {"inputs": "Yo", "parameters": {}})
    events = [msgspec.json.decode(each, type=replies.StreamResponse) for each in answer.events()]
    assert [event.index for event in events] == list(range(1, 13))
    assert "".join(event.token.text for event in events[:-1]) == "Hello world"


async def test_headers_of_a_whole_answer():
    async with served(engine()) as server:
        client = await server.connect()
        answer = await client.post("/generate", {"inputs": "Yé"}, x_request_id="my-id")
    headers = answer.headers
    assert headers["content-type"] == "application/json"
    assert headers["x-compute-type"] == "gpu+optimized"
    assert headers["x-compute-characters"] == "2"
    assert headers["x-prompt-tokens"] == "4"
    assert headers["x-generated-tokens"] == "3"
    assert float(headers["x-compute-time"]) > 0
    for name in ("total", "validation", "queue", "inference"):
        assert headers[f"x-{name}-time"].isdecimal()
    assert headers["x-time-per-token"].isdecimal()
    assert headers["x-request-id"] == "my-id"
    assert "server" not in headers


async def test_absent_parameters_sample_and_empty_ones_do_not():
    async with served(engine()) as server:
        client = await server.connect()
        await client.post("/generate", {"inputs": "Yo"})
        await client.post("/generate", {"inputs": "Yo", "parameters": {}})
    assert [request.sampling.sample for request in server.engine.submitted] == [True, False]


@pytest.mark.parametrize(
    ("tag", "expected"),
    [(None, "YoHi"), ("text-generation", "YoHi"), ("text2text-generation", "Hi")],
)
async def test_compat_returns_a_list_and_perhaps_the_prompt(http, tag, expected):
    fake = FakeEngine(lambda prompt: "Hi", model=ModelCard("m", pipeline_tag=tag))
    async with served(fake, http) as server:
        client = await server.connect()
        answer = await client.post("/", {"inputs": "Yo"})
        plain = await client.post("/", {"inputs": "Yo", "parameters": {"return_full_text": False}})
        stream = await client.post("/", {"inputs": "Yo", "stream": True})
    assert answer.json() == [{"generated_text": expected}]
    assert plain.json() == [{"generated_text": "Hi"}]
    last = msgspec.json.decode(stream.events()[-1], type=replies.StreamResponse)
    assert last.generated_text == expected


async def test_stop_text_is_kept():
    async with served(FakeEngine(lambda prompt: "one two three")) as server:
        client = await server.connect()
        answer = await client.post(
            "/generate", {"inputs": "x", "parameters": {"stop": ["two"], "details": True}}
        )
    assert answer.json()["generated_text"] == "one two"
    assert answer.json()["details"]["finish_reason"] == "stop_sequence"


NAMED = byte_tokenizer(special=("<|user|>",))


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        (["|"], "one two", "eos_token"),  # inside a special token, and inside that of the end
        (["s"], "one two", "eos_token"),
        (["</s>"], "one two", "eos_token"),  # the end comes before stop strings
        (["<|user|>"], "one ", "stop_sequence"),
        ([" <|user|>"], "one ", "stop_sequence"),
    ],
)
@pytest.mark.parametrize("step", [1, 20])
async def test_special_tokens_are_no_text_to_stop_strings(stop, text, reason, step):
    fake = FakeEngine(lambda prompt: "one <|user|>two", tokenizer=NAMED)
    fake.tokens_per_step = step
    async with served(fake) as server:
        client = await server.connect()
        body = {"inputs": "x", "parameters": {"stop": stop, "details": True}}
        whole = (await client.post("/generate", body)).json()
        last = json.loads((await client.post("/generate_stream", body)).events()[-1])
        chat = {"messages": [{"role": "user", "content": "x"}], "stop": stop}
        (choice,) = (await client.post("/v1/chat/completions", chat)).json()["choices"]
        stream = await client.post("/v1/chat/completions", {**chat, "stream": True})
    assert (whole["generated_text"], whole["details"]["finish_reason"]) == (text, reason)
    assert (last["generated_text"], last["details"]["finish_reason"]) == (text, reason)
    dropped = text.removesuffix(stop[0].removesuffix("<|user|>"))
    assert (choice["message"]["content"], choice["finish_reason"]) == (dropped, "stop")
    deltas = [json.loads(event)["choices"][0] for event in stream.events()[:-1]]
    assert "".join(delta["delta"]["content"] for delta in deltas) == dropped
    assert deltas[-1]["finish_reason"] == "stop"


async def test_best_of_returns_the_others_in_details():
    async with served(engine()) as server:
        client = await server.connect()
        parameters = {"best_of": 2, "do_sample": True, "details": True}
        answer = await client.post("/generate", {"inputs": "Yo", "parameters": parameters})
    response = msgspec.json.decode(answer.body, type=replies.GenerateResponse)
    assert isinstance(response.details, replies.Details)
    assert isinstance(response.details.best_of_sequences, list)
    assert [each.generated_text for each in response.details.best_of_sequences] == ["Hi"]
    seeds = [request.sampling.seed for request in server.engine.submitted]
    assert len(set(seeds)) == 2
    assert server.engine.permits == 0


async def test_best_of_takes_as_many_permits_or_none():
    fake = FakeEngine(limits=ServedLimits(max_concurrent_requests=2))
    async with served(fake) as server:
        client = await server.connect()
        parameters = {"best_of": 2, "do_sample": True}
        with fake.permit():
            answer = await client.post("/generate", {"inputs": "Yo", "parameters": parameters})
            assert answer.status == 429
            assert fake.permits == 1
            answer = await client.post("/generate", {"inputs": "Yo"})
            assert answer.status == 200


ERRORS = [
    ({"inputs": ""}, 422, "validation", "Input validation error: `inputs` cannot be empty"),
    (
        {"inputs": "x", "parameters": {"temperature": 0}},
        422,
        "validation",
        "Input validation error: `temperature` must be strictly positive",
    ),
    (
        {"inputs": "x", "parameters": {"top_p": 1.0}},
        422,
        "validation",
        "Input validation error: `top_p` must be > 0.0 and < 1.0",
    ),
    (
        {"inputs": "x" * 1025, "parameters": {"max_new_tokens": 1}},
        422,
        "validation",
        "Input validation error: `inputs` must have less than 1024 tokens. Given: 1026",
    ),
    (
        {"inputs": "x", "parameters": {"best_of": 3}},
        422,
        "validation",
        "Input validation error: `best_of` must be > 0 and <= 2. Given: 3",
    ),
]


@pytest.mark.parametrize(("body", "status", "kind", "text"), ERRORS)
async def test_errors_have_tgis_texts(http, body, status, kind, text):
    async with served(engine(), http) as server:
        client = await server.connect()
        answer = await client.post("/generate", body)
    assert answer.status == status
    assert answer.body == msgspec.json.encode({"error": text, "error_type": kind})


async def test_a_stream_that_cannot_begin_tells_so_in_an_event(http):
    async with served(engine(), http) as server:
        client = await server.connect()
        answer = await client.post(
            "/generate_stream", {"inputs": "x", "parameters": {"top_p": 1.5}}
        )
        best_of = await client.post(
            "/generate_stream", {"inputs": "x", "parameters": {"best_of": 2}}
        )
    assert answer.status == 200
    assert answer.body == (
        b'data: {"error":"Input validation error: `top_p` must be > 0.0 and < 1.0",'
        b'"error_type":"validation"}\n\n'
    )
    assert b"`best_of` != 1 is not supported when streaming tokens" in best_of.body


@pytest.mark.parametrize(
    ("grammar", "where"),
    [
        ({"type": "choice", "value": "ab"}, "value: Expected `array`, got `str`"),
        ({"type": "choice", "value": [1]}, "value[0]: Expected `str`, got `int`"),
        ({"type": "lark", "value": None}, "value: Expected `str`, got `null`"),
        ({"type": "json_schema", "value": {"name": "n"}}, "value: missing field `schema`"),
    ],
)
@pytest.mark.parametrize("body", [{"inputs": "x"}, {"inputs": ["x", "y"]}])
async def test_a_grammar_of_the_wrong_form_is_a_body_of_the_wrong_form(http, grammar, where, body):
    """In a stream as well, which told of an internal error, and the log of a defect."""
    async with served(http=http) as server:
        client = await server.connect()
        asked = {**body, "parameters": {"grammar": grammar}}
        for path in ("/generate", "/generate_stream"):
            answer = await client.post(path, asked)
            assert (answer.status, answer.headers["content-type"][:10]) == (422, "text/plain")
            assert f"target type: parameters.grammar.{where}" in answer.text


async def test_overload_is_a_429_and_in_a_stream_an_event(http):
    fake = FakeEngine(limits=ServedLimits(max_concurrent_requests=1))
    async with served(fake, http) as server:
        client = await server.connect()
        with fake.permit():
            answer = await client.post("/generate", {"inputs": "x"})
            stream = await client.post("/generate_stream", {"inputs": "x"})
    assert answer.status == 429
    assert answer.headers["retry-after"] == "2"
    assert answer.body == b'{"error":"Model is overloaded","error_type":"overloaded"}'
    assert stream.status == 200
    assert stream.body == b"data: " + answer.body + b"\n\n"


async def test_a_failed_generation_is_a_424_and_in_a_stream_the_last_event(http):
    fake = FakeEngine(lambda prompt: "Hi there")
    fake.fail_after = 2
    async with served(fake, http) as server:
        client = await server.connect()
        answer = await client.post("/generate", {"inputs": "x"})
        stream = await client.post("/generate_stream", {"inputs": "x"})
        again = await client.get("/info")  # the connection is as good as before
    error = (
        b'{"error":"Request failed during generation: the shard gave up","error_type":"generation"}'
    )
    assert (answer.status, answer.body) == (424, error)
    events = stream.events()
    assert [b'"token"' in event for event in events] == [True, True, False]
    assert events[-1] == error
    assert again.status == 200
    assert fake.permits == 0


async def test_clients_that_compare_versions_take_it_for_the_tgi_that_it_is_like():
    async with served(engine()) as server:
        client = await server.connect()
        found = (await client.get("/info")).json()["version"]
    version = Version(found)  # as llama-index and others read it
    assert version >= Version("3.3")
    assert version.local == f"trio.{__version__}"


async def test_metrics_count_requests_and_failures():
    async with served(engine()) as server:
        client = await server.connect()
        await client.post("/generate", {"inputs": "x"})
        await client.post("/generate_stream", {"inputs": "x"})
        await client.post("/generate", {"inputs": ""})
        text = (await client.get("/metrics")).body.decode()
    assert "tgi_request_count 3\n" in text
    assert "tgi_request_success 2\n" in text
    assert 'tgi_request_failure{err="validation"} 1\n' in text
    assert "tgi_request_duration_count 2\n" in text


CALL = {"type": "tag", "begin": "<call>", "end": "</call>", "content": {"type": "any_text"}}
TAG = {"format": {"type": "triggered_tags", "triggers": ["<call>"], "tags": [CALL]}}


@pytest.mark.parametrize("value", [TAG, json.dumps(TAG)])
@pytest.mark.parametrize("path", ["/generate", "/generate_stream"])
async def test_a_structural_tag_is_a_grammar(http, path, value):
    """With the tokens that the model has for it, as everywhere."""
    filling = FakeEngine(lambda _: "Hi", tokenizer=byte_tokenizer(("<call>",)))
    grammar = {"type": "structural_tag", "value": value}
    async with served(filling, http) as server:
        client = await server.connect()
        body = {"inputs": "x", "parameters": {"grammar": grammar}}
        answer = await client.post(path, body)
        wrong = {"type": "structural_tag", "value": {"format": {"type": "star"}}}
        refused = await client.post(path, {"inputs": "x", "parameters": {"grammar": wrong}})
    assert answer.status == 200
    assert "`format.content`" in refused.text
    (request,) = filling.submitted
    made = structural_tag(TAG, filling.tokenizer.added_tokens)
    assert request.sampling.grammar == made and f"<[{filling.tokenizer.token_id('<call>')}" in made
