"""Adapters with tokenizers, chat templates and ends of their own, against transformers with PEFT.

What is asked of an adapter is rendered, tokenised, ended and decoded as the tokenizer in its folder
does it, beside requests of others.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.system.adapter_support import write
from tests.system.client import get, post
from tests.system.own_tokenizers import (
    MARKS,
    base_with_spare_rows,
    write_ended,
    write_generation_ends,
    write_marked,
    write_templated,
)
from tests.system.server import ServerProcess, serving

pytestmark = pytest.mark.system

KEY = "secret"
NEW = 40  # tokens of an answer at most
MODEL_ENDS = (5, 0)
QUESTIONS = ("Hello", "Who lives in the harbour?", "Tell me of the sea.")
NAMES = ("plain", "templated", "ended", "marked", "generation")
TEXT = f"{MARKS[0]}user\nWhat is it?{MARKS[1]}\n{MARKS[0]}assistant\n"

Said: TypeAlias = tuple[list[int], list[int], str]  # prompt, answer, its text


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return base_with_spare_rows(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def folders(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    plain = write(root / "plain", 2)
    write_templated(root / "templated", base, 3)
    write_ended(root / "ended", base, 4)
    write_marked(root / "marked", base, 12, 2.0)
    write_marked(root / "other", base, 13, 3.0)
    write_generation_ends(root / "generation", plain, [5, *own_ends(base)])
    return root


def own_ends(base: Path) -> list[int]:
    """The ids of tokens that no answer can do without."""
    vocabulary = json.loads((base / "tokenizer.json").read_text())["model"]["vocab"]
    return [vocabulary[text] for text in (",", ".", "Ġthe", "Ġa", "Ġis", "Ġand")]


@pytest.fixture(scope="module")
def said(base: Path, folders: Path) -> Mapping[tuple[str, str], Said]:
    """What transformers says of each adapter and each question, in a chat."""
    peft = pytest.importorskip("peft", reason="PEFT is the oracle; it is in the test extra")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    found: dict[tuple[str, str], Said] = {}
    for name in ("", *NAMES, "other"):
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        own = name and (folders / name / "tokenizer.json").exists()
        tokenizer = AutoTokenizer.from_pretrained(folders / name if own else base)
        if name:
            model = peft.PeftModel.from_pretrained(model, folders / name).eval()
        ends = {*MODEL_ENDS, tokenizer.eos_token_id}
        ends |= set(own_ends(base)) if name == "generation" else set()
        for question in (*QUESTIONS, TEXT):
            chat = [{"role": "user", "content": question}]
            ids = list(
                tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            )
            if question == TEXT:
                ids = list(tokenizer(TEXT).input_ids)
            answer = continued(model, ids, ends)
            text = str(tokenizer.decode(answer, skip_special_tokens=True))
            found[name, question] = ids, answer, text
    return found


def continued(model: Any, ids: list[int], ends: set[int]) -> list[int]:
    import torch

    answer: list[int] = []
    with torch.no_grad():
        while len(answer) < NEW and not (answer and answer[-1] in ends):
            logits = model(input_ids=torch.tensor([[*ids, *answer]])).logits
            answer.append(int(logits[0, -1].argmax()))
    return answer


@pytest.fixture(scope="module")
def server(base: Path, folders: Path) -> Iterator[ServerProcess]:
    """Two of five adapters fit into memory; one comes by a route. Drafts are made ahead."""
    flags = ["--model-id", str(base), "--dtype", "float32", "--lora-adapters"]
    flags += [",".join(f"{name}={folders / name}" for name in NAMES)]
    flags += ["--max-loaded-adapters", "2", "--api-key", KEY, "--speculate", "2"]
    flags += ["--adapter-updates", "--adapter-folder", str(folders)]
    with serving(*flags) as running:
        yield running


def asked(server: ServerProcess, path: str, body: Mapping[str, Any]) -> Any:
    return post(f"{server.url}{path}", json=body, headers={"authorization": f"Bearer {KEY}"})


def chat(server: ServerProcess, name: str, question: str, **more: Any) -> Any:
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0}
    body |= {"max_tokens": NEW, "return_token_ids": True, "model": name or "tgi", **more}
    answer = asked(server, "/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_chats_of_all_adapters_and_of_none(
    server: ServerProcess, said: Mapping[tuple[str, str], Said]
) -> None:
    """At once, more than fit: what is rendered, generated, where it ends, and what is shown."""
    every = [(name, question) for question in QUESTIONS for name in ("", *NAMES)] * 2
    with ThreadPoolExecutor(9) as pool:
        answers = list(pool.map(lambda each: chat(server, *each), every))
    ended: set[str] = set()
    for each, answer in zip(every, answers, strict=True):
        (choice,) = answer["choices"]
        ids, tokens, text = said[each]
        assert answer["prompt_token_ids"] == ids, each
        assert choice["token_ids"] == tokens, each
        assert choice["message"]["content"] == text, each
        stops = len(tokens) < NEW or tokens[-1] in MODEL_ENDS
        assert choice["finish_reason"] == ("stop" if stops else "length"), each
        if stops and tokens[-1] not in MODEL_ENDS:
            ended.add(each[0])
    assert ended >= {"ended", "marked", "generation"}  # else nothing has been tried out
    prompts = {tuple(said[name, QUESTIONS[0]][0]) for name in ("", "templated", "marked")}
    assert len(prompts) == 3


def test_one_that_comes_and_goes_by_a_route(
    server: ServerProcess, said: Mapping[tuple[str, str], Said]
) -> None:
    for name in ("new", "newer"):
        body = {"lora_name": name, "lora_path": "other"}
        loaded = asked(server, "/v1/load_lora_adapter", body)
        assert loaded.status_code == 200, loaded.text
        for question in QUESTIONS:
            found = chat(server, name, question)
            assert found["choices"][0]["token_ids"] == said["other", question][1]
        assert asked(server, "/v1/unload_lora_adapter", {"lora_name": name}).status_code == 200


def test_texts_and_tokens_in_every_api(
    server: ServerProcess, said: Mapping[tuple[str, str], Said]
) -> None:
    ids, tokens, _ = said["marked", QUESTIONS[1]]
    start, end = MARKS
    prompt = f"{start}user\n{QUESTIONS[1]}{end}\n{start}assistant\n"
    for name in ("", "marked"):
        parameters = {"adapter_id": name or None, "max_new_tokens": NEW, "details": True}
        native = asked(server, "/generate", {"inputs": TEXT, "parameters": parameters}).json()
        _, written, text = said[name, TEXT]
        assert [token["id"] for token in native["details"]["tokens"]] == written
        assert native["generated_text"] == text
    body = {"model": "marked", "prompt": ids, "temperature": 0, "max_tokens": NEW}
    completed = asked(server, "/v1/completions", body | {"return_token_ids": True}).json()
    assert completed["choices"][0]["token_ids"] == tokens
    chat_body = {"messages": [{"role": "user", "content": QUESTIONS[1]}], "max_tokens": NEW}
    message = asked(server, "/v1/messages", chat_body | {"model": "marked", "temperature": 0})
    assert message.json()["stop_reason"] == "end_turn"
    assert message.json()["usage"]["input_tokens"] == len(ids)
    own = asked(
        server, "/tokenize", {"model": "marked", "prompt": end, "add_special_tokens": False}
    )
    plain = asked(server, "/tokenize", {"model": "tgi", "prompt": end, "add_special_tokens": False})
    assert own.json()["tokens"] == tokens[-1:] and plain.json()["count"] > 3
    simple = asked(server, "/tokenize", {"inputs": end, "parameters": {"adapter_id": "marked"}})
    assert simple.json()[-1]["id"] == tokens[-1]
    back = asked(server, "/detokenize", {"model": "marked", "tokens": tokens[-1:]})
    assert back.json()["prompt"] == end
    shown = asked(server, "/chat_tokenize", chat_body | {"model": "marked"}).json()
    assert shown["templated_text"] == prompt


def test_what_else_a_request_may_ask(
    server: ServerProcess, said: Mapping[tuple[str, str], Said]
) -> None:
    """Minimum, no end, bias, stop strings and grammars, each with the adapter's own tokens."""
    question = QUESTIONS[1]
    _, tokens, _ = said["marked", question]
    end = tokens[-1]
    assert end >= 2054 and len(tokens) < 10
    longer = chat(server, "marked", question, min_tokens=12)["choices"][0]["token_ids"]
    assert len(longer) >= 12 and end not in longer[:12]
    on = chat(server, "marked", question, ignore_eos=True)["choices"][0]
    assert on["token_ids"][: len(tokens)] == tokens and len(on["token_ids"]) == NEW
    without = chat(server, "marked", question, logit_bias={str(end): -100})["choices"][0]
    assert end not in without["token_ids"]
    named = chat(server, "marked", question, stop=[MARKS[1]], ignore_eos=True)["choices"][0]
    assert named["token_ids"] == tokens and named["finish_reason"] == "stop"
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": {"a": 1}}}}
    forced = chat(server, "marked", question, response_format=form)["choices"][0]
    assert json.loads(forced["message"]["content"]) == {"a": 1}
    grammar = {"type": "regex", "value": "yes|no"}
    parameters = {"adapter_id": "marked", "grammar": grammar, "details": True}
    short = asked(server, "/generate", {"inputs": "Yes?", "parameters": parameters}).json()
    assert short["generated_text"] in ("yes", "no")
    assert short["details"]["tokens"][-1]["id"] in (*MODEL_ENDS, end)
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    called = chat(server, "marked", question, tools=[tool], tool_choice="required", max_tokens=200)
    assert called["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "look"
    streamed = asked(
        server,
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": "P"},
            ],
            "model": "marked",
            "continue_final_message": True,
            "add_generation_prompt": False,
            "temperature": 0,
            "max_tokens": NEW,
            "return_token_ids": True,
        },
    ).json()
    assert streamed["choices"][0]["token_ids"] == tokens[1:]  # it had said P


def test_the_model_s_tokenizer_for_all(
    base: Path, folders: Path, said: Mapping[tuple[str, str], Said]
) -> None:
    named = ",".join(f"{name}={folders / name}" for name in ("templated", "marked"))
    flags = ["--model-id", str(base), "--dtype", "float32", "--lora-adapters", named]
    with serving(*flags, "--adapter-tokenizers", "base") as running:
        for name in ("templated", "marked"):
            found = chat(running, name, QUESTIONS[0])
            assert found["prompt_token_ids"] == said["", QUESTIONS[0]][0]
        assert get(f"{running.url}/info").json()["settings"]["adapter_tokenizers"] == "base"


@pytest.mark.parametrize("whose", ["own", "base"])
def test_merged_into_the_model(
    base: Path, folders: Path, said: Mapping[tuple[str, str], Said], tmp_path: Path, whose: str
) -> None:
    """Served alone, an adapter is asked and ends as beside others."""
    adapter = shutil.copytree(folders / "marked", tmp_path / "marked")
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(base)
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    flags = ["--model-id", str(adapter), "--dtype", "float32", "--adapter-tokenizers", whose]
    with serving(*flags) as running:
        found = chat(running, "", QUESTIONS[0])
        ids, tokens, text = said["marked" if whose == "own" else "", QUESTIONS[0]]
        assert found["prompt_token_ids"] == ids
        assert "--adapter-tokenizers has no effect" not in running.output
        if whose == "base":
            return
        (choice,) = found["choices"]
        assert (choice["token_ids"], choice["message"]["content"]) == (tokens, text)
        assert choice["finish_reason"] == ("length" if len(tokens) == NEW else "stop")


@pytest.fixture
def refused(server: ServerProcess, folders: Path) -> Callable[[str], str]:
    def load(place: str) -> str:
        answer = asked(server, "/v1/load_lora_adapter", {"lora_name": "x", "lora_path": place})
        assert answer.status_code == 400, answer.text
        return str(answer.json()["error"]["message"])

    return load


def test_what_is_not_served(
    server: ServerProcess, folders: Path, refused: Callable[[str], str]
) -> None:
    def copy(name: str) -> Path:
        return shutil.copytree(folders / "marked", folders / name)

    beyond = copy("beyond") / "tokenizer.json"
    whole = json.loads(beyond.read_text())
    whole["added_tokens"] += [
        {**whole["added_tokens"][-1], "id": 2056 + i, "content": f"<|own{i}|>"} for i in range(30)
    ]
    beyond.write_text(json.dumps(whole))
    assert "`<|own16|>`" in refused("beyond") and "--adapter-tokenizers base" in refused("beyond")
    words = copy("words") / "tokenizer.json"
    whole = json.loads(words.read_text())
    vocabulary = whole["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    words.write_text(json.dumps(whole))
    assert "another vocabulary than the model's" in refused("words")
    (copy("template") / "chat_template.jinja").write_text("{% if %}")
    assert "does not compile" in refused("template")
    link = copy("link") / "chat_template.jinja"
    link.unlink()
    link.symlink_to("/etc/hostname")
    assert "'chat_template.jinja' of 'link' lies outside" in refused("link")
    (copy("ends") / "generation_config.json").write_text('{"eos_token_id": 99999}')
    assert "has `eos_token_id` 99999; the model has 2072 tokens" in refused("ends")
