"""Adapters with tokenizers and templates of their own, in every API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.router.http.fake_engine import GAP_MARKS, FakeEngine, byte_tokenizer, plain_template
from tests.router.http.served import served
from tgi_trio.ipc.adapters import AdapterReport
from tgi_trio.router.adapters.registry import AdapterRegistry
from tgi_trio.router.adapters.text_processors import TextProcessors
from tgi_trio.router.text.own_files import ModelVocabulary
from tgi_trio.router.text.text_processor import ModelTextProcessor, TextProcessor
from tgi_trio.router.text.thoughts.derive import ThoughtSettings

pytestmark = pytest.mark.trio

START, END = "<|im_start|>", "<|im_end|>"
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}
INPUT = {"input": "Hi", "max_output_tokens": 20}
PARAMETERS = {"adapter_id": "mine", "max_new_tokens": 20}
GRAMMAR = {"type": "regex", "value": "a"}


@pytest.fixture
def engine(tmp_path: Path) -> FakeEngine:
    """With the adapters `mine`, which has ChatML and tokens for gaps, and `plain`."""
    tokenizer = byte_tokenizer()
    file = tmp_path / "tokenizer.json"
    tokenizer._backend.save(str(file))
    folders = {name: tmp_path / name for name in ("mine", "plain")}
    for folder in folders.values():
        folder.mkdir()
    backend = tokenizers.Tokenizer.from_file(str(file))
    backend.add_special_tokens([START, END, *GAP_MARKS])
    backend.save(str(folders["mine"] / "tokenizer.json"))
    config = {"eos_token": END, "chat_template": TEMPLATE}
    (folders["mine"] / "tokenizer_config.json").write_text(json.dumps(config))
    vocabulary = ModelVocabulary(file, 300)
    found = FakeEngine(lambda prompt: "Hello world", tokenizer=tokenizer)
    found.validator._limits = type(found.validator._limits)(1000, 2000, vocab_size=300)
    found.own_text_processors = TextProcessors(
        ModelTextProcessor(
            TextProcessor(tokenizer, plain_template()),
            frozenset({1}),
            vocabulary.parts,
            None,
            ThoughtSettings(),
        ),
        vocabulary,
        most=2,
    )
    found.adapters = AdapterRegistry(folders, 2)
    for order in found.adapters.orders():
        found.adapters.settle(AdapterReport(order.number, "", 10, 4, bytes(32)))
    for name in folders:
        found.metrics.know("adapter", name)
    return found


def named(body: dict[str, Any], name: str) -> dict[str, Any]:
    return body | {"model": name}


@pytest.mark.parametrize(
    ("path", "body", "chat"),
    [
        ("/v1/chat/completions", named(CHAT, "mine"), True),
        ("/v1/chat/completions", named(CHAT | {"stream": True}, "mine"), True),
        ("/v1/responses", named(INPUT, "mine"), True),
        ("/v1/messages", named(CHAT, "mine"), True),
        ("/v1/completions", {"prompt": f"Hi{END}", "model": "mine"}, False),
        ("/generate", {"inputs": f"Hi{END}", "parameters": PARAMETERS}, False),
        ("/generate_stream", {"inputs": f"Hi{END}", "parameters": PARAMETERS}, False),
        ("/", {"inputs": f"Hi{END}", "parameters": PARAMETERS}, False),
        ("/vertex", {"instances": [named(CHAT, "mine")]}, True),
        (
            "/vertex",
            {"instances": [{"inputs": f"Hi{END}", "parameters": PARAMETERS}]},
            False,
        ),
    ],
)
async def test_a_request_has_the_wording_of_its_adapter(
    engine: FakeEngine, http: Any, path: str, body: dict[str, Any], chat: bool
) -> None:
    async with served(engine, http) as server:
        client = await server.connect()
        answer = await client.post(path, body)
    assert answer.status == 200, answer.text
    assert "world" in answer.text or body.get("stream") or path == "/generate_stream"
    (request,) = engine.submitted
    own = await engine.text_processors.find(engine.adapters.find("mine"))
    end, start = (own.tokenizer.token_id(mark) for mark in (END, START))
    assert request.prompt_ids[-1] == end
    assert bool(request.prompt_ids[0] == start) is chat
    assert request.sampling.ends == (end,) and request.tokenizer is own.tokenizer
    assert request.sampling.adapter == 1 and request.sampling.tokenizer == ""


@pytest.mark.parametrize("name", ["tgi", "plain"])
async def test_others_have_the_model_s(engine: FakeEngine, http: Any, name: str) -> None:
    async with served(engine, http) as server:
        client = await server.connect()
        for _ in range(2):
            assert (await client.post("/v1/chat/completions", named(CHAT, name))).status == 200
    assert engine.prompts == ["<user>Hi\n<assistant>"] * 2
    assert all(each.sampling.ends == () for each in engine.submitted)


async def test_several_in_one_call(engine: FakeEngine, http: Any) -> None:
    """A chat of an adapter, one of none, a text of the adapter, and one of none."""
    texts = [{"inputs": f"Hi{END}", "parameters": p} for p in (PARAMETERS, {"max_new_tokens": 9})]
    instances = [named(CHAT, "mine"), CHAT, *texts]
    async with served(engine, http) as server:
        client = await server.connect()
        answer = await client.post("/vertex", {"instances": instances})
    assert answer.status == 200, answer.text
    assert [bool(each.sampling.ends) for each in engine.submitted] == [True, False, True, False]
    own = await engine.text_processors.find(engine.adapters.find("mine"))
    kept = [each.tokenizer is own.tokenizer for each in engine.submitted]
    assert kept == [True, False, True, False]


async def test_grammars_are_for_the_adapter_s_tokens(engine: FakeEngine, http: Any) -> None:
    checked: list[Path | None] = []

    async def note(grammar: str, tokenizer: Path | None) -> None:
        checked.append(tokenizer)

    engine.validator._check_grammar = note
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    async with served(engine, http) as server:
        client = await server.connect()
        for adapter in ("mine", None):
            parameters = {"adapter_id": adapter, "grammar": GRAMMAR, "max_new_tokens": 20}
            await client.post("/generate", {"inputs": "Hi", "parameters": parameters})
        called = named(CHAT | {"tools": [tool], "tool_choice": "required"}, "mine")
        await client.post("/v1/chat/completions", called)
    file = engine.adapters.find("mine").folder / "tokenizer.json"
    assert checked[:2] == [file, None] and set(checked[2:]) == {file}
    assert [each.sampling.tokenizer for each in engine.submitted] == [str(file), "", str(file)]


async def test_gaps_are_filled_by_an_adapter_that_has_tokens_for_them(
    engine: FakeEngine, http: Any
) -> None:
    body = {"prompt": "a", "suffix": "b"}
    async with served(engine, http) as server:
        client = await server.connect()
        assert (await client.post("/v1/completions", named(body, "tgi"))).status == 422
        assert (await client.post("/v1/completions", named(body, "mine"))).status == 200
        fim = await client.post("/v1/fim/completions", named(body, "mine"))
    assert fim.status == 200, fim.text
    own = (await engine.text_processors.find(engine.adapters.find("mine"))).tokenizer
    marks = [own.token_id(mark) for mark in GAP_MARKS]
    for request in engine.submitted:
        assert set(marks[:3]) <= set(request.prompt_ids.tolist())
        assert request.stopping.stop_ids >= set(marks)


async def test_files_that_cannot_be_read_any_more_are_told(engine: FakeEngine, http: Any) -> None:
    (engine.adapters.find("mine").folder / "tokenizer.json").write_text("{}")
    async with served(engine, http) as server:
        client = await server.connect()
        answer = await client.post("/v1/chat/completions", named(CHAT, "mine"))
        assert answer.status == 503 and "the adapter `mine` cannot be read now" in answer.text
        assert (await client.post("/v1/chat/completions", CHAT)).status == 200
    assert not engine.permits


async def test_pages_tell_of_the_adapter_that_is_named(engine: FakeEngine, http: Any) -> None:
    own = await engine.text_processors.find(engine.adapters.find("mine"))
    end = own.tokenizer.token_id(END)
    async with served(engine, http) as server:
        client = await server.connect()
        mine = await client.get("/tokenizer_info?model=mine")
        others = [await client.get(f"/tokenizer_info{q}") for q in ("", "?model=plain", "?x=1")]
        thoughts = (await client.get("/info")).json()["reasoning"]
        info = await client.get("/info?model=mine")
    assert mine.json()["chat_template"] == TEMPLATE and mine.json()["own_ends"] == [end]
    assert mine.json()["eos_token"] == END
    assert others[0].json() == others[1].json() == others[2].json()
    assert others[0].json()["chat_template"] != TEMPLATE and others[0].json()["own_ends"] == []
    assert info.status == 200 and info.json()["reasoning"] == thoughts is None


async def test_thoughts_are_those_of_the_adapter(
    engine: FakeEngine, http: Any, tmp_path: Path
) -> None:
    config = json.loads((tmp_path / "mine/tokenizer_config.json").read_text())
    config["chat_template"] += "{% if add_generation_prompt %}<think>\n{% endif %}</think>"
    (tmp_path / "mine/tokenizer_config.json").write_text(json.dumps(config))
    async with served(engine, http) as server:
        client = await server.connect()
        mine = (await client.get("/info?model=mine")).json()
        base = (await client.get("/info")).json()
    assert mine["reasoning"]["start"] == "<think>" and base["reasoning"] is None
    assert mine | {"reasoning": None} == base


@pytest.mark.parametrize("path", ["/info", "/tokenizer_info"])
async def test_pages_refuse_whom_they_do_not_know(engine: FakeEngine, http: Any, path: str) -> None:
    async with served(engine, http) as server:
        client = await server.connect()
        unknown = await client.get(f"{path}?model=yours")
        twice = await client.get(f"{path}?model=mine&model=plain")
        (engine.adapters.find("mine").folder / "tokenizer.json").write_text("{}")
        broken = await client.get(f"{path}?model=mine")
    assert unknown.status == 404 and "`mine`" in unknown.text
    assert twice.status == 400 and "more than once" in twice.text
    assert broken.status == 503 and "the adapter `mine` cannot be read now" in broken.text
