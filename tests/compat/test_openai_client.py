"""The `openai` package."""

from __future__ import annotations

import signal
from typing import Any

import openai as package
import pytest
from openai import OpenAI

from tests.compat.conftest import KEY
from tests.system.server import ServerProcess, serving

pytestmark = pytest.mark.system

QUESTION: list[Any] = [{"role": "user", "content": "What is continuous batching?"}]
GREEDY: dict[str, Any] = {"model": "tgi", "messages": QUESTION, "temperature": 0}
SHORT: dict[str, Any] = {**GREEDY, "max_tokens": 10}
ENDING: dict[str, Any] = {**GREEDY, "stop": " running"}  # an answer that ends by itself, soon
STORY = "Chapter 1. Once upon a time"


# ---- chat ----------------------------------------------------------------------------------


def test_a_chat_in_one_piece_and_as_a_stream_is_the_same_text(openai: OpenAI) -> None:
    whole = openai.chat.completions.create(**ENDING)
    chunks = list(openai.chat.completions.create(**ENDING, stream=True))
    (choice,) = whole.choices
    assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == choice.message.content
    reasons = [c.choices[0].finish_reason for c in chunks]
    assert reasons[-1] == "stop" and set(reasons[:-1]) == {None}
    assert whole.object == "chat.completion"
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert {c.model for c in chunks} == {whole.model} == {"tgi-trio/demo"}


def test_usage_counts_the_same_in_body_and_stream(openai: OpenAI) -> None:
    whole = openai.chat.completions.create(**GREEDY, max_tokens=7).usage
    options: Any = {"include_usage": True}
    *chunks, last = openai.chat.completions.create(
        **GREEDY, max_tokens=7, stream=True, stream_options=options
    )
    assert whole is not None and whole.completion_tokens == 7
    assert whole.total_tokens == whole.prompt_tokens + 7
    assert last.usage == whole and last.choices == []
    assert all(chunk.usage is None for chunk in chunks)


def test_the_clients_own_stream_helper_puts_the_answer_together(openai: OpenAI) -> None:
    whole = openai.chat.completions.create(**ENDING).choices[0].message.content
    with openai.chat.completions.stream(**ENDING) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert kinds == {"chunk", "content.delta", "content.done"}
    assert final.choices[0].message.content == whole


@pytest.mark.parametrize("stop", [" batching", [" nowhere", " batching"]])
def test_a_stop_string_ends_the_answer_and_is_left_out(openai: OpenAI, stop: Any) -> None:
    whole = openai.chat.completions.create(**SHORT).choices[0].message.content or ""
    stopped = openai.chat.completions.create(**SHORT, stop=stop).choices[0]
    chunks = list(openai.chat.completions.create(**SHORT, stop=stop, stream=True))
    assert " batching" in whole
    assert stopped.message.content == whole.partition(" batching")[0]
    assert stopped.finish_reason == "stop"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == stopped.message.content


def test_log_probabilities_of_a_chat(openai: OpenAI) -> None:
    reply = openai.chat.completions.create(**GREEDY, max_tokens=5, logprobs=True, top_logprobs=3)
    choice = reply.choices[0]
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert "".join(each.token for each in choice.logprobs.content) == choice.message.content
    for each in choice.logprobs.content:
        assert len(each.top_logprobs) == 3
        assert each.top_logprobs[0].token == each.token  # greedy takes the likeliest
        assert each.logprob == each.top_logprobs[0].logprob <= 0
    chunks = openai.chat.completions.create(
        **GREEDY, max_tokens=5, logprobs=True, top_logprobs=3, stream=True
    )
    streamed = [c.choices[0].logprobs.content for c in chunks if c.choices[0].logprobs]
    assert [each for content in streamed for each in content or []] == choice.logprobs.content


def test_n_answers_come_with_n_indexes(openai: OpenAI) -> None:
    fields: dict[str, Any] = {**GREEDY, "temperature": 1.0, "n": 3, "seed": 5, "max_tokens": 6}
    whole = openai.chat.completions.create(**fields)
    texts = {choice.index: choice.message.content for choice in whole.choices}
    assert sorted(texts) == [0, 1, 2]
    assert whole.usage is not None and whole.usage.completion_tokens == 18
    streamed = {0: "", 1: "", 2: ""}
    for chunk in openai.chat.completions.create(**fields, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_parts_roles_and_fields_that_clients_send_are_taken(openai: OpenAI) -> None:
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": "Hello!", "tool_calls": []},
        {"role": "user", "content": "What is a KV block?"},
    ]
    reply = openai.chat.completions.create(
        model="tgi",
        messages=messages,
        max_completion_tokens=4,
        temperature=0,
        user="somebody",
        store=False,
        metadata={"a": "b"},
        response_format={"type": "text"},
        logit_bias={"5": -100},
        extra_body={"stop": None, "n": None, "seed": None, "tools": None},
    )
    assert reply.usage is not None and reply.usage.completion_tokens == 4


# ---- completions -----------------------------------------------------------------------------


def test_a_completion_in_one_piece_and_as_a_stream_is_the_same_text(openai: OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tgi", "prompt": STORY, "temperature": 0, "max_tokens": 12}
    fields["extra_body"] = {"ignore_eos": True}
    whole = openai.completions.create(**fields)
    *chunks, last = openai.completions.create(
        **fields, stream=True, stream_options={"include_usage": True}
    )
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert whole.choices[0].finish_reason == chunks[-1].choices[0].finish_reason == "length"
    assert last.usage == whole.usage and last.choices == []


def test_log_probabilities_of_a_completion(openai: OpenAI) -> None:
    reply = openai.completions.create(
        model="tgi", prompt=STORY, temperature=0, max_tokens=4, logprobs=2
    )
    choice = reply.choices[0]
    found = choice.logprobs
    assert found is not None and found.tokens and found.token_logprobs and found.top_logprobs
    assert "".join(found.tokens) == choice.text
    assert found.text_offset == [len("".join(found.tokens[:i])) for i in range(4)]
    for token, value, top in zip(
        found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert top[token] == value == max(top.values())


def test_log_probabilities_of_a_prompt_alone(openai: OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tgi", "prompt": STORY, "temperature": 0, "logprobs": 1}
    alone = openai.completions.create(**fields, echo=True, max_tokens=0)
    longer = openai.completions.create(**fields, echo=True, max_tokens=3)
    choice, other = alone.choices[0], longer.choices[0]
    assert choice.text == STORY and choice.finish_reason == "length"
    assert alone.usage is not None and alone.usage.completion_tokens == 0
    assert choice.logprobs is not None and other.logprobs is not None
    values, tokens = choice.logprobs.token_logprobs, choice.logprobs.tokens
    assert values and tokens and other.logprobs.tokens and other.logprobs.token_logprobs
    assert len(values) == alone.usage.prompt_tokens
    assert values[0] is None and all(value <= 0 for value in values[1:])
    assert "".join(tokens).endswith(STORY)
    assert other.logprobs.tokens[: len(tokens)] == tokens
    assert other.logprobs.token_logprobs[1 : len(tokens)] == pytest.approx(values[1:], abs=1e-4)
    assert other.text == STORY + "".join(other.logprobs.tokens[len(tokens) :])


def test_several_prompts_with_several_answers_come_in_order(openai: OpenAI) -> None:
    prompts = ["The queue", "The ring"]
    fields: dict[str, Any] = {"model": "tgi", "temperature": 0, "max_tokens": 4}
    alone = [openai.completions.create(prompt=p, **fields).choices[0].text for p in prompts]
    both = openai.completions.create(prompt=prompts, n=2, echo=True, **fields)
    expected = [prompts[i // 2] + alone[i // 2] for i in range(4)]
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in both.choices] == expected


def test_a_seed_repeats_a_sampled_text(openai: OpenAI) -> None:
    def text(seed: int) -> str:
        reply = openai.completions.create(
            model="tgi", prompt="Once", max_tokens=8, temperature=1.5, seed=seed
        )
        return reply.choices[0].text

    assert text(3) == text(3)
    assert len({text(seed) for seed in range(4)}) > 1


# ---- models ----------------------------------------------------------------------------------


def test_the_served_model_is_listed(openai: OpenAI) -> None:
    assert "tgi-trio/demo" in [model.id for model in openai.models.list()]


def test_every_name_is_listed_once(openai: OpenAI) -> None:
    names = [model.id for model in openai.models.list()]
    assert len(names) == len(set(names))


def test_a_model_can_be_looked_up(openai: OpenAI) -> None:
    assert openai.models.retrieve("tgi-trio/demo").id == "tgi-trio/demo"
    with pytest.raises(package.NotFoundError, match="`nobody` is not served here"):
        openai.models.retrieve("nobody")


# ---- errors ----------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], type[package.APIStatusError], str]] = [
    ({"model": "nobody"}, package.NotFoundError, "`nobody` is not served here"),
    ({"temperature": -1}, package.UnprocessableEntityError, "`temperature`"),
    ({"max_tokens": 100_000}, package.UnprocessableEntityError, "`max_new_tokens`"),
    ({"messages": []}, package.UnprocessableEntityError, "must not be empty"),
    ({"messages": "x"}, package.UnprocessableEntityError, "messages: Expected `array`"),
    ({"stop": list("abcde")}, package.UnprocessableEntityError, "`stop` supports up to 4"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        package.UnprocessableEntityError,
        "response_format.json_schema: missing field `schema`",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "g"},
        package.UnprocessableEntityError,
        "Tool with name g not found",
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fields", "kind", "text"), REFUSED)
def test_refusals_are_the_clients_exceptions(
    openai: OpenAI,
    fields: dict[str, Any],
    kind: type[package.APIStatusError],
    text: str,
    stream: bool,
) -> None:
    with pytest.raises(kind) as caught:
        openai.chat.completions.create(**{**GREEDY, **fields, "stream": stream})
    assert text in str(caught.value)
    assert caught.value.request_id


def test_the_exceptions_text_says_why(openai: OpenAI) -> None:
    with pytest.raises(package.UnprocessableEntityError) as caught:
        openai.chat.completions.create(**{**GREEDY, "temperature": -1})
    assert "temperature" in str(caught.value)


def test_an_address_may_end_with_a_slash(served: ServerProcess) -> None:
    with OpenAI(base_url=f"{served.url}/v1/", api_key="-", max_retries=0) as client:
        assert client.chat.completions.create(**GREEDY, max_tokens=2).usage is not None


def test_a_key_is_asked_for(guarded: ServerProcess) -> None:
    fields = {**GREEDY, "model": "mine", "max_tokens": 2}
    with OpenAI(base_url=f"{guarded.url}/v1", api_key=KEY, max_retries=0) as client:
        assert client.chat.completions.create(**fields).model == "mine"
    with (
        OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(package.AuthenticationError),
    ):
        client.chat.completions.create(**fields)


def test_a_full_house_is_a_rate_limit_and_the_place_comes_back(guarded: ServerProcess) -> None:
    with OpenAI(base_url=f"{guarded.url}/v1", api_key=KEY, max_retries=0) as client:
        long: dict[str, Any] = {"model": "tgi", "prompt": STORY, "max_tokens": 900}
        # Without an end of text it runs until it is left.
        stream = client.completions.create(**long, stream=True, extra_body={"ignore_eos": True})
        next(stream)
        with pytest.raises(package.RateLimitError) as caught:
            client.completions.create(model="tgi", prompt="x", max_tokens=1)
        assert int(caught.value.response.headers["retry-after"]) >= 1
        stream.close()
        guarded.wait_idle()
        reply = client.completions.create(model="tgi", prompt="x", max_tokens=1)
    assert reply.usage is not None and reply.usage.completion_tokens == 1


def test_an_error_in_the_middle_of_a_stream_is_raised_with_its_text() -> None:
    with (
        serving("--graceful-termination-timeout", "0.2", fake='{"step_ms": 100}') as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client,
    ):
        stream = client.chat.completions.create(
            **GREEDY, max_tokens=900, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        server.signal(signal.SIGTERM)
        with pytest.raises(package.APIError, match="shutting down"):
            for _ in stream:
                pass
        assert server.wait() == 0
