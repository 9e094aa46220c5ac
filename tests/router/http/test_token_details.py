"""What OpenAI's answers tell of their tokens: ids, bytes, log-probabilities, also of the prompt."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from tests.router.http.fake_engine import FakeEngine, byte_tokenizer
from tests.router.http.openai_answers import engine
from tests.router.http.served import Answer, served
from tgi_trio.router.http.engine_api import ServedLimits
from tgi_trio.router.http.messages import replies

pytestmark = pytest.mark.trio

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = [{"role": "user", "content": "Yo"}]
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": USER}, TEXT: {"prompt": "Yo"}}
IDS = {text: byte_tokenizer().encode_ids(text, False).tolist() for text in ("H", "i", "é")}
FIRST, SECOND = IDS["é"]  # the two bytes of a character
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {}}}


async def asked(path: str, found: Any = None, **more: Any) -> Answer:
    async with served(found or engine()) as server:
        client = await server.connect()
        return await client.post(path, {**BODIES[path], **more})


def body_of(path: str, answer: Answer) -> Any:
    assert answer.status == 200, answer.body
    shape = replies.ChatCompletion if path == CHAT else replies.CompletionFinal
    return msgspec.json.decode(answer.body, type=shape)


def chunks_of(answer: Answer) -> list[Any]:
    *events, done = answer.events()
    assert done == b"[DONE]"
    return [msgspec.json.decode(event) for event in events]


def refusal(answer: Answer) -> str:
    assert answer.status == 422, answer.body
    assert answer.json()["error_type"] == "validation"
    message: str = answer.json()["error"]["message"]
    return message


# ---- the id of an answer -----------------------------------------------------------------------


@pytest.mark.parametrize(("path", "kind"), [(CHAT, "chatcmpl"), (TEXT, "cmpl")])
async def test_an_answer_has_one_id_in_all_its_chunks(path, kind):
    seen = set()
    own = {"tools": [WEATHER]} if path == CHAT else {"logprobs": 1}
    for more in ({}, {"n": 2}, {"seed": 1}, own):
        options = {"stream": True, "stream_options": {"include_usage": True}}
        ids = {chunk["id"] for chunk in chunks_of(await asked(path, **more, **options))}
        whole = body_of(path, await asked(path, **more)).id
        assert len(ids) == 1 and whole not in ids
        seen |= {*ids, whole}
    assert len(seen) == 8
    assert all(re.fullmatch(f"{kind}-[0-9a-f]{{32}}", id) for id in seen)


@pytest.mark.parametrize("tools", [None, [WEATHER]])
@pytest.mark.parametrize("path", BODIES)
async def test_an_error_event_has_the_id_too(path, tools):
    found = engine("Hello")
    found.fail_after = 2
    more = {"tools": tools} if path == CHAT else {}
    first, *_, error = chunks_of(await asked(path, found, stream=True, **more))
    assert "error" in error and error["id"] == first["id"]


# ---- token ids ---------------------------------------------------------------------------------


async def test_token_ids_of_a_chat():
    whole = body_of(CHAT, await asked(CHAT, return_token_ids=True, n=2))
    prompt = byte_tokenizer().encode_ids("<user>Yo\n<assistant>", False).tolist()
    assert whole.prompt_token_ids == prompt
    assert [choice.token_ids for choice in whole.choices] == [[*IDS["H"], *IDS["i"], 1]] * 2
    chunks = chunks_of(await asked(CHAT, return_token_ids=True, n=2, stream=True))
    for index in (0, 1):
        own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert [chunk.get("prompt_token_ids") for chunk in own] == [prompt, None, None]
        assert [chunk["choices"][0]["token_ids"] for chunk in own] == [IDS["H"], IDS["i"], [1]]


async def test_token_ids_of_completions():
    more = {"prompt": ["Yo", "é"], "return_token_ids": True}
    whole = body_of(TEXT, await asked(TEXT, **more))
    prompts = [byte_tokenizer().encode_ids(text).tolist() for text in ("Yo", "é")]
    assert prompts[1] == [0, *IDS["é"]]
    assert [choice.prompt_token_ids for choice in whole.choices] == prompts
    assert [choice.token_ids for choice in whole.choices] == [[*IDS["H"], *IDS["i"], 1]] * 2
    chunks = chunks_of(await asked(TEXT, **more, stream=True))
    for index in (0, 1):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert [choice.get("prompt_token_ids") for choice in own] == [prompts[index], None, None]
        assert [choice["token_ids"] for choice in own] == [IDS["H"], IDS["i"], [1]]


@pytest.mark.parametrize("path", BODIES)
async def test_token_ids_are_told_only_where_asked_for(path):
    for more in ({}, {"return_token_ids": False}, {"return_token_ids": None}):
        whole = await asked(path, **more)
        stream = await asked(path, stream=True, **more)
        for answer in (whole, stream):
            assert b"token_ids" not in answer.body


async def test_the_ids_of_tokens_without_a_chunk_come_with_the_next_one():
    """Where tools may be called, markup brings no chunk of its own."""
    call = '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>'
    more = {"tools": [WEATHER], "return_token_ids": True}
    whole = body_of(CHAT, await asked(CHAT, engine(call), **more))
    expected = [*byte_tokenizer().encode_ids(call, False).tolist(), 1]
    assert whole.choices[0].token_ids == expected
    options = {"continuous_usage_stats": True}
    chunks = chunks_of(await asked(CHAT, engine(call), **more, stream=True, stream_options=options))
    last = chunks.pop()
    assert len(chunks) < len(expected)
    ids: list[int] = []
    for chunk in chunks:
        ids += chunk["choices"][0]["token_ids"]
        assert chunk["usage"]["completion_tokens"] == len(ids)
    assert ids == expected and last["usage"]["completion_tokens"] == len(ids)


async def test_an_echo_alone_has_no_token_ids_of_its_own():
    more = {"echo": True, "max_tokens": 0, "return_token_ids": True}
    (choice,) = body_of(TEXT, await asked(TEXT, **more)).choices
    assert (choice.text, choice.token_ids) == ("Yo", [])
    assert len(choice.prompt_token_ids) == 3


# ---- log-probabilities -------------------------------------------------------------------------


async def test_bytes_are_a_tokens_own_also_within_a_character():
    more = {"logprobs": True, "top_logprobs": 2}
    whole = body_of(CHAT, await asked(CHAT, engine("é!"), **more))
    content = whole.choices[0].logprobs.content
    assert [each.token for each in content] == ["", "é", "!", "</s>"]
    assert [each.bytes for each in content] == [[0xC3], [0xA9], [0x21], list(b"</s>")]
    assert b"".join(bytes(each.bytes) for each in content[:3]).decode() == "é!"
    # An alternative shows its text, which says nothing of a part of a character; its bytes do.
    assert [(t.token, t.bytes) for t in content[0].top_logprobs] == [("�", [0xC3]), ("!", [33])]


async def test_tokens_may_be_named_by_their_ids():
    more = {"logprobs": True, "top_logprobs": 2, "return_tokens_as_token_ids": True}
    whole = body_of(CHAT, await asked(CHAT, engine("é"), **more))
    content = whole.choices[0].logprobs.content
    assert [each.token for each in content] == [f"token_id:{id}" for id in (FIRST, SECOND, 1)]
    assert [each.bytes for each in content[:2]] == [[0xC3], [0xA9]]
    assert [t.token for t in content[0].top_logprobs] == [f"token_id:{FIRST}", "token_id:2"]
    assert whole.choices[0].message.content == "é"
    more = {"logprobs": 2, "return_tokens_as_token_ids": True}
    found = body_of(TEXT, await asked(TEXT, engine("é"), **more)).choices[0].logprobs
    assert found.tokens == [f"token_id:{id}" for id in (FIRST, SECOND, 1)]
    assert found.top_logprobs[0] == {f"token_id:{FIRST}": -0.5, "token_id:2": -1.25}
    assert found.text_offset == [0, 0, 1]  # of the text, not of its names


async def test_no_alternatives_are_the_token_itself():
    for stream in (False, True):
        answer = await asked(TEXT, logprobs=0, stream=stream)
        choices = [
            each["choices"][0] for each in (chunks_of(answer) if stream else [answer.json()])
        ]
        tops = [top for choice in choices for top in choice["logprobs"]["top_logprobs"]]
        assert tops == [{"H": -0.5}, {"i": -0.5}, {"</s>": -0.5}]
    for top in (0, None):
        whole = body_of(CHAT, await asked(CHAT, logprobs=True, top_logprobs=top))
        assert [each.top_logprobs for each in whole.choices[0].logprobs.content] == [[], [], []]


async def test_of_alternatives_with_one_text_the_likeliest_is_shown():
    found = engine("é")
    found.tops = lambda id: [(150, -0.1), (id, -0.5), (151, -2.0)]  # three parts of characters
    logprobs = body_of(TEXT, await asked(TEXT, found, logprobs=3)).choices[0].logprobs
    assert logprobs.top_logprobs[0] == {"�": pytest.approx(-0.1), "": -0.5}


NAMED = [
    (CHAT, "top_logprobs", {"logprobs": True}),
    (CHAT, "prompt_logprobs", {}),
    (TEXT, "logprobs", {}),
    (TEXT, "prompt_logprobs", {}),
]


@pytest.mark.parametrize(("path", "name", "more"), NAMED)
async def test_minus_one_is_the_whole_vocabulary_where_that_is_allowed(path, name, more):
    text = refusal(await asked(path, **more, **{name: -1}))
    assert text == (
        f"Input validation error: `{name}` = -1 asks for all 258 tokens of the vocabulary, and at "
        "most 20 are shown (--max-top-n-tokens)"
    )
    found = FakeEngine(lambda prompt: "Hi", limits=ServedLimits(max_top_n_tokens=258))
    assert (await asked(path, found, **more, **{name: -1})).status == 200
    sampling = found.submitted[0].sampling
    assert (sampling.prompt_top_n if name == "prompt_logprobs" else sampling.top_n) == 258


@pytest.mark.parametrize(("path", "name", "more"), NAMED)
async def test_more_alternatives_than_are_shown_are_refused(path, name, more):
    assert f"`{name}` must be >= 0 and <= 20. Given: 21" in refusal(
        await asked(path, **more, **{name: 21})
    )
    below = await asked(path, **more, **{name: -2})
    assert below.status == 422 and f"{name}: Expected `int` >= -1" in below.body.decode()


# ---- the prompt --------------------------------------------------------------------------------


async def test_log_probabilities_of_a_prompt_in_vllms_shape():
    (choice,) = body_of(TEXT, await asked(TEXT, prompt="é!", prompt_logprobs=2)).choices

    def entry(id: int, text: str) -> dict[str, replies.PromptLogprob]:
        return {
            str(id): replies.PromptLogprob(-1.0, None, text),
            "34": replies.PromptLogprob(-1.0, 1, "A"),
            "35": replies.PromptLogprob(-2.0, 2, "B"),
        }

    assert choice.prompt_logprobs == [None, entry(FIRST, ""), entry(SECOND, "é"), entry(2, "!")]
    assert choice.logprobs is None and choice.text == "Hi"


async def test_the_rank_of_a_prompts_token_is_known_among_the_alternatives():
    (choice,) = body_of(TEXT, await asked(TEXT, prompt="BA", prompt_logprobs=1)).choices
    first, second = choice.prompt_logprobs[1:]
    assert first == {
        "35": replies.PromptLogprob(-1.0, None, "B"),
        "34": replies.PromptLogprob(-1.0, 1, "A"),
    }
    assert second == {"34": replies.PromptLogprob(-1.0, 1, "A")}


async def test_prompt_log_probabilities_of_a_chat_are_told_once():
    whole = body_of(CHAT, await asked(CHAT, prompt_logprobs=0, n=2))
    ids = byte_tokenizer().encode_ids("<user>Yo\n<assistant>", False).tolist()
    first, *others = whole.prompt_logprobs
    assert first is None
    assert [list(each) for each in others] == [[str(id)] for id in ids[1:]]
    assert "".join(
        each[str(id)].decoded_token for each, id in zip(others, ids[1:], strict=True)
    ) == ("user>Yo\n<assistant>")


async def test_echoed_and_asked_for_log_probabilities_have_their_own_numbers_of_alternatives():
    more = {"echo": True, "logprobs": 2, "prompt_logprobs": 1, "max_tokens": 1}
    (choice,) = body_of(TEXT, await asked(TEXT, **more)).choices
    assert choice.logprobs.tokens == ["<s>", "Y", "o", "H"]
    assert choice.logprobs.top_logprobs[1] == {"A": -1.0, "B": -2.0, "Y": -1.0}
    assert [list(each) for each in choice.prompt_logprobs[1:]] == [["58", "34"], ["80", "34"]]


@pytest.mark.parametrize("path", BODIES)
async def test_prompt_log_probabilities_do_not_stream(path):
    text = refusal(await asked(path, prompt_logprobs=1, stream=True))
    assert "`prompt_logprobs` is not supported when streaming" in text


# ---- truncation --------------------------------------------------------------------------------


async def truncated(path: str, **more: Any) -> list[int]:
    found = FakeEngine(
        lambda prompt: "Hi", limits=ServedLimits(max_input_tokens=30, max_total_tokens=40)
    )
    answer = await asked(path, found, **more)
    assert answer.status == 200, answer.body
    ids: list[int] = found.submitted[0].prompt_ids.tolist()
    assert answer.json()["usage"]["prompt_tokens"] == len(ids)
    return ids


LONG: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "a" * 50 + "b"}]},
    TEXT: {"prompt": "a" * 50 + "b"},
}
WHOLE = {CHAT: "<user>" + "a" * 50 + "b\n<assistant>", TEXT: "a" * 50 + "b"}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("more", "kept"),
    [
        ({"truncate_prompt_tokens": 5}, 5),
        ({"truncate_prompt_tokens": 30}, 30),
        ({"truncate_prompt_tokens": -1}, 30),
        ({"truncate_prompt_tokens": -1, "max_tokens": 4}, 30),
        ({"truncate_prompt_tokens": -1, "max_tokens": 25}, 15),
    ],
)
async def test_truncation_keeps_the_end_of_a_prompt(path, more, kept):
    ids = await truncated(path, **LONG[path], **more)
    assert ids == byte_tokenizer().encode_ids(WHOLE[path], False).tolist()[-kept:]


async def test_truncation_of_token_ids_and_of_short_prompts():
    assert await truncated(TEXT, prompt=[5, 6, 7], truncate_prompt_tokens=2) == [6, 7]
    assert await truncated(TEXT, prompt=[5, 6, 7], truncate_prompt_tokens=4) == [5, 6, 7]
    assert await truncated(TEXT, prompt=[5, 6, 7], truncate_prompt_tokens=-1) == [5, 6, 7]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("value", [0, 1025])
async def test_truncation_to_what_cannot_be_is_refused(path, value):
    assert refusal(await asked(path, truncate_prompt_tokens=value)) == (
        "Input validation error: `truncate_prompt_tokens` must be -1 (as many as there is room "
        f"for), or > 0 and <= 1024. Given: {value}"
    )
    below = await asked(path, truncate_prompt_tokens=-2)
    assert below.status == 422 and "truncate_prompt_tokens: Expected `int` >= -1" in below.text


async def test_an_echo_shows_what_is_left_of_its_prompt():
    more = {"prompt": "abcd", "truncate_prompt_tokens": 2, "echo": True}
    assert body_of(TEXT, await asked(TEXT, **more)).choices[0].text == "cdHi"
    chunks = chunks_of(await asked(TEXT, **more, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "cdHi"
