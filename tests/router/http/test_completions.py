"""OpenAI's completions: TGI's bytes, OpenAI's meanings."""

from __future__ import annotations

import gc

import msgspec
import pytest

from tests.router.http.fake_engine import FakeEngine
from tests.router.http.openai_answers import (
    EOS,
    GOING_ON,
    NAMES,
    engine,
    frames,
    undated,
    usage,
    usage_text,
)
from tests.router.http.served import served
from tests.router.text.kinds import served as tokenizer_of
from tgi_trio.router.http.engine_api import ServedLimits
from tgi_trio.router.http.messages import replies

pytestmark = pytest.mark.trio


async def test_completion_body_and_stream(http):
    async with served(engine(), http) as server:
        client = await server.connect()
        whole = await client.post("/v1/completions", {"prompt": "Yo"})
        stream = await client.post("/v1/completions", {"prompt": "Yo", "stream": True})
    usage = f'"usage":{usage_text(3, 3)}'

    def last(text: str) -> str:
        return (
            f'{{"object":"text_completion","id":"cmpl","created":0,{NAMES},"choices":[{{"index":0,'
            f'"text":"{text}","logprobs":null,"finish_reason":{EOS}}}],{usage}}}'
        )

    def event(text: str) -> str:
        return (
            '{"object":"text_completion","id":"cmpl","created":0,"choices":[{"index":0,'
            f'"text":"{text}","logprobs":null,"finish_reason":{GOING_ON}}}],{NAMES}}}'
        )

    assert undated(whole) == last("Hi")
    assert undated(stream) == frames(event("H"), event("i"), last(""), "[DONE]")
    assert "x-compute-time" not in whole.headers
    assert whole.headers["x-prompt-tokens"] == "3"


async def test_prompt_lists_echo_and_n(http):
    async with served(FakeEngine(lambda prompt: prompt.upper()), http) as server:
        client = await server.connect()
        body = {"prompt": ["ab", "cd"], "echo": True, "n": 2}
        whole = (await client.post("/v1/completions", body)).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        stream = await client.post("/v1/completions", {**body, **options})
        ids = await client.post("/v1/completions", {"prompt": [67, 68]})
        many = await client.post("/v1/completions", {"prompt": ["a"] * 5})
    expected = ["abAB", "abAB", "cdCD", "cdCD"]
    assert [choice["text"] for choice in whole["choices"]] == expected
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    # Each prompt of 3 tokens counts once, each of the 4 answers has 2 and its end.
    assert whole["usage"] == usage(6, 12)
    *events, last, done = stream.events()
    assert done == b"[DONE]"
    assert msgspec.json.decode(last)["usage"] == whole["usage"]
    texts = [""] * 4
    for event in map(msgspec.json.decode, events):
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == expected
    assert ids.json()["choices"][0]["text"] == "BC"
    assert many.status == 422
    assert many.json()["error_type"] == "batch size exceeded"
    text = "Number of prompts exceeds the maximum allowed batch size of 4"
    assert many.json()["error"]["message"] == text


async def test_completion_logprobs_in_stream_and_body():
    async with served(engine()) as server:
        client = await server.connect()
        body = {"prompt": "é!", "logprobs": 2, "echo": True}
        whole = await client.post("/v1/completions", body)
        stream = await client.post("/v1/completions", {**body, "stream": True})
    reply = msgspec.json.decode(whole.body, type=replies.CompletionFinal)
    logprobs = reply.choices[0].logprobs
    assert logprobs is not None and logprobs.top_logprobs is not None
    # The prompt's tokens: the beginning, two bytes of one character, and a third token.
    assert logprobs.tokens == ["<s>", "", "é", "!", "H", "i", "</s>"]
    assert logprobs.text_offset == [0, 0, 0, 1, 2, 3, 4]
    assert logprobs.token_logprobs == [None, -1.0, -1.0, -1.0, -0.5, -0.5, -0.5]
    # The likeliest, and the token itself.
    prompt = [{"A": -1.0, "B": -2.0, text: -1.0} for text in ("", "é", "!")]
    assert logprobs.top_logprobs[:5] == [None, *prompt, {"H": -0.5, "!": -1.25}]
    pieces = [msgspec.json.decode(e)["choices"][0]["logprobs"] for e in stream.events()[:-1]]
    for name in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
        assert [each for piece in pieces for each in piece[name]] == getattr(logprobs, name)[4:]


@pytest.mark.parametrize("prompt", ["Yo", [58, 80]])
async def test_the_log_probabilities_of_a_prompt_alone(http, prompt):
    async with served(engine(), http) as server:
        client = await server.connect()
        body = {"prompt": prompt, "logprobs": 1, "echo": True, "max_tokens": 0}
        whole = await client.post("/v1/completions", body)
        stream = await client.post("/v1/completions", {**body, "stream": True})
        silent = await client.post("/v1/completions", {**body, "echo": False})
    choice = msgspec.json.decode(whole.body, type=replies.CompletionFinal).choices[0]
    start = ["<s>"] * isinstance(prompt, str)
    assert (choice.text, choice.finish_reason) == ("Yo", "length")
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == [*start, "Y", "o"]
    assert choice.logprobs.token_logprobs == [None, -1.0, -1.0][: len(start) + 2]
    tokens = choice.logprobs.tokens
    assert choice.logprobs.top_logprobs == [None, *({"A": -1.0, t: -1.0} for t in tokens[1:])]
    usage = whole.json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(start) + 2, 0)
    assert whole.headers["x-generated-tokens"] == "0"
    assert stream.status == silent.status == 422
    assert "`max_tokens` = 0 is not supported when streaming" in stream.json()["error"]["message"]
    assert "`max_new_tokens` must be strictly positive" in silent.json()["error"]["message"]


async def test_best_of_completions_returns_n():
    async with served(engine()) as server:
        client = await server.connect()
        whole = (await client.post("/v1/completions", {"prompt": "x", "best_of": 2})).json()
        same = await client.post("/v1/completions", {"prompt": "x", "best_of": 3, "n": 3})
        more = await client.post("/v1/completions", {"prompt": "x", "best_of": 3})
        less = await client.post("/v1/completions", {"prompt": "x", "best_of": 1, "n": 2})
        stream = await client.post("/v1/completions", {"prompt": "x", "best_of": 2, "stream": True})
    assert len(whole["choices"]) == 1
    assert whole["usage"]["completion_tokens"] == 6
    assert same.status == 200 and len(same.json()["choices"]) == 3  # nothing is chosen
    assert more.status == 422
    assert "`best_of` must be > 0 and <= 2. Given: 3" in more.json()["error"]["message"]
    assert less.status == stream.status == 422


BEST = {"best_of": 2, "do_sample": True}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "best_of": 2}),
        ("/v1/completions", {"prompt": ["a", "b"], "n": 2}),
        ("/generate", {"inputs": ["a", "b"], "parameters": BEST}),
        ("/", {"inputs": ["a", "b"], "parameters": BEST}),
        ("/generate_stream", {"inputs": ["a", "b", "c", "d"]}),
        ("/vertex", {"instances": [{"inputs": "a"}] * 4}),
    ],
)
async def test_more_than_can_ever_run_is_no_overload(path, body):
    """A client that is told of an overload tries again; this would fail every time."""
    async with served(FakeEngine(limits=ServedLimits(max_concurrent_requests=3))) as server:
        client = await server.connect()
        answer = await client.post(path, body)
        failures = server.engine.metrics.value("tgi_request_failure", err="validation")
    assert answer.status == (200 if path == "/generate_stream" else 422)
    assert "retry-after" not in answer.headers
    text = "are 4; at most 3 can run at once (--max-concurrent-requests)"
    assert text in answer.body.decode() and '"validation"' in answer.body.decode()
    assert failures == 1 and server.engine.submitted == []


async def test_suffix_is_refused():
    async with served(engine()) as server:
        client = await server.connect()
        answer = await client.post("/v1/completions", {"prompt": "x", "suffix": ""})
    assert answer.status == 422
    assert answer.json()["error_type"] == "suffix not supported"


@pytest.mark.parametrize("kind", ["sentencepiece", "unigram", "byte_level"])
@pytest.mark.parametrize("prompt", ["The server keeps", "begin in one</s>", "e"])
async def test_the_offset_of_a_token_is_its_place_in_the_text(kind: str, prompt: str):
    """A decoder may cut the space in front of a prompt, and a prompt name special tokens."""
    found = FakeEngine(lambda _: "one token", tokenizer=tokenizer_of(kind))
    async with served(found) as server:
        client = await server.connect()
        body = {"prompt": prompt, "logprobs": 1, "echo": True}
        whole = await client.post("/v1/completions", body)
        stream = await client.post("/v1/completions", {**body, "stream": True})
    choice = msgspec.json.decode(whole.body, type=replies.CompletionFinal).choices[0]
    logprobs = choice.logprobs
    assert logprobs is not None and choice.text.startswith(prompt)
    tokens, offsets = logprobs.tokens, logprobs.text_offset
    if tokens[0] == "<s>":  # not in the text
        del tokens[0], offsets[0]
    assert "".join(tokens) == choice.text
    assert offsets == [len("".join(tokens[:i])) for i in range(len(offsets))]
    pieces = [msgspec.json.decode(e)["choices"][0]["logprobs"] for e in stream.events()[:-1]]
    streamed = [at for piece in pieces for at in piece["text_offset"]]
    assert streamed == offsets[-len(streamed) :]


@pytest.mark.parametrize("several", [False, True])
async def test_a_long_prompt_of_ids_is_kept_as_no_list(http, several):
    """Python's collector follows each reference of a list: a million take it 13 ms."""
    ids = [3, 4, 5] * 10_007

    def long_lists() -> set[int]:
        found = [each for each in gc.get_objects() if type(each) is list]
        return {id(each) for each in found if len(each) >= len(ids) and each[0] == 3}

    before, during = long_lists(), set[int]()

    def answer_after_a_look(prompt: str) -> str:
        during.update(long_lists())
        return "Hi"

    limits = ServedLimits(max_input_tokens=100_000, max_total_tokens=100_001)
    one = FakeEngine(answer_after_a_look, limits=limits)
    async with served(one, http) as server:
        client = await server.connect()
        answer = await client.post(
            "/v1/completions", {"prompt": [ids, ids[1:]] if several else ids}
        )
    assert answer.status == 200, answer.text
    assert [each.prompt_ids.tolist() for each in one.submitted] == [ids, ids[1:]][: 1 + several]
    assert during <= before
