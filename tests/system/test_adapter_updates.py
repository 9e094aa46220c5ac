"""Adapters that come, go and change while a server runs: the embedded model's, on one rank."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.system.adapter_support import write
from tests.system.client import decode, get, post, post_stream
from tests.system.hostile_adapters import CONFIG, HOSTILE, WEIGHTS
from tests.system.server import ServerProcess, serving

pytestmark = pytest.mark.system

HEADERS = {"authorization": "Bearer secret"}
PROMPT = "The old harbour"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("served") / "adapters"
    write(root / "good", 0)
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[ServerProcess]:
    flags = ["--adapter-updates", "--adapter-folder", str(root), "--api-key", "secret"]
    with serving(*flags, "--max-lora-rank", "8", "--max-loaded-adapters", "2") as running:
        yield running


def load(server: ServerProcess, name: str, path: str) -> Any:
    body = {"lora_name": name, "lora_path": path}
    return post(f"{server.url}/v1/load_lora_adapter", json=body, headers=HEADERS)


def said(server: ServerProcess, adapter: str | None = None) -> str:
    parameters = {"max_new_tokens": 8, "adapter_id": adapter}
    body = {"inputs": PROMPT, "parameters": parameters}
    answer = post(f"{server.url}/generate", json=body, headers=HEADERS)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["generated_text"])


def test_each_is_refused_by_name_and_the_server_goes_on(server: ServerProcess, root: Path) -> None:
    """One running server; the good adapter says the same before and after."""
    assert load(server, "good", "good").status_code == 200
    pids, before = server.shards(), (said(server), said(server, "good"))
    assert before[0] != before[1]
    wrong: dict[str, str] = {}
    for number, (what, (harm, named)) in enumerate(HOSTILE.items()):
        folder = Path(shutil.copytree(root / "good", root / f"hostile{number}"))
        harm(folder)
        answer = load(server, "bad", folder.name)
        text = answer.json()["error"]["message"] if answer.status_code == 400 else answer.text
        if named not in text:
            wrong[what] = text
    assert not wrong
    large = write(root / "large", 1, rank=9)
    text = load(server, "bad", large.name).text
    assert "has the rank 9; at most 8 is served (--max-lora-rank)" in text
    (root / "link").symlink_to(write(root.parent / "elsewhere", 2))
    for outside in ("..", "../elsewhere", "/etc", "link", "no\0name", "x" * 5000, "good/" + CONFIG):
        assert "There is no folder" in load(server, "bad", outside).text
    for name in ("x" * 300, "a\nb"):
        assert "'lora_name' must be printable" in load(server, name, "good").text
    assert (said(server), said(server, "good")) == before
    assert server.shards() == pids
    assert "tgi_adapters_loaded 1" in get(f"{server.url}/metrics").text
    names = [each["id"] for each in get(f"{server.url}/v1/models", headers=HEADERS).json()["data"]]
    assert names[-1] == "good" and "bad" not in names


@pytest.mark.parametrize("what", ["no b", "nan"])
def test_at_the_start(root: Path, what: str) -> None:
    """What a header says, before a shard is spawned; a number, by the shard, before it serves."""
    harm, named = HOSTILE[what]
    folder = Path(shutil.copytree(root / "good", root / f"start-{what[:2]}"))
    harm(folder)
    with serving("--lora-adapters", f"bad={folder}", ready=False) as server:
        assert server.wait() == 1
        assert named in server.output
        assert ("shard group: spawned" in server.output) == (what == "nan")


def unload(server: ServerProcess, name: str) -> Any:
    body = {"lora_name": name}
    return post(f"{server.url}/v1/unload_lora_adapter", json=body, headers=HEADERS)


def stream(server: ServerProcess, adapter: str, count: int) -> Iterator[dict[str, Any]]:
    """Yield the events of a generation of so many tokens."""
    parameters = {"max_new_tokens": count, "min_new_tokens": count, "adapter_id": adapter}
    body = {"inputs": PROMPT, "parameters": parameters}
    url = f"{server.url}/generate_stream"
    with post_stream(url, json=body, headers=HEADERS) as answer:
        for line in answer.iter_lines():
            if (event := decode(line)) is not None:
                yield event


def test_unloaded_while_it_streams(server: ServerProcess, root: Path) -> None:
    """The stream ends as ever; then nothing is left of the adapter, nor of its prefixes."""
    write(root / "leaving", 5)
    load(server, "leaving", "leaving")
    alone = [event["token"]["id"] for event in stream(server, "leaving", 100)]
    server.wait_idle()
    kept = server.metric("tgi_prefix_cache_blocks")
    events = stream(server, "leaving", 100)
    found = [next(events)["token"]["id"]]
    assert unload(server, "leaving").status_code == 200
    body = {"inputs": PROMPT, "parameters": {"adapter_id": "leaving"}}
    assert post(f"{server.url}/generate", json=body, headers=HEADERS).status_code == 422
    found += [event["token"]["id"] for event in events]
    assert found == alone
    server.wait_idle()
    assert server.metric("tgi_prefix_cache_blocks") < kept
    assert 'adapter="leaving"' not in get(f"{server.url}/metrics").text


def test_files_that_changed_while_the_shard_was_gone(server: ServerProcess, root: Path) -> None:
    """Its successor goes on with an adapter whose files are the same, and with no other."""
    load(server, "good", "good")  # unless another test has
    for seed, name in enumerate(("same", "other"), start=10):
        write(root / name, seed)
        assert load(server, name, name).status_code == 200
    whole = [event["token"]["id"] for event in stream(server, "same", 600)]
    (shard,) = server.shards()
    with ThreadPoolExecutor(2) as pool:
        while True:
            events = [stream(server, name, 600) for name in ("same", "other")]
            first = [next(each) for each in events]
            os.kill(shard, signal.SIGSTOP)
            accepted, ended = server.books()
            if accepted == ended + 2:
                break
            os.kill(shard, signal.SIGCONT)  # one has ended meanwhile: once more
            assert all([*each] for each in events)
        shutil.copy(root / "good" / WEIGHTS, root / "other" / WEIGHTS)
        os.kill(shard, signal.SIGKILL)
        same, other = pool.map(lambda each: [*each], events)
    assert [first[0]["token"]["id"], *(event["token"]["id"] for event in same)] == whole
    assert "are not those that were loaded before" in other[-1]["error"]
    assert "error" not in same[-1] and len(other) < 600
    parameters = {"adapter_id": "other"}
    body = {"inputs": PROMPT, "parameters": parameters}
    refused = post(f"{server.url}/generate", json=body, headers=HEADERS)
    assert refused.status_code == 503 and "log names" in refused.text
    assert "in another voice" in server.output
    again = {"lora_name": "other", "lora_path": "other", "load_inplace": True}
    answer = post(f"{server.url}/v1/load_lora_adapter", json=again, headers=HEADERS)
    assert answer.status_code == 200
    assert said(server, "other") == said(server, "good")
    for name in ("same", "other"):
        unload(server, name)


def test_several_prompts_of_one_call(server: ServerProcess, root: Path) -> None:
    """Completions of two prompts with two answers each, Vertex's instances, and both at once."""
    load(server, "good", "good")
    said_so = said(server, "good")
    body = {"model": "good", "prompt": [PROMPT, PROMPT], "n": 2, "max_tokens": 8, "temperature": 0}
    answer = post(f"{server.url}/v1/completions", json=body, headers=HEADERS).json()
    assert [choice["text"] for choice in answer["choices"]] == [said_so] * 4
    parameters = {"adapter_id": "good", "max_new_tokens": 2}
    one = {"inputs": PROMPT, "parameters": parameters}
    chat = {"messages": [{"role": "user", "content": "x"}], "model": "good", "max_tokens": 2}
    plain = {"inputs": PROMPT, "parameters": {"max_new_tokens": 2}}
    vertex = f"{server.url}/vertex"
    sent = post(vertex, json={"instances": [one, chat, plain]}, headers=HEADERS)
    assert sent.status_code == 200 and len(sent.json()["predictions"]) == 3
    write(root / "second", 3)
    load(server, "second", "second")
    two = {"inputs": PROMPT, "parameters": parameters | {"adapter_id": "second"}}
    refused = post(vertex, json={"instances": [one, two]}, headers=HEADERS)
    assert refused.status_code == 422
    assert "same adapter, or none. Given: `good` and `second`" in refused.text
    unload(server, "second")
