"""What clients of vLLM send and read beside OpenAI's fields, through the `openai` package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai as package
import pytest
import tokenizers
from huggingface_hub import InferenceClient
from openai import OpenAI

from tests.compat.conftest import KEY
from tests.system.client import TIMEOUT, post
from tests.system.server import ServerProcess
from tgi_trio import __version__
from tgi_trio.demo import model_path

pytestmark = pytest.mark.system

QUESTION: list[Any] = [{"role": "user", "content": "What is continuous batching?"}]
SHORT: dict[str, Any] = {"model": "tgi", "messages": QUESTION, "temperature": 0, "max_tokens": 6}
STORY = "Chapter 1. Once upon a time"
TEXT: dict[str, Any] = {"model": "tgi", "prompt": STORY, "temperature": 0, "max_tokens": 4}


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    """The served model's tokenizer, read by its own library."""
    return tokenizers.Tokenizer.from_file(str(model_path() / "tokenizer.json"))


@pytest.fixture
def http(served: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=TIMEOUT) as client:
        yield client


# ---- ids and usage -----------------------------------------------------------------------------


def test_answers_are_told_apart_by_their_ids(openai: OpenAI) -> None:
    streams = [
        list(openai.chat.completions.create(**SHORT, stream=True)),
        list(openai.chat.completions.create(**SHORT, stream=True)),
        list(openai.completions.create(**TEXT, stream=True)),
    ]
    ids = [{chunk.id for chunk in chunks} for chunks in streams]
    assert [len(each) for each in ids] == [1, 1, 1] and len(set.union(*ids)) == 3
    assert openai.chat.completions.create(**SHORT).id.startswith("chatcmpl-")
    assert openai.completions.create(**TEXT).id.startswith("cmpl-")


def test_hubs_client_reads_the_id_and_the_usage_of_a_stream(served: ServerProcess) -> None:
    client = InferenceClient(base_url=served.url)
    with_usage: Any = {"include_usage": True}
    chunks = list(
        client.chat_completion(QUESTION, max_tokens=3, stream=True, stream_options=with_usage)
    )
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].id.startswith("chatcmpl-")
    usage: Any = chunks[-1].usage
    assert usage.completion_tokens == 3
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


def test_cached_tokens_are_those_the_prefix_cache_gave(
    openai: OpenAI, served: ServerProcess
) -> None:
    prompt = "A prompt that nobody else in these tests has sent to the server so far. " * 4
    fields: dict[str, Any] = {**TEXT, "prompt": prompt}

    def cached(**more: Any) -> int:
        before = served.metric("tgi_prefix_cache_hit_tokens")
        if more:
            *_, last = openai.completions.create(**fields, **more)
            usage = last.usage
        else:
            usage = openai.completions.create(**fields).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        assert usage.completion_tokens_details is not None
        assert usage.completion_tokens_details.reasoning_tokens == 0
        found = usage.prompt_tokens_details.cached_tokens
        assert found == served.metric("tgi_prefix_cache_hit_tokens") - before
        assert found < usage.prompt_tokens
        return found

    first = cached()
    again = cached()
    assert again > max(first, 16)
    assert cached(stream=True, stream_options={"include_usage": True}) == again


def test_running_usage_counts_tokens(openai: OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = openai.chat.completions.create(**SHORT, stream=True, stream_options=options)
    assert [c.usage.completion_tokens for c in chunks if c.usage] == [1, 2, 3, 4, 5, 6]
    assert last.usage is not None and last.usage.completion_tokens == 6
    assert {c.usage.prompt_tokens for c in chunks if c.usage} == {last.usage.prompt_tokens}


# ---- tokens ------------------------------------------------------------------------------------


def test_token_ids_of_prompt_and_answer(openai: OpenAI, tokenizer: tokenizers.Tokenizer) -> None:
    asked: dict[str, Any] = {**TEXT, "extra_body": {"return_token_ids": True, "ignore_eos": True}}
    choice: Any = openai.completions.create(**asked).choices[0]
    assert choice.prompt_token_ids == tokenizer.encode(STORY).ids
    assert len(choice.token_ids) == 4
    assert tokenizer.decode(choice.prompt_token_ids + choice.token_ids) == STORY + choice.text
    chunks: list[Any] = [c.choices[0] for c in openai.completions.create(**asked, stream=True)]
    assert chunks[0].prompt_token_ids == choice.prompt_token_ids
    assert [id for chunk in chunks for id in chunk.token_ids] == choice.token_ids
    chat: Any = openai.chat.completions.create(**SHORT, extra_body={"return_token_ids": True})
    again = openai.completions.create(**{**TEXT, "prompt": chat.prompt_token_ids, "max_tokens": 6})
    assert again.choices[0].text == chat.choices[0].message.content


def test_bytes_of_tokens_add_up_where_their_texts_cannot_be_cut(openai: OpenAI) -> None:
    text = "naïve 5 € 漢"
    reply = openai.chat.completions.create(
        model="tgi",
        messages=QUESTION,
        temperature=0,  # a thought that is drawn may not end
        logprobs=True,
        top_logprobs=2,
        extra_body={"response_format": {"type": "choice", "value": [text]}},
    )
    (choice,) = reply.choices
    assert choice.message.content == text
    assert choice.logprobs is not None and choice.logprobs.content is not None
    tokens = [each for each in choice.logprobs.content if not each.token.startswith("<|")]
    # White space behind a thought is in none of them, but in one that goes on with the answer.
    assert bytes(tokens[0].bytes or []).strip()
    assert b"".join(bytes(each.bytes or []) for each in tokens).lstrip() == text.encode()
    with pytest.raises(UnicodeDecodeError):
        for each in tokens:
            bytes(each.bytes or []).decode()


def test_tokens_named_by_their_ids(openai: OpenAI) -> None:
    more = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    choice: Any = openai.completions.create(**TEXT, logprobs=2, extra_body=more).choices[0]
    names = [f"token_id:{id}" for id in choice.token_ids]
    assert choice.logprobs.tokens == names
    for name, top in zip(names, choice.logprobs.top_logprobs, strict=True):
        assert next(iter(top)) == name and len(top) == 2  # greedy takes the likeliest


def test_no_alternatives_at_all_and_all_there_are(openai: OpenAI) -> None:
    found = openai.completions.create(**TEXT, logprobs=0).choices[0].logprobs
    assert found is not None and found.tokens and found.token_logprobs and found.top_logprobs
    assert found.top_logprobs == [
        {token: value} for token, value in zip(found.tokens, found.token_logprobs, strict=True)
    ]
    with pytest.raises(package.UnprocessableEntityError, match="-1 asks for all"):
        openai.chat.completions.create(**SHORT, logprobs=True, top_logprobs=-1)


# ---- the prompt --------------------------------------------------------------------------------


def test_prompt_log_probabilities_are_those_of_an_echo(openai: OpenAI) -> None:
    echo = openai.completions.create(**{**TEXT, "max_tokens": 0}, echo=True, logprobs=1)
    expected = echo.choices[0].logprobs
    assert expected is not None and expected.token_logprobs and expected.tokens
    more = {"prompt_logprobs": 1, "return_token_ids": True}
    choice: Any = openai.completions.create(**TEXT, extra_body=more).choices[0]
    assert choice.prompt_logprobs[0] is None
    for i, (id, found) in enumerate(
        zip(choice.prompt_token_ids, choice.prompt_logprobs, strict=True)
    ):
        if found is None:
            continue
        own, best = found[str(id)], min(found.values(), key=lambda each: each["rank"] or 99)
        assert own["logprob"] == pytest.approx(expected.token_logprobs[i], abs=1e-4)
        assert own["decoded_token"] == expected.tokens[i]
        assert best["rank"] == 1 and best["logprob"] >= own["logprob"]
        assert (own["rank"] == 1) == (best is own)
    chat: Any = openai.chat.completions.create(**SHORT, extra_body=more)
    first, *others = chat.prompt_logprobs
    assert first is None
    assert all(str(id) in each for id, each in zip(chat.prompt_token_ids[1:], others, strict=True))


def test_truncation_keeps_the_end(openai: OpenAI, tokenizer: tokenizers.Tokenizer) -> None:
    long = STORY * 2000
    with pytest.raises(package.BadRequestError, match="maximum context length"):
        openai.completions.create(**{**TEXT, "prompt": long})
    for keep in (5, -1):
        more = {"truncate_prompt_tokens": keep, "return_token_ids": True}
        reply: Any = openai.completions.create(**{**TEXT, "prompt": long}, extra_body=more)
        ids = reply.choices[0].prompt_token_ids
        assert ids == tokenizer.encode(long).ids[-len(ids) :]
        assert reply.usage.prompt_tokens == len(ids)
        assert len(ids) == 5 if keep == 5 else len(ids) > 500


# ---- routes ------------------------------------------------------------------------------------


def test_tokens_there_and_back(http: httpx.Client, tokenizer: tokenizers.Tokenizer) -> None:
    body: dict[str, Any] = {"model": "tgi", "prompt": STORY, "return_token_strs": True}
    found = http.post("/tokenize", json=body).json()
    expected = tokenizer.encode(STORY)
    assert (found["tokens"], found["token_strs"]) == (expected.ids, expected.tokens)
    assert found["count"] == len(expected.ids)
    model = http.get("/v1/models").json()["data"][0]
    assert found["max_model_len"] == model["max_model_len"] > 0
    assert (model["root"], model["parent"]) == (model["id"], None)
    ids = tokenizer.encode(STORY, add_special_tokens=False).ids
    plain = {**body, "add_special_tokens": False, "return_token_strs": False}
    assert http.post("/tokenize", json=plain).json()["tokens"] == ids
    named = http.post("/detokenize", json={"model": "tgi", "tokens": ids})
    assert named.json() == {"prompt": STORY}
    assert http.post("/detokenize", json={"tokens": ids}).json()["content"] == STORY


def test_a_chat_is_counted_before_it_is_asked(http: httpx.Client, openai: OpenAI) -> None:
    found = http.post("/tokenize", json={"model": "tgi", "messages": QUESTION}).json()
    reply: Any = openai.chat.completions.create(**SHORT, extra_body={"return_token_ids": True})
    assert found["tokens"] == reply.prompt_token_ids
    assert found["count"] == reply.usage.prompt_tokens


def test_the_version_and_what_is_not_there(http: httpx.Client, openai: OpenAI) -> None:
    assert http.get("/version").json() == {"version": __version__}
    with pytest.raises(package.NotFoundError, match="Nothing is served at `/v1/embeddings`"):
        openai.embeddings.create(model="tgi", input="x", encoding_format="float")
    wrong = http.get("/v1/chat/completions")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert "it answers POST" in wrong.json()["error"]["message"]


def test_the_key_in_a_header_of_its_own(guarded: ServerProcess) -> None:
    body = {"prompt": "x", "max_tokens": 1}
    url = f"{guarded.url}/v1/completions"
    for key, status in ((KEY, 200), ("wrong", 401)):
        answer = post(url, json=body, headers={"x-api-key": key})
        assert answer.status_code == status


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"logit_bias": {"hello": 5}}, "logit_bias: the key `hello` is no token id"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "`continue_final_message` and `add_generation_prompt` cannot both be true",
        ),
        ({"truncate_prompt_tokens": 0}, "`truncate_prompt_tokens` must be -1"),
        ({"prompt_logprobs": 1, "stream": True}, "`prompt_logprobs` is not supported"),
    ],
)
def test_what_is_refused_says_why(openai: OpenAI, more: dict[str, Any], text: str) -> None:
    with pytest.raises(package.UnprocessableEntityError) as caught:
        openai.chat.completions.create(**SHORT, extra_body=more)
    assert text in str(caught.value)
