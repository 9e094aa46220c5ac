"""/tokenize in both its forms, /detokenize, /tokenizer_info and /version."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.router.http.fake_engine import FakeEngine, byte_tokenizer, plain_template
from tests.router.http.served import Answer, served
from tgi_trio import __version__
from tgi_trio.router.http.engine_api import ServedLimits
from tgi_trio.router.http.messages import replies, service_replies
from tgi_trio.router.text.prompt_tokens import PromptTokens

pytestmark = pytest.mark.trio

USER = [{"role": "user", "content": "Yo"}]
TURNS = [*USER, {"role": "assistant", "content": "Sure,"}]
LONG = [{"role": "user", "content": "A long way to go. " * 500}]


async def asked(path: str, body: Any, found: FakeEngine | None = None) -> Answer:
    async with served(found) as server:
        client = await server.connect()
        return await client.post(path, body)


async def tokenized(**body: Any) -> service_replies.TokenizeResponse:
    answer = await asked("/tokenize", body)
    assert answer.status == 200, answer.body
    return msgspec.json.decode(answer.body, type=service_replies.TokenizeResponse)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages/count_tokens", {"model": "tgi", "messages": LONG}),
        ("/v1/responses/input_tokens", {"model": "tgi", "input": LONG}),
    ],
)
async def test_a_prompt_that_was_counted_is_tokenised_no_more(path, body, monkeypatch):
    """Agents ask how long it is, and then send it."""
    new: list[int] = []
    remember = PromptTokens._remember

    def note(self, key, ids):
        new.append(len(ids))
        remember(self, key, ids)

    monkeypatch.setattr(PromptTokens, "_remember", note)
    engine = FakeEngine(limits=ServedLimits(max_input_tokens=10_000, max_total_tokens=10_100))
    async with served(engine) as server:
        client = await server.connect()
        count = (await client.post(path, body)).json()["input_tokens"]
        assert sum(new) == count > 8000
        new.clear()
        assert (await client.post(path, body)).json()["input_tokens"] == count
        more = {"max_tokens": 4} if "messages" in body else {"max_output_tokens": 16}
        assert (await client.post(path.rpartition("/")[0], body | more)).status == 200
    assert sum(new) == 0 and len(engine.submitted[0].prompt_ids) == count


# ---- /tokenize ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["né", "x" * 500, ""])
async def test_a_prompt_is_counted(text):
    ids = byte_tokenizer().encode_ids(text).tolist()
    found = await tokenized(prompt=text, model="nick")
    assert (found.count, found.max_model_len, found.tokens) == (len(ids), 2048, ids)
    assert found.token_strs is None
    plain = await tokenized(prompt=text, add_special_tokens=False, return_token_strs=False)
    assert (plain.tokens, plain.token_strs) == (ids[1:], None)


async def test_tokens_are_shown_as_the_vocabulary_writes_them():
    found = await tokenized(prompt="a é", return_token_strs=True)
    assert found.token_strs == ["<s>", "a", "Ġ", "Ã", "©"]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, "<user>Yo\n<assistant>"),
        ({"add_generation_prompt": True, "continue_final_message": False}, "<user>Yo\n<assistant>"),
        ({"add_generation_prompt": False}, "<user>Yo"),
        ({"messages": TURNS}, "<user>Yo\n<assistant>Sure,"),
        (
            {"messages": TURNS, "add_generation_prompt": False, "continue_final_message": True},
            "<user>Yo\n<assistant>Sure,",
        ),
        (
            {"messages": TURNS, "continue_final_message": False},
            "<user>Yo\n<assistant>Sure,\n<assistant>",
        ),
    ],
)
async def test_a_chat_has_the_tokens_that_its_answer_would_begin_with(more, text):
    body = {"messages": USER, **more}
    assert (await tokenized(**body)).tokens == byte_tokenizer().encode_ids(text, False).tolist()
    special = await tokenized(**body, add_special_tokens=True, return_token_strs=True)
    assert special.token_strs is not None and special.token_strs[0] == "<s>"
    found = FakeEngine()
    whole = await asked("/v1/chat/completions", body, found)
    assert whole.status == 200
    assert byte_tokenizer().decode(found.submitted[0].prompt_ids) == text


async def test_tools_count_as_the_template_shows_them():
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    body = {"messages": USER, "tools": [tool]}
    usage = (await asked("/v1/chat/completions", body)).json()["usage"]
    assert (await tokenized(**body)).count == usage["prompt_tokens"] > 20


async def test_a_template_of_the_clients_own_is_refused():
    body = {"messages": USER, "chat_template": "{{ messages }}"}
    answer = await asked("/tokenize", body)
    assert answer.status == 422
    assert "`chat_template` is not supported" in answer.json()["error"]
    assert (await tokenized(messages=USER, chat_template="")).count > 0


async def test_tgis_form_comes_first():
    answer = await asked("/tokenize", {"inputs": "x", "prompt": "yz", "messages": USER})
    assert [token["text"] for token in answer.json()] == ["", "x"]


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({}, 422, "body: needs `inputs`, `prompt` or `messages`"),
        ({"prompt": 5}, 422, "prompt: Expected `str`"),
        ({"messages": [5]}, 422, "messages[0]: Expected `object`"),
        ({"inputs": 5, "prompt": "x"}, 200, "count"),
        ({"prompt": "x", "model": "other"}, 404, "`other` is not served here"),
        ({"messages": []}, 422, "messages must not be empty"),
        (
            {"messages": USER, "add_generation_prompt": True, "continue_final_message": True},
            422,
            "`continue_final_message` and `add_generation_prompt` cannot both be true",
        ),
    ],
)
async def test_what_cannot_be_tokenized_is_told(body, status, text):
    answer = await asked("/tokenize", body)
    assert answer.status == status
    assert text in answer.body.decode()


# ---- /detokenize -------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["Yo né", "x" * 500, ""])
async def test_tokens_become_text_again(text):
    ids = byte_tokenizer().encode_ids(text, False).tolist()
    named = await asked("/detokenize", {"tokens": ids, "model": "nick"})
    assert named.json() == {"prompt": text}
    # llama.cpp's clients read another field.
    assert (await asked("/detokenize", {"tokens": ids})).json() == {"prompt": text, "content": text}


async def test_special_tokens_are_shown():
    assert (await asked("/detokenize", {"tokens": [0, 41, 1]})).json()["prompt"] == "<s>H</s>"


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"tokens": [5, 258]}, 422, "`tokens` must hold token ids >= 0 and < 258. Given: 258"),
        ({"tokens": [-1]}, 422, "tokens[0]: Expected `int` >= 0"),
        ({"tokens": [2**31]}, 422, "tokens[0]: Expected `int` <= 2147483647"),
        ({"tokens": "x"}, 422, "tokens: Expected `array`"),
        ({}, 422, "missing required field `tokens`"),
        ({"tokens": [5], "model": "other"}, 404, "`other` is not served here"),
    ],
)
async def test_what_is_no_token_is_told(body, status, text):
    answer = await asked("/detokenize", body)
    assert answer.status == status
    assert text in answer.body.decode()
    if answer.headers["content-type"] == "application/json":
        msgspec.json.decode(answer.body, type=replies.ErrorResponse)


# ---- /tokenizer_info ---------------------------------------------------------------------------


@pytest.mark.parametrize("chats", [True, False])
async def test_clients_that_render_chats_themselves_learn_how(chats):
    engine = FakeEngine()
    if not chats:
        engine.chat_template = None
    async with served(engine) as server:
        client = await server.connect()
        answer = await client.get("/tokenizer_info")
    found = msgspec.json.decode(answer.body, type=service_replies.TokenizerInfo)
    assert (found.bos_token, found.eos_token, found.pad_token) == ("<s>", "</s>", None)
    assert (found.unk_token, found.model_max_length) == (None, 2048)
    assert found.chat_template == (plain_template().source() if chats else None)


# ---- /version ----------------------------------------------------------------------------------


async def test_the_version_is_told():
    async with served() as server:
        client = await server.connect()
        answer = await client.get("/version")
    assert answer.json() == {"version": __version__}
