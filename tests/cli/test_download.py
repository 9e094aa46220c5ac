"""`download-weights` as a command: what it does with a folder, and what it prints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.support.warm_start import run_warm

ADAPTERS = Path(__file__).parent.parent / "conversion" / "data"


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cwd / "cache"), "HF_HUB_OFFLINE": "1"}
    words = ("-m", "tgi_trio", "download-weights", *words)
    return run_warm(*words, environment=environment, folder=cwd)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    torch.save({"a": torch.ones(1000)}, model / "pytorch_model.bin")
    return model


def test_a_folder_of_pickles_is_converted(folder: Path) -> None:
    done = run("model", cwd=folder.parent)
    assert (done.returncode, done.stdout) == (0, "model (0.0 MB of weights)\n"), done.stderr
    assert "converting pytorch_model.bin" in done.stderr
    again = run("model", "--logger-level", "debug", cwd=folder.parent)
    assert (again.returncode, again.stderr) == (0, "")


def test_json_output_is_json_alone(folder: Path) -> None:
    done = run("model", "--json-output", cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    size = (folder / "model.safetensors").stat().st_size
    facts = {"folder": "model", "weight_bytes": size, "adapter_of": None}
    assert json.loads(done.stdout) == {"message": "model (0.0 MB of weights)", **facts}
    records = [json.loads(line) for line in done.stderr.splitlines()]
    assert {record["level"] for record in records} == {"INFO"}
    assert any("converting pytorch_model.bin" in record["message"] for record in records)


def test_other_extensions_are_left_as_they_are(folder: Path) -> None:
    done = run("model", "--extension", ".bin", cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    assert not list(folder.glob("*.safetensors"))
    missing = run("model", "--extension", ".pt", cwd=folder.parent)
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "model holds no weights with the extension .pt" in missing.stderr
    both = run("model", "--extension", ".bin", "--merge-lora", cwd=folder.parent)
    assert both.returncode == 1
    assert "--merge-lora writes .safetensors: leave --extension out" in both.stderr


def test_pickles_may_be_left_alone(folder: Path) -> None:
    done = run("model", "--no-auto-convert", "--logger-level", "ERROR", cwd=folder.parent)
    assert done.returncode == 1
    assert done.stderr.startswith("tgi-trio: model has its weights in pickle files")
    assert not list(folder.glob("*.safetensors"))


def test_adapters_are_merged_when_that_is_asked_for(tmp_path: Path) -> None:
    shutil.copytree(ADAPTERS / "llama", tmp_path, dirs_exist_ok=True)
    plain = run("adapter", cwd=tmp_path)
    assert plain.stdout == "adapter (a LoRA adapter of base, which is here too: see --merge-lora)\n"
    done = run("adapter", "--merge-lora", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.split(" (")[0])
    assert folder.parent == tmp_path / "cache" / "tgi_trio" / "merged"
    assert (folder / "model.safetensors").is_file()


def test_texts_of_a_merged_adapter_are_its_own_or_the_base_s(tmp_path: Path) -> None:
    shutil.copytree(ADAPTERS / "llama", tmp_path, dirs_exist_ok=True)
    for name in ("adapter", "base"):
        (tmp_path / name / "chat_template.jinja").write_text(f"of the {name}")
    for flags, whose in (([], "adapter"), (["--adapter-tokenizers", "base"], "base")):
        done = run("adapter", "--merge-lora", *flags, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        folder = Path(done.stdout.split(" (")[0])
        assert (folder / "chat_template.jinja").read_text() == f"of the {whose}"
