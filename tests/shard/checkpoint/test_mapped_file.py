"""A mapped file gives back what has been read, all of it and no byte of anything else."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.shard.cpu_backend.kernel_support import FITTING
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.router.shards.loading_progress import count_touched_bytes
from tgi_trio.shard.checkpoint import mapped_file
from tgi_trio.shard.checkpoint.lookup import open_checkpoint
from tgi_trio.shard.checkpoint.mapped_file import MappedFile
from tgi_trio.shard.cpu_backend.arena import allocate_zeroed
from tgi_trio.shard.cpu_backend.program import pack_program

PAGE = mmap.PAGESIZE
CHUNK = 16 * PAGE


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of three chunks and a bit."""
    monkeypatch.setattr(mapped_file, "_CHUNK", CHUNK)
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(3 * CHUNK + 100))
    return path


def chunks_held(file: MappedFile) -> list[bool]:
    """Return for each chunk whether any of its pages is in this process."""
    first = file.data.ctypes.data // PAGE
    pages = len(file.data) // PAGE + 1
    with open("/proc/self/pagemap", "rb") as table:
        table.seek(first * 8)
        entries = np.frombuffer(table.read(pages * 8), np.uint64)
    present = entries >> np.uint64(63)
    return [bool(present[i : i + CHUNK // PAGE].any()) for i in range(0, pages, CHUNK // PAGE)]


def test_a_chunk_goes_with_its_last_byte(file: Path) -> None:
    mapped = MappedFile(file, gives_back=True)
    content = mapped.data.tobytes()
    assert mapped.read(5, CHUNK + 5).tobytes() == content[5 : CHUNK + 5]
    assert chunks_held(mapped) == [True] * 4
    mapped.release(0, CHUNK - 1)
    mapped.release(CHUNK, CHUNK + 1)
    assert chunks_held(mapped) == [True] * 4
    mapped.release(CHUNK - 1, CHUNK)
    assert chunks_held(mapped) == [False, True, True, True]
    mapped.release(CHUNK + 1, len(content))
    assert chunks_held(mapped) == [False] * 4
    assert mapped.data.tobytes() == content  # from the file again


def test_what_is_written_into_a_writable_mapping_stays_here(file: Path) -> None:
    content = file.read_bytes()
    mapped = MappedFile(file, gives_back=False, writable=True)
    mapped.data[5] ^= 255
    assert mapped.data[5] == content[5] ^ 255
    assert file.read_bytes() == content


def test_what_is_mapped_outlives_the_file(file: Path) -> None:
    content = file.read_bytes()
    mapped = MappedFile(file, gives_back=True)
    part = mapped.data[5 : CHUNK + 5]
    assert mapped.offset(part) == 5
    mapped.close()
    mapped.release(0, CHUNK)
    assert part.tobytes() == content[5 : CHUNK + 5]


def test_what_is_kept_stays(file: Path) -> None:
    mapped = MappedFile(file, gives_back=True)
    mapped.keep(CHUNK + 5, CHUNK + 6)
    mapped.data.tobytes()
    mapped.release(0, len(mapped.data))
    assert chunks_held(mapped) == [False, True, False, False]


def test_a_file_that_was_in_memory_before_stays_there_but_not_in_this_process(file: Path) -> None:
    mapped = MappedFile(file, gives_back=False)
    mapped.data.tobytes()
    mapped.release(0, len(mapped.data))
    assert chunks_held(mapped) == [False] * 4
    with file.open("rb") as opened:  # raises BlockingIOError for what would come from the disk
        assert os.preadv(opened.fileno(), [bytearray(1)], CHUNK, os.RWF_NOWAIT) == 1


def test_it_still_counts_as_read_where_its_weights_are_packed(file: Path) -> None:
    """What shows the progress of loading sees the memory that the weights went into."""
    before = count_touched_bytes(os.getpid())
    packed = allocate_zeroed((4 << 20,))
    packed[:] = 1
    assert count_touched_bytes(os.getpid()) >= before + len(packed)


def test_packed_weights_are_the_same(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped_file, "_CHUNK", PAGE)
    folder = checkpoint("llama", **FITTING["llama"])
    config = read_config(folder)
    spec = decoder_spec(config)
    assert spec is not None
    embedding = f"{spec.names.embedding}.weight"

    def panels(given_back: list[Path]) -> list[bytes]:
        with (
            open_checkpoint(config, given_back=given_back, kept=[embedding]) as weights,
            pack_program(spec, weights, "float32") as program,
        ):
            pass
        return [weights.tobytes() for weights in program._built.writer._kept]

    assert panels(list(folder.glob("*.safetensors"))) == panels([])
