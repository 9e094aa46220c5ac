"""What `bench.model` measures, and the peer that it downloads."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest

from bench.harness import checkpoints
from bench.model.subjects import file_subject, find_subjects, shape_subject, write_gguf
from bench.model.texts import Tally, Text
from bench.peers.environment import Unavailable
from bench.peers.llama_package import find_libraries


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def test_a_file_is_counted_as_the_checkpoint_it_was_made_of(folder: Path) -> None:
    plain = shape_subject("tiny", folder)
    subject = file_subject(write_gguf(plain.folder), folder / "cache")
    sizes = checkpoints.tensor_sizes(checkpoints._ALL | checkpoints.SHAPES["tiny"])
    matrices = sum(size[0] * size[1] for size in sizes.values() if len(size) == 2)
    assert (subject.weights, subject.stored) == (matrices, 2 * matrices)  # the head is tied
    assert subject.head == plain.head == 2048 * 128
    assert subject.weights == pytest.approx(plain.weights, rel=0.01)


def test_the_file_has_the_weights_of_the_checkpoint(folder: Path) -> None:
    from tgi_trio.model.config import read_config
    from tgi_trio.shard.checkpoint.lookup import open_checkpoint
    from tgi_trio.shard.checkpoint.numbers import to_bfloat16

    plain = shape_subject("tiny", folder)
    subject = file_subject(write_gguf(plain.folder), folder / "cache")
    name = "model.layers.1.self_attn.k_proj.weight"
    with (
        open_checkpoint(read_config(plain.folder)) as source,
        open_checkpoint(read_config(subject.folder)) as written,
    ):
        before = source.matrix(name, (64, 128)).dequantised()
        after = written.matrix(name, (64, 128)).dequantised()
    assert np.array_equal(to_bfloat16(after), before)


def test_shapes_and_files_are_subjects_in_turn(folder: Path) -> None:
    file = write_gguf(shape_subject("tiny", folder).folder)
    found = list(find_subjects(["tiny"], [], [file], folder, folder / "home"))
    assert [subject.name for subject in found] == ["tiny", "tgi-trio-tiny-BF16"]
    assert [subject.gguf for subject in found] == [None, file]


def test_a_checkpoint_in_fp8_is_read_as_it_is_stored(folder: Path) -> None:
    from tgi_trio.model.config import read_config
    from tgi_trio.shard.checkpoint.lookup import open_checkpoint
    from tgi_trio.shard.checkpoint.numbers import to_float32

    (subject,) = find_subjects(["tiny"], ["FP8"], [], folder, folder / "home")
    plain = shape_subject("tiny", folder)
    assert (subject.name, subject.original) == ("tiny FP8", plain.folder)
    assert subject.weights == plain.weights and subject.stored < 0.9 * plain.stored
    name = "model.layers.1.mlp.down_proj.weight"
    with (
        open_checkpoint(read_config(plain.folder)) as source,
        open_checkpoint(read_config(subject.folder)) as written,
    ):
        before = to_float32(source.matrix(name, (128, 256)).dequantised())
        stored = written.matrix(name, (128, 256))
        after = to_float32(stored.dequantised())
    assert stored.coding == "e4m3"
    # Half of the last of four bits of a number, and what is smaller than the least of a block's.
    assert (np.abs(after - before) <= 2**-4 * np.abs(before) + np.abs(before).max() / 2**18).all()


@pytest.mark.parametrize(("numbers", "form"), [("GPTQ", "gptq"), ("AWQ", "awq")])
def test_codes_of_4_bits_are_read_as_they_are_stored(folder: Path, numbers: str, form: str) -> None:
    """llama.cpp's file of them has the very same weights."""
    from tgi_trio.model.config import read_config
    from tgi_trio.shard.checkpoint.lookup import open_checkpoint

    (subject,) = find_subjects(["tiny"], [numbers], [], folder, folder / "home")
    assert (subject.name, subject.folder.name) == (f"tiny {numbers}", f"tgi-trio-tiny-{form}")
    file = file_subject(write_gguf(subject.folder), folder / "cache")
    name = "model.layers.1.mlp.down_proj.weight"
    with (
        open_checkpoint(read_config(subject.folder)) as source,
        open_checkpoint(read_config(file.folder)) as written,
    ):
        ours, peers = (each.matrix(name, (128, 256)) for each in (source, written))
        assert (ours.coding.split()[0], ours.bits, peers.coding) == ("affine", 4, "Q4_0")
        np.testing.assert_array_equal(ours.dequantised(), peers.dequantised())


def test_another_package_than_the_pinned_one_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """npm is a script that packs something of its own."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "payload").write_text("not the libraries")
    with tarfile.open(tmp_path / "other.tgz", "w:gz") as tar:
        tar.add(tmp_path / "payload", "package/bins/linux-x64/libllama.so")
    npm = tmp_path / "bin" / "npm"
    npm.write_text(f'#!/bin/sh\ncp {tmp_path / "other.tgz"} "$4/"\n')
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    with pytest.raises(Unavailable, match=r"is not what it was: its SHA-512 is \S+=="):
        find_libraries(tmp_path / "home")
    left = {path.name for path in (tmp_path / "home").rglob("*") if path.is_file()}
    assert left == {"install.log"}


def test_without_npm_the_peer_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match="npm is not on this machine"):
        find_libraries(tmp_path / "home")


def test_a_tally_counts_divergence_and_distance_from_the_reference() -> None:
    text = Text(np.array([0, 1], np.int32), 1)
    reference = np.log(np.array([[0.5, 0.25, 0.25]], np.float32))
    other = np.log(np.array([[0.25, 0.5, 0.25]], np.float32))
    same, moved = Tally(), Tally()
    same.add(text, reference + 3, reference)  # the same probabilities
    moved.add(text, other, reference)
    assert same.divergence == pytest.approx(0, abs=1e-6)
    assert moved.divergence == pytest.approx(0.25 * np.log(2))
    assert (same.perplexity, moved.perplexity) == pytest.approx((4, 2))
    assert (same.same_best, moved.same_best) == (1, 0)
    assert moved.distance == pytest.approx(
        float(np.linalg.norm(other - reference) / np.linalg.norm(reference))
    )
