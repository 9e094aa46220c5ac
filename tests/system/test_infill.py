"""Gaps filled by a whole server whose model is computed, as editors ask for them with curl."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from tests.router.http.fake_engine import GAP_MARKS
from tests.support.gguf_files import write_llama
from tests.system.client import get, post
from tests.system.server import ServerProcess, serving
from tgi_trio.demo import model_path

pytestmark = pytest.mark.system

FILES: Final = [{"text": "a = 1\n" * 40, "filename": "one.py"}]
AROUND: Final[dict[str, Any]] = {
    "input_prefix": "Once upon a time there was",
    "input_suffix": "\n",
    "input_extra": FILES,
    "prompt": " a",
    "n_predict": 24,
}
JUDGED: Final = ["top_k", "top_p", "infill"]


def make_model(folder: Path) -> Path:
    """Write the embedded model with tokens for gaps, of which it knows nothing."""
    source = model_path()
    shutil.copytree(source, folder, ignore=lambda *_: ["model.safetensors"])
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    marks = [*GAP_MARKS, "<|repo_name|>"]
    tokenizer.add_special_tokens([AddedToken(each, normalized=False) for each in marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": size}))
    tensors = load_file(source / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    more = embedding.new_zeros((size - len(embedding), embedding.shape[1]))
    tensors["model.embed_tokens.weight"] = torch.cat((embedding, more))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def filling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server on a GGUF file, as users of llama.cpp have it."""
    home = tmp_path_factory.mktemp("filling")
    file = write_llama(make_model(home / "model"), home / "filling.gguf")
    with serving("--model-id", str(file), env={"XDG_CACHE_HOME": str(home)}) as server:
        yield server


def ask(server: ServerProcess, **body: Any) -> dict[str, Any]:
    answer = post(f"{server.url}/infill", json={**AROUND, **body})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def test_a_doubtful_token_ends_the_likeliest_text(filling: ServerProcess) -> None:
    """The likeliest of what is left is the likeliest of all, until nothing is left."""
    plain = ask(filling, samplers=["top_k", "temperature"], temperature=0)
    judged = ask(filling, samplers=[*JUDGED, "temperature"], temperature=0)
    assert plain["content"].startswith(judged["content"])
    assert judged["content"] != plain["content"] and judged["stop_type"] == "eos"
    # And it is what any other route says of the same gap.
    body = {"prompt": "Once upon a time there was a", "suffix": "\n", "input_extra": FILES}
    sent = {**body, "max_tokens": 24, "temperature": 0}
    other = post(f"{filling.url}/v1/completions", json=sent)
    assert other.json()["choices"][0]["text"] == plain["content"]


def test_a_seed_says_which_text_is_drawn(filling: ServerProcess) -> None:
    asked = {"samplers": JUDGED, "top_p": 0.99}
    first = [ask(filling, **asked, seed=seed)["content"] for seed in range(8)]
    assert [ask(filling, **asked, seed=seed)["content"] for seed in range(8)] == first
    assert all(len(text) < 100 for text in first) and len(set(first)) > 1


def test_what_was_warmed_is_not_computed_again(filling: ServerProcess) -> None:
    files = [{"text": "b = 2\n" * 60, "filename": "two.py"}]
    warming = {"input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0}
    warmed = ask(filling, **warming, input_extra=files, samplers=[], temperature=0.0)
    assert warmed["content"] == "" and warmed["timings"]["predicted_n"] == 0
    timings = ask(filling, input_extra=files)["timings"]
    assert timings["cache_n"] > 100 and timings["prompt_n"] < 64
    apart = ask(filling, input_extra=files, cache_prompt=False)["timings"]
    assert apart["cache_n"] == 0


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_gets_it_as_an_editor_asks_for_it(filling: ServerProcess) -> None:
    words = ("--silent", "--no-buffer", "--request", "POST", "--url", f"{filling.url}/infill")
    header = ("--header", "Content-Type: application/json", "--data", "@-")
    fields = ["content", "timings/predicted_n", "truncated", "tokens_cached"]
    body = {**AROUND, "samplers": JUDGED, "top_k": 40, "top_p": 0.99, "response_fields": fields}
    more = {"t_max_prompt_ms": 500, "t_max_predict_ms": 1000, "n_indent": 0, "stream": False}
    found = subprocess.run(
        ["curl", "--max-time", "120", *words, *header],
        input=json.dumps({**body, **more}).encode(),
        capture_output=True,
        check=True,
    )
    assert list(json.loads(found.stdout)) == fields


def test_nothing_is_left_behind(filling: ServerProcess) -> None:
    assert get(f"{filling.url}/health").status_code == 200
    filling.wait_idle()
