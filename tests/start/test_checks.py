"""What is refused before a shard is there, of what the machine has to do with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.system.adapter_support import write
from tgi_trio import launcher
from tgi_trio.demo import model_path
from tgi_trio.errors import ConfigurationError, ModelLoadError
from tgi_trio.model.config import read_config
from tgi_trio.model.facts import read_model_facts
from tgi_trio.settings.records import Options
from tgi_trio.settings.resolve import resolve
from tgi_trio.start import checks
from tgi_trio.start.checks import check_start
from tgi_trio.testing.checkpoints import make_checkpoint
from tgi_trio.testing.ports import reserve_port

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "llama"
    return make_checkpoint(folder, "llama", **SIZES, intermediate_size=64)


def start(folder: Path, **asked: Any) -> list[str]:
    settings = resolve(Options(activations=8, **asked), read_model_facts(folder))
    return check_start(settings, read_config(folder))


def test_torch_on_a_cpu_rounds_no_activations(llama: Path) -> None:
    both = r"--activations 8 .* --cpu-backend torch .*: leave one of the two out"
    with pytest.raises(ConfigurationError, match=both):
        start(llama, device="cpu", cpu_backend="torch")
    assert start(llama, device="cpu", num_shard=2) == []  # the kernels do, on any number of ranks


@pytest.mark.parametrize("seen", [False, True])
def test_a_device_that_may_be_there_is_asked_itself(
    llama: Path, monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    monkeypatch.setattr(checks, "may_see_device", lambda: seen)
    if seen:
        assert start(llama, cpu_backend="torch") == []
        return
    with pytest.raises(ConfigurationError, match="computes it with torch on a CPU"):
        start(llama, cpu_backend="torch")


def test_a_model_that_the_kernels_do_not_serve_is_refused(llama: Path, tmp_path: Path) -> None:
    assert start(llama, device="cpu") == []
    odd = make_checkpoint(tmp_path / "falcon_h1", "falcon_h1")
    with pytest.raises(ConfigurationError, match=r"torch computes it on a CPU \(.*: leave it out"):
        start(odd, device="cpu", cpu_backend="torch")  # without the latter neither


def test_ranks_that_the_kernels_do_not_divide_a_model_by_are_named(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    mixture = make_checkpoint(tmp_path / "mixtral", "mixtral", **sizes)
    assert start(mixture, device="cpu") == []
    why = r"--num-shard 2.*ranks divide every layer, which the kernels do not do with experts"
    with pytest.raises(ConfigurationError, match=rf"--activations 8 .*{why}.*one of the two"):
        start(mixture, device="cpu", num_shard=2)
    with pytest.raises(ConfigurationError, match=rf"{why}.*--cpu-backend out .* or --num-shard\."):
        start(mixture, device="cpu", num_shard=2, cpu_backend="kernels")


def test_a_machine_without_proc_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_OWN_MEMORY", llama / "no proc")
    with pytest.raises(ConfigurationError, match="/proc is not mounted"):
        start(llama)


def test_less_for_all_images_than_for_one_is_warned_of(llama: Path) -> None:
    (warning,) = start(llama, device="cpu", max_image_bytes=1000)
    assert "--max-image-bytes 1000" in warning and "--max-image-fetch-size" in warning


def test_texts_of_adapters_are_checked_unless_the_model_s_are_used(tmp_path: Path) -> None:
    folder = write(tmp_path / "mine", 1)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")

    def begin(whose: str) -> list[str]:
        named = Options(lora_adapters=(f"mine={folder}",), adapter_tokenizers=whose)
        settings = resolve(named, read_model_facts(model_path()))
        settings = replace(settings, adapter_folders={"mine": str(folder)})
        return check_start(settings, read_config(model_path()))

    assert begin("own") == begin("base") == []
    (folder / "chat_template.jinja").write_text("{% if %}")
    assert begin("base") == []
    with pytest.raises(ModelLoadError, match=r"--lora-adapters: `mine`: .* does not compile"):
        begin("own")
    (folder / "chat_template.jinja").unlink()
    whole = json.loads((model_path() / "tokenizer.json").read_text())
    vocabulary = whole["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(whole))
    with pytest.raises(ModelLoadError, match=r"`mine`: .* vocabulary .*: 'a' is .* for the model"):
        begin("own")


def test_one_port_for_the_api_and_the_metrics_is_refused_by_the_name_of_its_flag() -> None:
    with reserve_port() as port:
        options = Options(hostname="127.0.0.1", port=port, prometheus_port=port)
        words = f"127.0.0.1:{port}: another program listens there; choose another with --prom"
        with pytest.raises(ConfigurationError, match=words), launcher.bind(options):
            pytest.fail("bound twice")
