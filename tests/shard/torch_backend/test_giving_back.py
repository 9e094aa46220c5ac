"""Memory while a checkpoint is loaded: what was packed is not held a second time."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tgi_trio.model.matrices.references import (
    MatrixRef,
    every_unit,
    run_of,
    split_inputs,
    stack_matrices,
    whole_linear,
)
from tgi_trio.shard.checkpoint.formats.plain import PlainFormat
from tgi_trio.shard.checkpoint.lookup import Checkpoint
from tgi_trio.shard.checkpoint.safetensors_files import SafetensorsFiles
from tgi_trio.shard.torch_backend.layers.linears.linear import Linear
from tgi_trio.shard.torch_backend.models.weight_loader import WeightLoader
from tgi_trio.shard.torch_backend.weights import WeightSource

_ROWS = 4096  # of 2 KiB each: 8 MiB a tensor, four of the units that pages are given back in


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "model.safetensors"
    save_file({name: torch.randn(_ROWS, 512) for name in ("a", "b", "c")}, path)
    return path


def _resident_pages(path: Path) -> int:
    """Return the pages of a file that are mapped into this process."""
    pages, ours = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.split()[0]:
            ours = line.endswith(str(path))
        elif ours and line.startswith("Rss:"):
            pages += int(line.split()[1]) * 1024 // os.sysconf("SC_PAGE_SIZE")
    return pages


@contextmanager
def opened(file: Path, given_back: Sequence[Path] = ()) -> Iterator[WeightSource]:
    files = SafetensorsFiles(file.parent, given_back=given_back, writable=True)
    with Checkpoint(files, PlainFormat()) as checkpoint:
        yield WeightSource(checkpoint, dtype=torch.float32)


def matrix(source: WeightSource, name: str) -> torch.Tensor:
    return source.weight(whole_linear(MatrixRef(name, _ROWS, 512)), every_unit)


@pytest.mark.parametrize("fresh", [True, False])
def test_pages_of_what_is_there_no_more_are_given_back(file: Path, fresh: bool) -> None:
    with opened(file, [file] if fresh else []) as source:
        kept = matrix(source, "a")
        total = float(kept.sum())
        with source.giving_back():
            alive = matrix(source, "b")
            alive.sum()
            matrix(source, "c").sum()
        size = _ROWS * 2048 // os.sysconf("SC_PAGE_SIZE")
        # `c` has gone, from a file that others had read before as well; the rest is where it was.
        assert 1.9 * size <= _resident_pages(file) < 2.5 * size
        assert float(kept.sum()) == total
        # What is read again comes from the page cache or the disk.
        again = matrix(source, "c")
        torch.manual_seed(0)
        assert torch.equal([torch.randn(_ROWS, 512) for _ in range(3)][2], again)


def test_a_part_of_the_columns_is_not_mistaken_for_the_whole(file: Path) -> None:
    half = split_inputs(MatrixRef("a", _ROWS, 512), run_of("heads", 2, 256))
    with opened(file, [file]) as source:
        with source.giving_back():
            expected = source.weight(half, lambda units: slice(0, 1)).clone()
        found = _resident_pages(file)
        again = source.weight(half, lambda units: slice(0, 1))
        assert torch.equal(again, expected)
        assert found >= _ROWS * 2048 // os.sysconf("SC_PAGE_SIZE") * 0.9  # others read the rest


def test_packed_weights_let_go_of_the_plain_ones() -> None:
    plain = torch.randn(1024, 1024)
    linear = Linear(plain)
    linear.pack()
    if linear.packed is None:
        pytest.skip("this processor does not gain by packing")
    gone = weakref.ref(plain)
    assert linear.weight.untyped_storage().nbytes() == 0
    del plain
    assert gone() is None


def test_linears_put_together_are_packed_at_once_and_only_once(file: Path) -> None:
    both = stack_matrices([MatrixRef(name, _ROWS, 512) for name in "ab"], run_of("heads", _ROWS))
    with opened(file) as source:
        loader = WeightLoader(source, "rms")
        whole, plain = loader.linear(both), loader.weight(both)
    if whole.packed is None:
        pytest.skip("this processor does not gain by packing")
    packed, x = whole.packed, torch.randn(3, 512)
    whole.pack()
    assert whole.packed is packed
    assert torch.allclose(whole(x), x @ plain.T, atol=1e-3)
