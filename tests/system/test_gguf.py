"""A server on a GGUF file alone: config, tokenizer, chat template and weights come from it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.gguf_files import write_llama
from tests.system.client import TIMEOUT, generate
from tests.system.golden import reference, tokenize
from tests.system.server import ServerProcess, alive, serving
from tgi_trio.demo import model_path

pytestmark = pytest.mark.system

PROMPTS = ["What is a KV cache?", "A nursery", "def main(argv):\n    return 0"]
NEW = 24


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[ServerProcess]:
    file = write_llama(model_path(), home / "embedded.gguf")
    with serving("--model-id", str(file), env={"XDG_CACHE_HOME": str(home)}) as running:
        yield running


def test_tokens_are_those_of_the_source(server: ServerProcess, demo: ServerProcess) -> None:
    ids = [tokenize(server, prompt) for prompt in PROMPTS]
    assert [tokenize(demo, prompt) for prompt in PROMPTS] == ids
    expected = reference(model_path(), ids, NEW)
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        body = {"inputs": prompt, "parameters": {"max_new_tokens": NEW, "details": True}}
        reply = httpx.post(f"{server.url}/generate", json=body, timeout=TIMEOUT).json()
        found = [token["id"] for token in reply["details"]["tokens"]]
        assert found and found == tokens[: len(found)]
        assert len(found) == NEW or reply["details"]["finish_reason"] == "eos_token"


def test_a_chat_uses_the_template_of_the_file(server: ServerProcess) -> None:
    body = {"model": "tgi", "messages": [{"role": "user", "content": "What is a KV cache?"}]}
    url = f"{server.url}/v1/chat/completions"
    reply = httpx.post(url, json=body | {"max_tokens": 20, "temperature": 0}, timeout=TIMEOUT)
    tokens = httpx.post(f"{server.url}/chat_tokenize", json=body, timeout=TIMEOUT).json()
    assert reply.json()["choices"][0]["message"]["content"]
    assert tokens["templated_text"] == "<|begin|><|user|>What is a KV cache?<|end|><|assistant|>"


def test_grammars_are_compiled_for_its_tokenizer(server: ServerProcess) -> None:
    grammar = {"type": "regex", "value": "[0-9]{3}-[0-9]{3}"}
    body = {"inputs": "Call", "parameters": {"max_new_tokens": 20, "grammar": grammar}}
    reply = httpx.post(f"{server.url}/generate", json=body, timeout=TIMEOUT).json()
    first, _, second = reply["generated_text"].partition("-")
    assert len(first) == len(second) == 3 and (first + second).isdigit()


def test_a_replaced_shard_reads_the_same_file(server: ServerProcess) -> None:
    before = generate(server.url, PROMPTS[0], max_new_tokens=NEW)
    (shard,) = server.shards()
    os.kill(shard, signal.SIGKILL)
    assert generate(server.url, PROMPTS[0], max_new_tokens=NEW) == before
    assert not alive(shard)


def test_two_ranks_answer_alike(server: ServerProcess, home: Path) -> None:
    expected = generate(server.url, PROMPTS[0], max_new_tokens=NEW)
    flags = ("--model-id", str(home / "embedded.gguf"), "--num-shard", "2")
    with serving(*flags, env={"XDG_CACHE_HOME": str(home)}) as split:
        assert generate(split.url, PROMPTS[0], max_new_tokens=NEW) == expected
    assert len(list((home / "tgi_trio" / "gguf").iterdir())) == 1  # made once


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"GGUF" + bytes(10), "cannot be read as GGUF"), (b"GGUF\3\0\0\0" + b"\xff" * 99, "tensors")],
)
def test_a_hostile_file_is_refused_before_a_shard_starts(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    file = tmp_path / "hostile.gguf"
    file.write_bytes(content)
    with serving("--model-id", str(file), ready=False) as refused:
        assert refused.wait() != 0
        assert "hostile.gguf" in refused.output and reason in refused.output
        assert "Traceback" not in refused.output and not refused.shards()


def test_a_quantised_file_refuses_a_flag_that_contradicts_it(tmp_path: Path) -> None:
    file = write_llama(model_path(), tmp_path / "small.gguf", quantised=True)
    flags = ("--model-id", str(file), "--quantize", "eetq", "--json-output")
    with serving(*flags, ready=False, env={"XDG_CACHE_HOME": str(tmp_path)}) as refused:
        assert refused.wait() != 0
        lines = [json.loads(line) for line in refused.output.splitlines() if line.startswith("{")]
    assert any("--quantize eetq contradicts small.gguf" in str(line) for line in lines)
