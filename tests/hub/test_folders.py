"""From a name to a folder without a hub: local ones, the embedded model, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from safetensors.torch import load_file

from tests.hub.test_resolve import pickled
from tgi_trio import demo
from tgi_trio.errors import ModelLoadError
from tgi_trio.hub.folders import check_folder
from tgi_trio.hub.resolve import (
    resolve_adapter,
    resolve_drafter,
    resolve_model,
    resolve_tokenizer,
)


def folder_with(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_a_local_folder(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, config__json="{}", model__safetensors="x")
    assert resolve_model(str(folder)) == folder
    with pytest.raises(ModelLoadError, match="has no revision: leave --revision out"):
        resolve_model(str(folder), "main")


@pytest.mark.parametrize("name", [None, demo.MODEL_ID])
def test_the_embedded_model_has_no_revision(name: str | None) -> None:
    with pytest.raises(ModelLoadError, match="the embedded model has no revision"):
        resolve_model(name, "main")


def test_the_embedded_model_needs_no_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, config__json="{}", model__safetensors="x")
    monkeypatch.setattr(demo, "model_path", lambda: folder)
    assert resolve_model(None) == resolve_model(demo.MODEL_ID) == folder


@pytest.mark.parametrize("name", ["./missing", "/missing/folder", "a/b/c"])
def test_a_folder_that_is_not_there_is_not_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(ModelLoadError, match=f"there is no folder {name}"):
        resolve_model(name)


@contextmanager
def as_another_user() -> Iterator[None]:
    """Root may read everything: be nobody in particular meanwhile."""
    if was := os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(was)


@pytest.mark.parametrize(
    ("below", "mode"),
    [("", 0o000), ("", 0o311), ("", 0o644), ("model", 0o000), ("model", 0o644)],
)
def test_a_folder_that_may_not_be_read_is_named_with_its_flag(below: str, mode: int) -> None:
    with TemporaryDirectory() as place:
        closed = Path(place, "closed")
        (closed / below).mkdir(parents=True)
        folder_with(closed / below, config__json="{}", model__safetensors="x")
        os.chmod(place, 0o755)
        closed.chmod(mode)
        name = str(closed / below)
        readers: list[tuple[Callable[[str], object], str]] = [
            (resolve_model, "--model-id"),
            (resolve_drafter, "--draft-model"),
        ]
        readers += [(resolve_tokenizer, "--tokenizer-name"), (resolve_adapter, "--lora-adapters")]
        try:
            with as_another_user():
                for read, flag in readers:
                    words = f"^{name} cannot be looked into: Permission denied. {flag} takes"
                    with pytest.raises(ModelLoadError, match=words):
                        read(name)
        finally:
            closed.chmod(0o755)


@pytest.mark.parametrize("name", ["/tmp/" + "q" * 5000, "q" * 300 + "/m", "./m:" + "q" * 300])
def test_a_name_that_is_too_long_for_a_path_is_refused_in_a_short_sentence(name: str) -> None:
    with pytest.raises(ModelLoadError, match="File name too long") as error:
        resolve_model(name)
    assert len(str(error.value)) < 400


def test_the_home_of_nobody_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="no-such-user/m cannot be looked into"):
        resolve_model("~no-such-user/m")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
INDEX = '{"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}'


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no config.json"),
        ({"config__json": "{}"}, "holds no weights"),
        (
            {
                "config__json": "{}",
                "m-1__safetensors": "x",
                "model__safetensors__index__json": INDEX,
            },
            "incomplete: .* names m-2.safetensors, which is not there",
        ),
        (
            {"config__json": "{}", "x__safetensors": "x", "model__safetensors__index__json": "[]"},
            "cannot be read as an index",
        ),
        (
            {"config__json": "{}", "x__safetensors": POINTER, "tokenizer__json": POINTER},
            "pointers of Git LFS in their place: tokenizer.json, x.safetensors",
        ),
        (
            {"config__json": "{}", "model__bin": POINTER},
            "pointers of Git LFS in their place: model.bin",
        ),
    ],
)
def test_folders_that_cannot_be_served(tmp_path: Path, files: dict[str, str], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        check_folder(folder_with(tmp_path, **files))


@pytest.mark.parametrize("below", ["checkpoint-100", "snapshots/0123"])
def test_models_below_a_folder_that_is_none_are_named(tmp_path: Path, below: str) -> None:
    (tmp_path / below).mkdir(parents=True)
    (tmp_path / below / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=f"folders in it do: {below}$"):
        check_folder(tmp_path)


def test_pickles_are_converted_unless_that_is_not_wanted(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, config__json="{}")
    (folder / "pytorch_model.bin").write_bytes(pickled())
    with pytest.raises(ModelLoadError, match="leave --no-auto-convert out"):
        resolve_model(str(folder), auto_convert=False)
    assert resolve_model(str(folder)) == folder
    assert sorted(load_file(folder / "model.safetensors")) == ["a"]


def test_a_tokenizer_of_another_folder(tmp_path: Path) -> None:
    assert resolve_tokenizer(str(tmp_path)) == tmp_path
    with pytest.raises(ModelLoadError, match="no folder /nowhere: --tokenizer-name takes a folder"):
        resolve_tokenizer("/nowhere")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="is not a folder: --tokenizer-name"):
        resolve_tokenizer(str(tmp_path / "tokenizer.json"))


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    folder_with(tmp_path, weights__safetensors="x")
    with pytest.raises(ModelLoadError, match="is not a folder"):
        resolve_model(str(tmp_path / "weights.safetensors"))
