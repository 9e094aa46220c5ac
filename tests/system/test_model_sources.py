"""Models as people have them: repositories of a hub, pickles, adapters, another's tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.hub.fake_hub import FakeHub, running_hub
from tests.support.warm_start import run_warm
from tests.system.client import get, post
from tests.system.server import ServerProcess, serving
from tgi_trio import demo

pytestmark = pytest.mark.system

BODY = {"inputs": "The old harbour", "parameters": {"max_new_tokens": 12}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the embedded model."""
    return Path(shutil.copytree(demo.model_path(), tmp_path / "model"))


def answer(server: ServerProcess, path: str = "/generate") -> Any:
    return post(f"{server.url}{path}", json=BODY).json()


@pytest.fixture(scope="module")
def expected(demo: ServerProcess) -> str:
    """What the embedded model says."""
    return str(answer(demo)["generated_text"])


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture
def hub(model: Path) -> Iterator[FakeHub]:
    """A hub that has the embedded model, as pickles too."""
    whole = files_of(model)
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    pickled = files_of(model)
    with running_hub({"some/pickled": pickled, "slow/whole": whole}) as server:
        yield server


def hub_variables(hub: FakeHub, home: Path) -> Mapping[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}


def test_a_repository_of_pickles_and_what_the_hub_says_it_is_for(
    hub: FakeHub, expected: str, tmp_path: Path
) -> None:
    with serving("--model-id", "some/pickled", env=hub_variables(hub, tmp_path)) as server:
        info = get(f"{server.url}/info").json()
        assert answer(server)["generated_text"] == expected
        # not a text-generation model, so POST / leaves the prompt out
        assert answer(server, "/") == [{"generated_text": expected}]
    assert info["model_pipeline_tag"] == "text2text-generation"
    assert (info["model_id"], len(info["model_sha"])) == ("some/pickled", 40)


def test_a_hub_that_is_silent_keeps_nobody_waiting(
    hub: FakeHub, expected: str, tmp_path: Path
) -> None:
    with serving("--model-id", "slow/whole", env=hub_variables(hub, tmp_path)) as server:
        assert get(f"{server.url}/info").json()["model_pipeline_tag"] is None
        assert answer(server, "/") == [{"generated_text": BODY["inputs"] + expected}]  # type: ignore
        assert "what slow/whole is for" in server.output


def test_a_folder_of_pickles(model: Path, expected: str) -> None:
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    with serving("--model-id", str(model)) as server:
        assert answer(server)["generated_text"] == expected
        assert "they are converted, none is run" in server.output


def test_an_adapter_is_merged_and_served(model: Path, expected: str, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    base = load_file(model / "model.safetensors")
    name = next(name for name in base if name.endswith("layers.0.mlp.down_proj.weight"))
    out, into = base[name].shape
    prefix = f"base_model.model.{name.removesuffix('.weight')}"
    generator = torch.Generator().manual_seed(0)  # with others it may say nothing at all
    tensors = {
        f"{prefix}.lora_A.weight": torch.randn(2, into, generator=generator),
        f"{prefix}.lora_B.weight": torch.randn(out, 2, generator=generator),
    }
    config = {
        "peft_type": "LORA", "r": 2, "lora_alpha": 4, "base_model_name_or_path": str(model)
    }  # fmt: skip
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, adapter / "adapter_model.safetensors")
    variables = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with serving("--model-id", str(adapter), env=variables) as server:
        assert answer(server)["generated_text"] not in ("", expected)
        assert get(f"{server.url}/info").json()["model_id"] == str(adapter)


def test_another_model_s_tokenizer(model: Path, tmp_path: Path) -> None:
    """It lower-cases, and its chats begin with words of their own."""
    other = tmp_path / "other"
    other.mkdir()
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = "other: {{ messages[0].content }}"
    config["model_max_length"] = 77
    (other / "tokenizer_config.json").write_text(json.dumps(config))
    with serving("--tokenizer-name", str(other)) as server:
        tokens = [
            post(f"{server.url}/tokenize", json={"inputs": text}).json()
            for text in ("LOUD", "loud")
        ]
        messages = [{"role": "user", "content": "hi"}]
        chat = post(f"{server.url}/chat_tokenize", json={"messages": messages}).json()
        grammar = {"type": "regex", "value": "[a-c]{5}"}
        guided = {"inputs": "x", "parameters": {"grammar": grammar, "max_new_tokens": 30}}
        text = post(f"{server.url}/generate", json=guided).json()
        info = get(f"{server.url}/info").json()
    assert [token["id"] for token in tokens[0]] == [token["id"] for token in tokens[1]]
    assert chat["templated_text"] == "other: hi"
    assert info["settings"]["tokenizer_name"] == str(other)
    assert info["max_total_tokens"] == 77
    assert len(text["generated_text"]) == 5 and set(text["generated_text"]) <= set("abc")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("/nowhere/at-all", "there is no folder /nowhere/at-all: --tokenizer-name takes a folder"),
        ("{}", "holds no tokenizer: expected tokenizer.json"),
    ],
)
@pytest.mark.parametrize("flags", [(), ("--disable-grammar-support",)])
def test_a_tokenizer_that_is_not_there_ends_the_start(
    tmp_path: Path, name: str, told: str, flags: tuple[str, ...]
) -> None:
    words = ["--port", "0", "--tokenizer-name", name.replace("{}", str(tmp_path)), *flags]
    done = run_warm("-m", "tgi_trio", *words)
    assert done.returncode == 1
    assert told in done.stderr and "Traceback" not in done.stderr
    assert "shard" not in done.stderr  # none was started
