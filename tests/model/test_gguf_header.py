"""GGUF headers: what is read of good ones, and that bad ones are refused, by the file's name."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.gguf_files import IQ2_XXS, Q8_0, Tensor, float32, gguf, string, value
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.gguf.files import read_model
from tgi_trio.model.gguf.header import Header, read_header

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "a.count": 7,
    "a.share": 0.5,
    "a.flag": True,
    "a.large": 1 << 40,
    "a.words": ["one", "two"],
    "a.numbers": [1, 2, 3],
    "tokenizer.ggml.tokens": ["x", "y"],
}
TENSORS: dict[str, Tensor] = {
    "first": float32([[1, 2, 3], [4, 5, 6]]),
    "second": ((2, 64), Q8_0, bytes(2 * 2 * 34)),
}


def read(tmp_path: Path, content: bytes, **options: bool) -> Header:
    file = tmp_path / "model.gguf"
    file.unlink(missing_ok=True)  # as in `support.write_json`
    file.write_bytes(content)
    return read_header(file, **options)


def test_metadata_and_tensors(tmp_path: Path) -> None:
    content = gguf(METADATA, TENSORS)
    header = read(tmp_path, content, vocabulary=True)
    assert dict(header.metadata) == METADATA
    first, second = header.tensors["first"], header.tensors["second"]
    assert (first.kind.name, first.shape) == ("F32", (2, 3))
    assert struct.unpack("<6f", content[first.first : first.end]) == (1, 2, 3, 4, 5, 6)
    assert (second.kind.name, second.shape, second.end - second.first) == ("Q8_0", (2, 64), 136)
    assert second.first % 32 == 0


def test_the_vocabulary_is_read_when_asked_for(tmp_path: Path) -> None:
    assert "tokenizer.ggml.tokens" not in read(tmp_path, gguf(METADATA, TENSORS)).metadata


def test_what_is_remembered_of_a_file_is_what_it_says_now(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    for name in ("a", "b"):
        file.write_bytes(gguf({"general.architecture": name}, {name: float32(np.ones((2, 32)))}))
        os.utime(file, ns=(0, ord(name)))
        for _ in range(2):
            model = read_model([file])
            assert (model.architecture, *model.tensors) == (name, name)


def test_an_alignment_of_its_own(tmp_path: Path) -> None:
    content = gguf({"general.alignment": 256}, TENSORS, alignment=256)
    assert all(info.first % 256 == 0 for info in read(tmp_path, content).tensors.values())


def raw(tensors: int, keys: int, rest: bytes = b"", version: int = 3) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", version, tensors, keys) + rest


def one_tensor(
    dimensions: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0, name: str = "t"
) -> bytes:
    sizes = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return string(name) + sizes + struct.pack("<IQ", kind, offset)


HUGE = 1 << 63
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "cannot fit into 0 bytes"),
    "another format": (b"PK\x03\x04" + bytes(100), "begins with"),
    "version 1": (raw(0, 0, bytes(64), version=1), "of version 1"),
    "big-endian": (raw(0, 0, bytes(64), version=3 << 24), "big-endian"),
    "2^63 tensors": (raw(HUGE, 0, bytes(64)), "9223372036854775808 tensors"),
    "2^63 keys": (raw(0, HUGE, bytes(64)), "9223372036854775808 keys"),
    "a name beyond the file": (raw(0, 1, struct.pack("<Q", HUGE) + bytes(64)), "truncated"),
    "a string beyond the file": (
        raw(0, 1, string("k") + struct.pack("<IQ", 8, HUGE) + bytes(64)),
        "truncated",
    ),
    "2^62 numbers": (raw(0, 1, string("k") + struct.pack("<IIQ", 9, 10, HUGE // 2)), "a list"),
    "2^62 strings": (raw(0, 1, string("k") + struct.pack("<IIQ", 9, 8, HUGE // 2)), "a list"),
    "a list of lists": (
        raw(0, 1, string("k") + struct.pack("<IIQ", 9, 9, 1) + bytes(99)),
        "type 9",
    ),
    "an unknown value": (raw(0, 1, string("k") + struct.pack("<I", 77) + bytes(99)), "type 77"),
    "a key twice": (raw(0, 2, 2 * (string("k") + value(1)) + bytes(99)), "'k' is there twice"),
    "a tensor twice": (raw(2, 0, 2 * one_tensor() + bytes(400)), "'t' is there twice"),
    "no dimensions": (raw(1, 0, one_tensor(()) + bytes(400)), "0 dimensions"),
    "2^32 - 1 dimensions": (
        raw(1, 0, string("t") + struct.pack("<I", 0xFFFFFFFF) + bytes(400)),
        "4294967295 dimensions",
    ),
    "an empty tensor": (raw(1, 0, one_tensor((32, 0)) + bytes(400)), "is empty"),
    "sizes that overflow": (raw(1, 0, one_tensor((HUGE, HUGE)) + bytes(400)), "truncated: tensor"),
    "a place that overflows": (
        raw(1, 0, one_tensor(offset=(1 << 64) - 32) + bytes(400)),
        "truncated: tensor",
    ),
    "not aligned": (raw(1, 0, one_tensor(offset=8) + bytes(400)), "not aligned to 32"),
    "half a block": (raw(1, 0, one_tensor((48,), Q8_0) + bytes(400)), "rows of 48 weights"),
    "a type that is not read": (
        raw(1, 0, one_tensor((256,), IQ2_XXS) + bytes(400)),
        "not read here, IQ2_XXS",
    ),
    "an unknown type": (raw(1, 0, one_tensor((256,), 999) + bytes(400)), "number 999"),
    "tensors that overlap": (
        raw(2, 0, one_tensor() + one_tensor(name="u") + bytes(400)),
        "lies within another",
    ),
    "an alignment of 0": (gguf({"general.alignment": 0}, TENSORS), "aligned to 0"),
    "an alignment of 48": (gguf({"general.alignment": 48}, TENSORS), "aligned to 48"),
    "an alignment of 2^31": (gguf({"general.alignment": 1 << 31}, TENSORS), "aligned to 21474"),
    "an alignment in words": (gguf({"general.alignment": "32"}, TENSORS), "aligned to '32'"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused_by_name(tmp_path: Path, case: str) -> None:
    content, reason = HOSTILE[case]
    with pytest.raises(ModelLoadError, match=r"model\.gguf cannot be read as GGUF") as error:
        read(tmp_path, content)
    assert reason in str(error.value)


def test_every_truncated_file_is_refused(tmp_path: Path) -> None:
    content = gguf(METADATA, TENSORS)
    end = len(content) - 24  # the last tensor's end: what aligns the next one follows
    for length in range(0, end):
        with pytest.raises(ModelLoadError):
            read(tmp_path, content[:length])
    read(tmp_path, content[:end])


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    flips=st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=8)
)
def test_flipped_bytes_never_crash(tmp_path: Path, flips: list[tuple[int, int]]) -> None:
    content = bytearray(gguf(METADATA, TENSORS))
    for place, byte in flips:
        content[place % len(content)] = byte
    reads_or_refuses(lambda: read(tmp_path, bytes(content), vocabulary=True))


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(rest=st.binary(max_size=300), tensors=st.integers(0, 5), keys=st.integers(0, 5))
def test_noise_never_crashes(tmp_path: Path, rest: bytes, tensors: int, keys: int) -> None:
    reads_or_refuses(lambda: read(tmp_path, raw(tensors, keys, rest), vocabulary=True))


def reads_or_refuses(call: Callable[[], Header]) -> None:
    try:
        header = call()
    except ModelLoadError as error:
        assert "model.gguf" in str(error)
    else:
        assert all(info.first < info.end for info in header.tensors.values())
