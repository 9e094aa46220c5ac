"""Adapters of the embedded model as a server serves them, against the model with each merged in."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from tests.system.adapter_support import in_float32, write
from tests.system.client import get, post
from tests.system.golden import reference
from tests.system.server import ServerProcess, serving
from tgi_trio.conversion.lora import merge_adapter

pytestmark = pytest.mark.system

KEY = "secret"
PROMPTS = ("The old harbour", "In the morning", "Nobody knew why", "The old harbour was")
NAMES = ("first", "second", "third")
NEW = 12  # tokens of an answer


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return in_float32(tmp_path_factory.mktemp("base") / "model")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(NAMES):
        write(root / name, seed)
    return root


@pytest.fixture(scope="module", params=["one rank", "two ranks"])
def server(request: pytest.FixtureRequest, base: Path, folders: Path) -> Iterator[ServerProcess]:
    """Two of three fit into memory; one comes by a route."""
    flags = ["--model-id", str(base), "--lora-adapters"]
    flags += [",".join(f"{name}={folders / name}" for name in NAMES[:2])]
    flags += ["--max-loaded-adapters", "2", "--api-key", KEY, "--dtype", "float32"]
    flags += ["--adapter-updates", "--adapter-folder", str(folders)]
    if request.param == "two ranks":
        flags += ["--num-shard", "2"]
    with serving(*flags) as running:
        yield running


def ask(server: ServerProcess, prompt: str, adapter: str | None = None, **more: Any) -> Any:
    parameters = {"max_new_tokens": NEW, "adapter_id": adapter, **more}
    body = {"inputs": prompt, "parameters": parameters}
    return post(f"{server.url}/generate", json=body, headers={"authorization": f"Bearer {KEY}"})


def text(server: ServerProcess, prompt: str, adapter: str | None = None) -> str:
    return str(ask(server, prompt, adapter).json()["generated_text"])


@pytest.fixture(scope="module")
def expected(
    base: Path, folders: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], str]:
    """What transformers says with each adapter merged into the model, and without any."""
    said: dict[tuple[str, str], str] = {}
    tokenizer = tokenizers.Tokenizer.from_file(str(base / "tokenizer.json"))
    ids = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    for name in ("", *NAMES):
        model = base
        if name:
            model = tmp_path_factory.mktemp("merged") / name
            merge_adapter(folders / name, base, model, lambda line: None)
        answers = map(tokenizer.decode, reference(model, ids, NEW))
        said |= {(name, prompt): each for prompt, each in zip(PROMPTS, answers, strict=True)}
    return said


def post_key(server: ServerProcess, path: str, body: Any) -> Any:
    return post(f"{server.url}{path}", json=body, headers={"authorization": f"Bearer {KEY}"})


def test_rows_of_all_adapters_and_of_none(
    server: ServerProcess, expected: dict[tuple[str, str], str]
) -> None:
    """At once, again and again, more adapters than fit; and no prefix is another's."""
    loaded = post_key(server, "/v1/load_lora_adapter", {"lora_name": "third", "lora_path": "third"})
    assert loaded.text == "Success: LoRA adapter 'third' added successfully."
    asked = [(name, prompt) for prompt in PROMPTS for name in ("", *NAMES)] * 2
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda each: text(server, each[1], each[0] or None), asked))
    assert found == [expected[each] for each in asked]
    assert len({expected[name, PROMPTS[0]] for name in ("", *NAMES)}) == 4
    metrics = get(f"{server.url}/metrics").text
    assert "tgi_adapters_loaded 2" in metrics
    assert f'tgi_adapter_request_count{{adapter="first"}} {2 * len(PROMPTS)}' in metrics
    gone = post_key(server, "/v1/unload_lora_adapter", {"lora_name": "third"})
    assert gone.text == "Success: LoRA adapter 'third' removed successfully."
    refused = ask(server, PROMPTS[0], "third")
    assert refused.status_code == 422
    assert "Adapters served: `first`, `second`" in refused.text


def test_names_in_every_api(server: ServerProcess, expected: dict[tuple[str, str], str]) -> None:
    said = expected["second", PROMPTS[0]]
    body = {"model": "second", "prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0}
    answer = post_key(server, "/v1/completions", body).json()
    assert answer["choices"][0]["text"] == said
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
    answers = {
        name: post_key(server, "/v1/chat/completions", chat | {"model": name}).json()
        for name in ("tgi", "first", "second")
    }
    assert answers["second"]["model"] == "second"
    assert len({str(each["choices"][0]["message"]["content"]) for each in answers.values()}) > 1
    messages = post_key(server, "/v1/messages", chat | {"model": "first"}).json()
    assert messages["model"] == "first"
    words = answers["first"]["choices"][0]["message"]["content"]
    assert messages["content"][0]["text"] == words
    responses = {"model": "first", "input": "Hello", "max_output_tokens": 16, "temperature": 0}
    responded = post_key(server, "/v1/responses", responses).json()
    assert responded["output"][0]["content"][0]["text"].startswith(words)
    unknown = post_key(server, "/v1/chat/completions", chat | {"model": "fourth"})
    assert unknown.status_code == 404 and "`first`, `second`" in unknown.text
    models = {each["id"]: each for each in get(f"{server.url}/v1/models").json()["data"]}
    base = next(iter(models))
    assert models["first"]["parent"] == base and models[base]["parent"] is None
    assert get(f"{server.url}/info").json()["adapters"] == ["first", "second"]
    assert "adapter_folder" not in get(f"{server.url}/info").json()["settings"]


def test_what_is_not_loaded(server: ServerProcess, folders: Path) -> None:
    def load(**body: Any) -> tuple[int, str]:
        answer = post_key(server, "/v1/load_lora_adapter", body)
        return answer.status_code, answer.text

    assert load(lora_name="x")[0] == 400
    assert "has already been loaded" in load(lora_name="first", lora_path="first")[1]
    for outside in ("..", "/etc", "../../etc"):
        assert "no folder" in load(lora_name="x", lora_path=outside)[1]
    broken = shutil.copytree(folders / "first", folders / "broken", dirs_exist_ok=True)
    (broken / "adapter_config.json").write_text('{"peft_type": "LORA", "use_dora": true}')
    assert "no lora_magnitude_vector of" in load(lora_name="x", lora_path="broken")[1]
    assert post_key(server, "/v1/unload_lora_adapter", {"lora_name": "x"}).status_code == 404
    open_door = post(f"{server.url}/v1/load_lora_adapter", json={"lora_name": "x"})
    assert open_door.status_code == 401


def test_a_shard_that_dies(server: ServerProcess, expected: dict[tuple[str, str], str]) -> None:
    """Its successor has the adapters again; who streams notices nothing but a pause."""
    with ThreadPoolExecutor(8) as pool:
        asked = [(name, prompt) for prompt in PROMPTS for name in ("first", "second")]
        waiting = [pool.submit(text, server, prompt, name) for name, prompt in asked]
        os.kill(server.shards()[0], signal.SIGKILL)
        assert [each.result() for each in waiting] == [expected[each] for each in asked]
