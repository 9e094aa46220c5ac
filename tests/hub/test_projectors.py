"""Projectors beside GGUF models: which is taken, named, declined, left out, downloaded."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hub.fake_hub import SHA, FakeHub, running_hub
from tests.hub.test_resolve import NOBODY
from tests.support.gguf_files import llama_metadata, write_llama
from tests.support.tiny_projectors import write_seeing_llama, write_tiny_projector
from tests.support.warm_start import run_warm
from tgi_trio import demo
from tgi_trio.errors import ConfigurationError, ModelLoadError
from tgi_trio.hub.projectors import (
    NO_PROJECTOR,
    WantedProjector,
    choose_projector,
    is_projector_name,
    want_projector,
)
from tgi_trio.hub.resolve import resolve_model
from tgi_trio.model.config import read_config
from tgi_trio.model.gguf.folder import find_projector

CHOICES = {
    "F16 comes first": (["mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-F16.gguf"], "mmproj-F16"),
    "then BF16": (["mmproj-F32.gguf", "mmproj-BF16.gguf", "mmproj-Q8_0.gguf"], "mmproj-BF16"),
    "or any": (["mmproj-model-q8_0.gguf"], "mmproj-model-q8_0"),
    "at the end of its name": (["tiny-f16.mmproj.gguf", "tiny-mmproj-f32.gguf"], "tiny-f16.mmproj"),
    "the nearest": (["mmproj-F16.gguf", "Q4/mmproj-F32.gguf"], "Q4/mmproj-F32"),
    "one above": (["mmproj-F16.gguf", "Q8/mmproj-F16.gguf"], "mmproj-F16"),
    "none elsewhere": (["Q8/mmproj-F16.gguf", "a-mmproj.txt", "my-mmprojection.gguf"], None),
}


@pytest.mark.parametrize("case", CHOICES)
def test_the_one_that_comes_with_a_model(case: str) -> None:
    names, expected = CHOICES[case]
    found = choose_projector(["Q4/tiny-Q4_K_M.gguf", *names], "Q4/tiny-Q4_K_M.gguf")
    assert found == (None if expected is None else f"{expected}.gguf")
    assert found is None or is_projector_name(found)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "models"
    folder.mkdir()
    write_seeing_llama(folder / "tiny-F32.gguf")
    write_tiny_projector(folder / "mmproj-F16.gguf")
    return folder


def tower(folder: Path) -> str | None:
    """Return which file of a tower a model's folder has."""
    found = find_projector(folder)
    sees = "vision_config" in read_config(folder).values
    assert sees == (found is not None)
    return None if found is None else found.resolve().name


def test_a_folder_s_own_comes_with_its_model(models: Path) -> None:
    seeing = resolve_model(str(models), projector=WantedProjector())
    assert tower(seeing) == "mmproj-F16.gguf"
    assert read_config(seeing).model_type == "idefics3"
    blind = resolve_model(str(models), projector=NO_PROJECTOR)
    assert tower(blind) is None and blind != seeing
    assert resolve_model(str(models)) == blind, "what else reads models has no use for it"


def test_a_file_s_has_to_be_named(models: Path, tmp_path: Path) -> None:
    file = str(models / "tiny-F32.gguf")
    assert tower(resolve_model(file, projector=WantedProjector())) is None
    beside = WantedProjector("mmproj-F16.gguf")
    assert tower(resolve_model(file, projector=beside)) == "mmproj-F16.gguf"
    other = write_tiny_projector(tmp_path / "other.gguf")
    wanted = WantedProjector(str(other))
    assert tower(resolve_model(file, projector=wanted)) == "other.gguf"
    assert tower(resolve_model(str(models), projector=wanted)) == "other.gguf"


def test_one_that_changes_makes_another_folder(models: Path) -> None:
    before = resolve_model(str(models), projector=WantedProjector())
    write_tiny_projector(models / "mmproj-F16.gguf", {"clip.vision.projector.scale_factor": 2})
    assert resolve_model(str(models), projector=WantedProjector()) != before


def test_one_that_nobody_named_is_left_out_where_it_cannot_be_used(
    models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny_projector(models / "mmproj-F16.gguf", {"clip.projector_type": "next"})
    with caplog.at_level(logging.WARNING):
        assert tower(resolve_model(str(models), projector=WantedProjector())) is None
    assert "images are not served, the text is" in caplog.text and "'next'" in caplog.text
    with pytest.raises(ModelLoadError, match="of the type 'next'"):
        resolve_model(str(models), projector=WantedProjector("mmproj-F16.gguf"))


def test_sounds_of_a_projector_are_said_not_to_be_served(
    models: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tiny_projector(models / "mmproj-F16.gguf", {"clip.has_audio_encoder": True})
    with caplog.at_level(logging.WARNING):
        assert tower(resolve_model(str(models), projector=WantedProjector())) == "mmproj-F16.gguf"
    assert "sounds are not served" in caplog.text


def test_a_token_for_features_that_a_file_calls_text_is_a_special_one(models: Path) -> None:
    """So it is called in files of this test, as in some of fine-tuned models."""
    folder = resolve_model(str(models), projector=WantedProjector())
    made = json.loads((folder / "tokenizer.json").read_text())
    assert "<image>" in {each["content"] for each in made["added_tokens"] if each["special"]}


def test_a_vocabulary_without_a_token_for_features_takes_an_unused_one(models: Path) -> None:
    tokens = llama_metadata(demo.model_path())["tokenizer.ggml.tokens"]
    file = models / "tiny-F32.gguf"
    key = "tokenizer.ggml.tokens"
    write_llama(demo.model_path(), file, {key: [*tokens[:-3], *(f"<unused{i}>" for i in range(3))]})
    folder = resolve_model(str(models), projector=WantedProjector())
    made = json.loads((folder / "tokenizer.json").read_text())
    ids = made["model"]["vocab"] | {each["content"]: each["id"] for each in made["added_tokens"]}
    assert ids["<image>"] == len(tokens) - 1 and "<unused1>" in ids and "<unused2>" not in ids
    write_llama(demo.model_path(), file)
    with pytest.raises(ModelLoadError, match=r"has no '<image>'.*no unused token"):
        resolve_model(str(models), projector=WantedProjector("mmproj-F16.gguf"))


NOT_THERE = {
    "nowhere": ("mmproj-F32.gguf", "no file mmproj-F32.gguf, here or beside"),
    "a folder": (".", "is no file: --mmproj takes a projector"),
    "a model": ("tiny-F32.gguf", "is no projector but a model of the architecture 'llama'"),
}


@pytest.mark.parametrize("case", NOT_THERE)
def test_what_is_no_projector_is_refused(models: Path, case: str) -> None:
    name, reason = NOT_THERE[case]
    with pytest.raises(ModelLoadError, match=reason):
        resolve_model(str(models), projector=WantedProjector(name))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04" + bytes(100)])
def test_a_damaged_one_is_refused_by_its_name(models: Path, content: bytes) -> None:
    (models / "mmproj-F16.gguf").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"mmproj-F16\.gguf cannot be read as GGUF"):
        resolve_model(str(models), projector=WantedProjector("mmproj-F16.gguf"))


def test_a_projector_is_no_model(models: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"is a projector.*--model-id takes the model's own"):
        resolve_model(str(models / "mmproj-F16.gguf"))


@pytest.mark.parametrize("model", [None, str(demo.model_path())])
def test_models_of_other_formats_have_their_own(model: str | None) -> None:
    with pytest.raises(ModelLoadError, match="is no GGUF file, so --mmproj has no place"):
        resolve_model(model, projector=WantedProjector("mmproj-F16.gguf"))
    assert resolve_model(model, projector=WantedProjector())


def test_both_flags_exclude_each_other() -> None:
    with pytest.raises(ConfigurationError, match="--mmproj and --no-mmproj exclude each other"):
        want_projector("mmproj-F16.gguf", True)


CHILD = """
import json, sys
from pathlib import Path
from tgi_trio.errors import ModelLoadError
from tgi_trio.hub.projectors import WantedProjector
from tgi_trio.hub.resolve import resolve_model
call = json.loads(sys.argv[1])
wanted = WantedProjector(call["name"], call["declined"])
try:
    print(resolve_model(call["model"], cache_dir=Path(call["cache"]), projector=wanted))
except ModelLoadError as error:
    raise SystemExit(str(error))
"""


@pytest.fixture
def hub(models: Path) -> Iterator[FakeHub]:
    model, projector = (
        (models / each).read_bytes() for each in ("tiny-F32.gguf", "mmproj-F16.gguf")
    )
    files = {"tiny-F32.gguf": model, "mmproj-F32.gguf": projector, "mmproj-F16.gguf": projector}
    with running_hub({"some/seeing": files}) as server:
        yield server


def fetch(
    endpoint: str, home: Path, name: str | None = None, *, declined: bool = False
) -> subprocess.CompletedProcess[str]:
    """Resolve a repository's model in a process of its own: the hub's package reads its endpoint
    when it is imported.
    """
    call = {"model": "some/seeing:F32", "cache": str(home), "name": name, "declined": declined}
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    environment = clean | {
        **{"HF_HOME": str(home / "home"), "HF_ENDPOINT": endpoint, "NO_PROXY": "127.0.0.1"},
        **{"HF_HUB_ETAG_TIMEOUT": "120", "XDG_CACHE_HOME": str(home / "cache")},
    }
    return run_warm("-c", CHILD, json.dumps(call), environment=environment)


FETCHED: dict[str, tuple[dict[str, Any], str | None]] = {
    "by itself": ({}, "mmproj-F16.gguf"),
    "by name": ({"name": "mmproj-F32.gguf"}, "mmproj-F32.gguf"),
    "declined": ({"declined": True}, None),
}


@pytest.mark.parametrize("case", FETCHED)
def test_a_repository_s_is_downloaded(hub: FakeHub, tmp_path: Path, case: str) -> None:
    wanted, expected = FETCHED[case]
    done = fetch(hub.url, tmp_path, **wanted)
    assert done.returncode == 0, done.stderr
    fetched = {path.partition(f"/resolve/{SHA}/")[2] for path, _ in hub.requests} - {""}
    assert fetched == {"tiny-F32.gguf", *([expected] if expected else [])}
    folder = Path(done.stdout.strip())
    assert (find_projector(folder) is None) == (expected is None)
    again = fetch(NOBODY, tmp_path, **wanted)
    assert again.stdout == done.stdout, "both files are found where the hub is out of reach"


def test_one_that_a_repository_has_not_names_those_that_it_has(
    hub: FakeHub, tmp_path: Path
) -> None:
    done = fetch(hub.url, tmp_path, "mmproj-Q8_0.gguf")
    assert done.returncode != 0 and "mmproj-F16.gguf, mmproj-F32.gguf" in done.stderr


def test_a_file_of_this_machine_goes_with_a_repository_s_model(
    hub: FakeHub, tmp_path: Path
) -> None:
    own = write_tiny_projector(tmp_path / "own.gguf")
    done = fetch(hub.url, tmp_path, str(own))
    assert done.returncode == 0, done.stderr
    assert tower(Path(done.stdout.strip())) == "own.gguf"
