"""What lies in a model's folder in a file's place, and has no end or no writer, is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tgi_trio.conversion.adapters import read_base
from tgi_trio.conversion.folder import read_index
from tgi_trio.conversion.safetensors_file import SafetensorsFile
from tgi_trio.conversion.torch_file import open_torch_file
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.adapters.config import read_adapter_config
from tgi_trio.model.checkpoint_files import read_file_header, stored_names
from tgi_trio.model.config import read_values
from tgi_trio.model.gguf.header import read_header
from tgi_trio.router.text.tokenizer_files import read_tokenizer_config
from tgi_trio.router.text.tokenizer_shape import check_tokenizer_json


def open_pickle(file: Path) -> None:
    with open_torch_file(file):
        pass


READERS: dict[str, Callable[[Path], object]] = {
    "config.json": lambda file: read_values(file.parent),
    "model.safetensors.index.json": lambda file: stored_names(file.parent),
    "model.safetensors": read_file_header,
    "pytorch_model.bin": open_pickle,
    "pytorch_model.bin.index.json": read_index,
    "model.gguf": read_header,
    "merged.safetensors": SafetensorsFile.open,
    "adapter_config.json": lambda file: read_adapter_config(file.parent),
    "base/adapter_config.json": lambda file: read_base(file.parent),
    "tokenizer_config.json": lambda file: read_tokenizer_config(file.parent),
    "tokenizer.json": check_tokenizer_json,
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("kind", ["zeros", "pipe"])
def test_what_is_no_file_is_refused(name: str, kind: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    if kind == "zeros":
        file.symlink_to("/dev/zero")
    else:
        os.mkfifo(file)
    with pytest.raises(ModelLoadError, match=r"a device or a pipe|nobody writes to the pipe"):
        READERS[name](file)


@pytest.mark.parametrize("content", [b"[" * 200_000, b'{"a":' * 200_000])
@pytest.mark.parametrize("name", [name for name in READERS if name.endswith(".json")])
def test_what_is_nested_without_end_is_refused(name: str, content: bytes, tmp_path: Path) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    with pytest.raises(ModelLoadError):
        READERS[name](file)


def test_a_header_that_is_nested_without_end_is_refused(tmp_path: Path) -> None:
    content = b'{"a":' * 200_000
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(content).to_bytes(8, "little") + content)
    with pytest.raises(ModelLoadError, match="nested too deeply"):
        read_file_header(file)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors.index.json", "adapter_config.json", "tokenizer.json"]
)
def test_a_file_of_gigabytes_is_refused_where_none_has_so_many(name: str, tmp_path: Path) -> None:
    with open(tmp_path / name, "wb") as file:
        file.truncate(10 << 30)  # all of it a hole
    with pytest.raises(ModelLoadError, match=r"it is larger than (1|256) MiB"):
        READERS[name](tmp_path / name)


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [("[Infinity]", "[0, 4]"), ("[1.0]", "[0, 4]"), ('["1"]', "[0, 4]"), ("[1]", "[0, 4.0]")],
)
def test_a_header_without_whole_numbers_is_refused(
    shape: str, offsets: str, tmp_path: Path
) -> None:
    header = f'{{"a": {{"dtype": "F32", "shape": {shape}, "data_offsets": {offsets}}}}}'.encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ModelLoadError, match="tensor 'a' are no whole numbers"):
        read_file_header(file)
