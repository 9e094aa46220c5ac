"""`huggingface_hub.InferenceClient`, given the server as `base_url` and as `model`."""

from __future__ import annotations

from typing import Any

import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError, OverloadedError, ValidationError

from tests.compat.conftest import KEY
from tests.system.client import post_stream
from tests.system.server import ServerProcess

pytestmark = pytest.mark.system

PROMPT = "Continuous batching is"
USAGE: Any = {"include_usage": True}  # a class of theirs, or as it is written in JSON
CHAT: list[dict[str, Any]] = [{"role": "user", "content": "What is a KV block?"}]


@pytest.fixture(params=["base_url", "model"])
def client(request: pytest.FixtureRequest, served: ServerProcess) -> InferenceClient:
    address: dict[str, Any] = {request.param: served.url}
    return InferenceClient(**address)


def test_generate_in_one_piece_and_as_a_stream(client: InferenceClient) -> None:
    whole = client.text_generation(PROMPT, max_new_tokens=6, return_full_text=False)
    pieces = list(
        client.text_generation(PROMPT, max_new_tokens=6, return_full_text=False, stream=True)
    )
    assert len(pieces) == 6 and "".join(pieces) == whole
    assert client.text_generation(PROMPT, max_new_tokens=6, return_full_text=True) == (
        PROMPT + whole
    )


def test_details_of_a_body(client: InferenceClient) -> None:
    found = client.text_generation(
        PROMPT,
        max_new_tokens=5,
        details=True,
        decoder_input_details=True,
        top_n_tokens=2,
        return_full_text=False,
    )
    details = found.details
    assert details is not None and details.finish_reason == "length"
    assert details.generated_tokens == len(details.tokens) == 5
    assert "".join(token.text for token in details.tokens) == found.generated_text
    assert details.prefill[0].logprob is None
    assert all(token.logprob < 0 for token in details.prefill[1:])
    assert "".join(token.text for token in details.prefill[1:]) == PROMPT
    assert details.top_tokens is not None and [len(top) for top in details.top_tokens] == [2] * 5


def test_details_of_a_stream(client: InferenceClient) -> None:
    events = list(client.text_generation(PROMPT, max_new_tokens=5, details=True, stream=True))
    assert [event.index for event in events] == [1, 2, 3, 4, 5]
    assert all(event.details is None and event.generated_text is None for event in events[:-1])
    last = events[-1]
    assert last.details is not None
    assert (last.details.finish_reason, last.details.generated_tokens) == ("length", 5)
    assert last.generated_text is not None
    assert last.generated_text.endswith("".join(event.token.text for event in events))


def test_best_of_stop_and_seed(client: InferenceClient) -> None:
    best = client.text_generation(
        PROMPT, max_new_tokens=4, best_of=2, do_sample=True, details=True
    ).details
    assert best is not None and best.best_of_sequences is not None
    assert len(best.best_of_sequences) == 1
    assert best.seed != best.best_of_sequences[0].seed
    word = " " + client.text_generation(PROMPT, max_new_tokens=12).split()[4]
    stopped = client.text_generation(PROMPT, max_new_tokens=60, stop=[word], details=True)
    assert stopped.details is not None and stopped.details.finish_reason == "stop_sequence"
    assert stopped.generated_text.endswith(word)

    def sampled(seed: int) -> str:
        return client.text_generation("Once", max_new_tokens=8, temperature=1.5, seed=seed)

    assert sampled(7) == sampled(7)


def test_chat_in_one_piece_and_as_a_stream(client: InferenceClient) -> None:
    whole = client.chat_completion(CHAT, temperature=0, max_tokens=10)
    chunks = list(
        client.chat_completion(
            CHAT,
            temperature=0,
            max_tokens=10,
            stream=True,
            logprobs=True,
            top_logprobs=2,
            stream_options=USAGE,
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    logprobs = chunks[0].choices[0].logprobs
    assert logprobs is not None and len(logprobs.content[0].top_logprobs) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_say_why(client: InferenceClient, stream: bool) -> None:
    with pytest.raises(ValidationError, match="`max_new_tokens` must be <="):
        found = client.text_generation(PROMPT, max_new_tokens=100_000, stream=stream)
        list(found)
    with pytest.raises(HfHubHTTPError, match="`nobody` is not served here"):
        list(client.chat_completion(CHAT, model="nobody", stream=stream))


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_an_address_may_end_with_a_slash(served: ServerProcess, end: str) -> None:
    client = InferenceClient(base_url=f"{served.url}{end}")
    assert client.chat_completion(CHAT, max_tokens=2).usage.completion_tokens == 2
    if not end.startswith("/v1"):
        assert client.text_generation(PROMPT, max_new_tokens=2)


def test_a_key_is_sent_and_a_full_house_is_named(guarded: ServerProcess) -> None:
    client = InferenceClient(base_url=guarded.url, token=KEY)
    endless = {"prompt": PROMPT, "max_tokens": 900, "stream": True, "ignore_eos": True}
    headers = {"authorization": f"Bearer {KEY}"}
    with post_stream(f"{guarded.url}/v1/completions", json=endless, headers=headers) as stream:
        lines = stream.iter_lines()  # kept: httpx closes the stream of a generator that is gone
        next(lines)
        with pytest.raises(OverloadedError, match="Model is overloaded"):
            client.text_generation(PROMPT, max_new_tokens=1)
    guarded.wait_idle()
    assert client.text_generation(PROMPT, max_new_tokens=1)
    with pytest.raises(HfHubHTTPError, match="401"):
        InferenceClient(base_url=guarded.url, token="wrong").text_generation(PROMPT)
