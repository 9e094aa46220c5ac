"""Files made to do harm: refused by the name of what they want, and nothing of them runs."""

from __future__ import annotations

import io
import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conversion.support import save, write_folder
from tgi_trio.conversion import child
from tgi_trio.conversion.convert import convert_folder
from tgi_trio.conversion.pickle_machine import run_pickle
from tgi_trio.errors import ModelLoadError
from tgi_trio.hub.folders import check_folder


class Calls:
    """Pickled as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


class Attributes:
    """Pickled as a dict that is to get another class."""

    def __reduce__(self) -> Any:
        return (OrderedDict, (), {"__class__": "x"}, iter(()), iter(()))


def silent(line: str) -> None:
    """Nobody wants to know."""


def refused(folder: Path) -> str:
    """Return why a folder is refused; it is not changed."""
    before = sorted(path.name for path in folder.rglob("*"))
    with pytest.raises(ModelLoadError) as caught:
        convert_folder(folder, silent)
    assert sorted(path.name for path in folder.rglob("*")) == before
    return str(caught.value)


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("inside", ["value", "key", "alone", "in a list"])
@pytest.mark.parametrize(
    ("function", "arguments", "named"),
    [
        (os.system, ("touch {}",), "posix.system"),
        (eval, ("open('{}', 'w')",), "builtins.eval"),
        (exec, ("open('{}', 'w')",), "builtins.exec"),
        (getattr, (os, "system"), "builtins.getattr"),
        (open, ("{}", "w"), "io.open"),
        (pickle.loads, (b"cos\nsystem\n(S'touch {}'\ntR.",), "pickle.loads"),
        (torch.load, ("{}",), "torch.serialization.load"),
        (torch.hub.load, ("x", "{}"), "torch.hub.load"),
    ],
)
def test_a_call_is_refused_by_its_name(
    tmp_path: Path, legacy: bool, inside: str, function: Any, arguments: Any, named: str
) -> None:
    trace = tmp_path / "trace"
    arguments = [x.replace("{}", str(trace)) if isinstance(x, str) else x for x in arguments]
    if function is getattr:
        arguments = [str, "format"]
    evil = Calls(function, *arguments)
    value: Any = {"a": torch.ones(2), "b": evil}
    value = {"value": value, "key": {evil: torch.ones(2)}, "alone": evil, "in a list": [evil]}[
        inside
    ]
    folder = write_folder(tmp_path / "model", {})
    save(value, folder / "pytorch_model.bin", legacy)
    trace.unlink(missing_ok=True)  # making a key of it has called it here already
    said = refused(folder)
    # Python 3 writes some names of built-in functions as Python 2 knew them
    assert named in said.replace("__builtin__", "builtins").replace("_io.open", "io.open")
    assert "nothing of it was run" in said
    assert not trace.exists()


def test_a_pickle_that_is_no_file_of_torch(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {})
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch x'\ntR.")
    assert "no file of torch.save: its pickle asks for os.system" in refused(folder)


@pytest.mark.parametrize("module", ["torch.nn.modules.linear", "numpy.core.multiarray", "argparse"])
def test_whole_modules_and_arrays_are_refused_by_name(tmp_path: Path, module: str) -> None:
    import argparse

    import numpy as np

    value = {
        "torch.nn.modules.linear": torch.nn.Linear(2, 2),
        "numpy.core.multiarray": np.float64(1),
        "argparse": argparse.Namespace(a=1),
    }[module]
    folder = write_folder(tmp_path, {})
    save({"a": value}, folder / "pytorch_model.bin")
    said = refused(folder).replace("numpy._core", "numpy.core")
    assert f"asks for {module}." in said


class Wrapped(torch.Tensor):
    """A subclass, which pickles as those of torchao do."""


def test_tensors_of_torchao_are_refused_with_what_helps(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {})
    save({"a": torch.ones(2).as_subclass(Wrapped)}, folder / "pytorch_model.bin")
    said = refused(folder)
    assert "asks for torch._tensor._rebuild_from_type_v2, as tensors of torchao's kinds do" in said
    assert "nothing of it was run" in said and "save_pretrained" in said


def run(*opcodes: bytes) -> Any:
    return run_pickle(io.BytesIO(b"".join(opcodes)))


@pytest.mark.parametrize(
    ("opcodes", "named"),
    [
        (b"(S'x'\ncos\nsystem\no.", "os.system"),
        (b"(S'x'\nios\nsystem\n.", "INST"),
        (b"ccollections\nOrderedDict\n)\x81.", "NEWOBJ"),
        (b"\x82\x01.", "EXT1"),
        (b"Pid\n.", "PERSID"),
        (b"\x97.", "NEXT_BUFFER"),
        (b"\x8c\x02os\x8c\x06system\x93.", "os.system"),
        (b"\x8c\x08builtins\x8c\x0d__import__.os\x93.", "builtins.__import__.os"),
        (b"ctorch._utils\n_rebuild_tensor_v2\n(tR.", "damaged"),
        (b"ccollections\nOrderedDict\n(]tR.", "Python 2"),
        (b"]ccollections\nOrderedDict\nb.", "no dict"),
        (b"ccollections\nOrderedDict\n}b.", "no dict"),
        (b"N)R.", "it calls"),
        (b"t.", "damaged"),
        (b"\x85.", "stack is empty"),
        (b"R.", "damaged"),
        (b"h\x05.", "damaged"),
        (b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7fx.", "damaged"),
        (b"\x8b\xff\xff\xff\x7f1.", "damaged"),
        (b"}(((tts.", "damaged"),
        (b"}", "damaged"),
        (b"", "damaged"),
        (b"L" + b"9" * 5000 + b"L\n.", "damaged"),
    ],
)
def test_an_opcode_that_no_tensor_needs(opcodes: bytes, named: str) -> None:
    with pytest.raises(ModelLoadError, match=named.replace(".", r"\.")):
        run(opcodes)


def test_attributes_of_a_dict_are_dropped() -> None:
    found = run(pickle.dumps(Attributes(), 2))
    assert found == {} and isinstance(found, dict) and not getattr(found, "__dict__", None)


def test_keys_as_deep_as_a_file_likes_are_not_hashed() -> None:
    with pytest.raises(ModelLoadError, match="neither text nor number"):
        run(b"}", b")", b"\x85" * 1_000_000, b"Ns.")


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def rebuilt(storage: int, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """Return an archive with one tensor over a storage of `storage` float32."""
    words = io.BytesIO()
    words.write(b"\x80\x02}" + text("a") + b"ctorch._utils\n_rebuild_tensor_v2\n(")
    words.write(b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu"))
    words.write(pickle.dumps(storage, 2)[2:-1] + b"tQ")
    for value in (offset, shape, strides):
        words.write(pickle.dumps(value, 2)[2:-1])
    words.write(b"\x89ccollections\nOrderedDict\n)RtRs.")
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as writer:
        writer.writestr("model/data.pkl", words.getvalue())
        writer.writestr("model/version", "3\n")
        writer.writestr("model/data/0", bytes(4 * storage))
    return archive.getvalue()


def test_an_honest_archive_made_by_hand(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {})
    (folder / "pytorch_model.bin").write_bytes(rebuilt(6, 0, (2, 3), (3, 1)))
    assert torch.load(folder / "pytorch_model.bin", weights_only=True)["a"].shape == (2, 3)
    convert_folder(folder, silent)


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [
        (0, (10**12,), (0,)),  # a terabyte of one element
        (0, (7,), (1,)),
        (1, (6,), (1,)),
        (5, (2,), (1,)),
        (0, (2,), (6,)),
        (0, (2,), (2**62,)),
        (0, (2**62, 2**62), (1, 1)),
        (0, (2**70,), (1,)),
        (-1, (2,), (1,)),
        (0, (-1,), (1,)),
        (0, (2,), (-1,)),
        (0, (2, 2), (1,)),
    ],
)
def test_elements_outside_of_a_storage(
    tmp_path: Path, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    folder = write_folder(tmp_path, {})
    (folder / "pytorch_model.bin").write_bytes(rebuilt(6, offset, shape, strides))
    said = refused(folder)
    assert "cannot be converted" in said and len(said) < 400


def test_many_views_of_one_storage_do_not_fill_the_disk(tmp_path: Path) -> None:
    whole = torch.zeros(1000)
    folder = write_folder(tmp_path, {f"a{i}": whole[: 900 + i] for i in range(99)})
    assert "overlap: they claim" in refused(folder)


def test_archives_that_are_something_else(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {})
    path = folder / "pytorch_model.bin"
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(path))
    assert "TorchScript" in refused(folder)
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "Git LFS pointer" in refused(folder)
    path.write_bytes(b"")
    assert "it is empty" in refused(folder)
    path.write_bytes(b"<html>not found</html>")
    assert "no file of torch.save" in refused(folder)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.txt", "x")
    assert "not one that torch.save writes" in refused(folder)
    save([torch.ones(1)], path)
    assert "no tensors by name, but a list" in refused(folder)
    save({"epoch": 3, "a": torch.ones(1)}, path)
    assert "'epoch' in it is no tensor, but of type int" in refused(folder)
    save({"a": torch.ones(2).to_sparse()}, path)
    assert "torch._utils._rebuild_sparse_tensor" in refused(folder)
    save({"a": torch.ones(2, dtype=torch.complex64)}, path)
    assert "torch.ComplexFloatStorage" in refused(folder)


def test_a_compressed_archive_is_no_bomb(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {})
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model/data.pkl", b"\0" * 10**7)
    assert "is compressed or encrypted" in refused(folder)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    for legacy in (False, True):
        folder = write_folder(tmp_path / str(legacy), {"a": torch.ones(50)}, legacy=legacy)
        path = folder / "pytorch_model.bin"
        whole = path.read_bytes()
        for size in range(0, len(whole), 7):
            path.write_bytes(whole[:size])
            assert str(path) in refused(folder)


def test_a_storage_of_another_size_than_promised(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"a": torch.ones(50)}, legacy=True)
    path = folder / "pytorch_model.bin"
    path.write_bytes(path.read_bytes().replace(struct.pack("<q", 50), struct.pack("<q", 2**40)))
    assert "damaged" in refused(folder)


def test_the_process_that_converts_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endless pickle costs a sentence: neither the caller's time nor its memory."""
    folder = write_folder(tmp_path, {})
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02" + b"]" * 15_000_000)
    monkeypatch.setattr(child, "_SECONDS", 2)
    monkeypatch.setattr(child, "_PATIENCE", 100)  # two seconds of a busy machine's processor
    with pytest.raises(
        ModelLoadError, match="more CPU time than weights of their size can"
    ) as told:
        check_folder(folder)
    assert str(folder) in str(told.value)


def test_nothing_of_a_file_is_imported(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {})
    (folder / "pytorch_model.bin").write_bytes(b"cthis\nx\n.")
    refused(folder)
    assert "this" not in sys.modules
