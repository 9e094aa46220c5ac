"""A quantised checkpoint from the command line to the tokens, with no flag that says what it is."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from tests.support.quantised import quantise, store_gptq
from tests.system.client import TIMEOUT, generate
from tests.system.golden import reference, tokenize
from tests.system.server import serving
from tests.system.test_refusals import start
from tgi_trio.testing.checkpoints import make_checkpoint

pytestmark = pytest.mark.system

NEW = 20
SAID = {"quant_method": "gptq", "bits": 4, "group_size": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", head_dim=32)
    return quantise(source, tmp_path_factory.mktemp("made") / "gptq", store_gptq(4, 32), SAID)


def tokens(folder: Path, *flags: str) -> tuple[list[int], list[int]]:
    """Return greedy tokens of a server, and those of the prompt; /info says which format it has
    recognised.
    """
    with serving("--model-id", str(folder), "--dtype", "float32", *flags) as server:
        settings = httpx.get(f"{server.url}/info", timeout=TIMEOUT).json()["settings"]
        assert settings["quantize"] == "gptq"
        body = generate(server.url, "some text", max_new_tokens=NEW, details=True)
        prompt = tokenize(server, "some text")
    return [token["id"] for token in body["details"]["tokens"]], prompt


def test_a_server_recognises_the_format_and_has_its_tokens(folder: Path) -> None:
    exact = ("--cpu-backend", "torch")  # with the numbers that are stored
    found, prompt = tokens(folder, *exact)
    assert [found] == reference(folder / "plain", [prompt], NEW)
    assert tokens(folder, "--num-shard", "2", "--quantize", "gptq", *exact) == (found, prompt)
    # The CPU kernels round what they multiply with.
    assert tokens(folder) == tokens(folder, "--quantize", "gptq")


def test_a_flag_that_contradicts_the_checkpoint_is_refused_before_a_shard(folder: Path) -> None:
    for word in ("awq", "eetq"):
        done = start(folder, "--quantize", word)
        assert done.returncode == 1 and done.stdout.splitlines() == ["loaded:"]
        (said,) = done.stderr.splitlines()
        assert f"--quantize {word} contradicts {folder}, which holds gptq" in said
    done = start(folder / "plain", "--quantize", "awq")
    assert done.returncode == 1 and done.stdout.splitlines() == ["loaded:"]
    assert "which holds plain numbers" in done.stderr


def test_headers_that_cannot_be_are_refused_before_a_shard(folder: Path, tmp_path: Path) -> None:
    for file in folder.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"group_size": 32', '"group_size": 16'))
    done = start(tmp_path)
    assert done.returncode == 1 and done.stdout.splitlines() == ["loaded:"]
    assert "qzeros' in" in done.stderr and "but config.json asks for" in done.stderr
