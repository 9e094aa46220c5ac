"""Scales that are no numbers are found by name, before anything is spawned that would load them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model.support import Asked
from tests.support.gguf_files import Tensor, float32, gguf, llama_metadata, llama_tensors, q8_0
from tests.support.quantised import real_checkpoint
from tgi_trio import demo
from tgi_trio.errors import ModelLoadError
from tgi_trio.model import scales
from tgi_trio.model.check import check_model
from tgi_trio.model.checkpoint_files import StoredTensor, read_headers
from tgi_trio.model.config import read_config
from tgi_trio.model.gguf.block_types import BY_NAME
from tgi_trio.model.gguf.folder import gguf_folder
from tgi_trio.model.scales import check_scales

BLOCKS = sorted(kind.name for kind in BY_NAME.values() if kind.scales)
NO_NUMBERS = {"F32": ("<f4", np.inf), "F16": ("<f2", np.nan), "F8_E8M0": ("u1", 255)}


def blocks(kind: str, count: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return blocks of anything, whose scales are numbers."""
    made = np.random.default_rng(seed).integers(0, 256, (count, BY_NAME[kind].bytes), np.uint8)
    dtype, _ = NO_NUMBERS[BY_NAME[kind].scale]
    for at in BY_NAME[kind].scales:
        made[:, at : at + np.dtype(dtype).itemsize] = np.array([3], dtype).view(np.uint8)
    return made


@settings(max_examples=200, deadline=None)
@given(kind=st.sampled_from(BLOCKS), place=st.integers(0, 299), data=st.data())
def test_one_bad_scale_is_found_wherever_it_lies(
    tmp_path_factory: pytest.TempPathFactory, kind: str, place: int, data: st.DataObject
) -> None:
    block, made = BY_NAME[kind], blocks(kind, 300, place)
    file = tmp_path_factory.mktemp("scales") / "blocks"
    file.write_bytes(bytes(7) + made.tobytes())
    stored = StoredTensor(file, kind, (1, 300 * block.weights), 7, 7 + made.nbytes)
    check_scales({"good": stored})
    dtype, bad = NO_NUMBERS[block.scale]
    at = data.draw(st.sampled_from(block.scales))
    made[place, at : at + np.dtype(dtype).itemsize] = np.array([bad], dtype).view(np.uint8)
    file.write_bytes(bytes(7) + made.tobytes())
    with pytest.raises(ModelLoadError, match=r"'bad' in .*blocks holds a scale that is inf"):
        check_scales({"bad": stored})


@pytest.mark.parametrize(
    ("dtype", "bits", "largest"),
    [("F32", 0x7F800000, 0x7F7FFFFF), ("F16", 0x7C01, 0x7BFF), ("BF16", 0xFF80, 0xFF7F)],
)
def test_scales_of_their_own(tmp_path: Path, dtype: str, bits: int, largest: int) -> None:
    words = np.zeros(1000, "<u4" if dtype == "F32" else "<u2")
    words[1::2] = largest
    file = tmp_path / "scales"
    stored = StoredTensor(file, dtype, (1000,), 0, words.nbytes)
    file.write_bytes(words.tobytes())
    check_scales({"a.scales": stored})
    words[998] = bits
    file.write_bytes(words.tobytes())
    with pytest.raises(ModelLoadError, match=r"'a\.scales'"):
        check_scales({"a.scales": stored})


def test_of_large_files_a_part_is_looked_at(tmp_path: Path) -> None:
    """Runs are spread over all of a tensor: half of what is bad throughout is found in any half."""
    made = blocks("Q8_0", 20000, 1)
    file = tmp_path / "blocks"
    file.write_bytes(made.tobytes())
    stored = StoredTensor(file, "Q8_0", (1, 20000 * 32), 0, made.nbytes)
    for half in (made[:10000], made[10000:]):
        kept = half.copy()
        half[:, :2] = 255
        file.write_bytes(made.tobytes())
        with pytest.raises(ModelLoadError):
            check_scales({"bad": stored}, at_most=made.nbytes // 8)
        half[:] = kept


def test_every_place_of_a_large_file_is_asked_for_before_any_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = blocks("Q8_0", 20000, 1)
    file = tmp_path / "blocks"
    file.write_bytes(made.tobytes())
    first, half = StoredTensor(file, "Q8_0", (1, 10000 * 32), 0, made.nbytes // 2), made.nbytes // 2
    tensors = {"first": first, "second": StoredTensor(file, "Q8_0", first.shape, half, made.nbytes)}
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, at, size, advice: told.append((at, size)))

    def look(rows: np.ndarray[Any, np.dtype[np.uint8]], kind: str) -> bool:
        told.append((-1, rows.size))
        return True

    monkeypatch.setattr(scales, "are_finite", look)
    check_scales(tensors, at_most=made.nbytes // 8)
    asked = [size for at, size in told if at >= 0]
    assert told[: len(asked)] == sorted(told[: len(asked)])
    assert min(at for at, _ in told[: len(asked)]) == 0 and max(at for at, _ in told) > half
    assert [size for _, size in told[len(asked) :]] == asked
    assert sum(asked) < made.nbytes // 4
    told.clear()
    check_scales(tensors)
    assert all(at == -1 for at, _ in told)  # all of it is read, from its beginning to its end


def spoiled(tensor: Tensor) -> Tensor:
    shape, kind, content = tensor
    return shape, kind, content[:-34] + b"\xff\xff" + content[-32:]


def test_a_file_of_llama_cpp_is_refused_by_name(tmp_path: Path) -> None:
    arrays = llama_tensors(demo.model_path(), *HEADS)
    tensors = {n: q8_0(a) if a.ndim == 2 else float32(a) for n, a in arrays.items()}
    metadata = llama_metadata(demo.model_path())
    file = tmp_path / "model.gguf"
    file.write_bytes(gguf(metadata, tensors))
    assert check_model(read_config(gguf_folder(file, tmp_path / "cache")), Asked()) == []
    name = "blk.1.ffn_down.weight"
    file.write_bytes(gguf(metadata, tensors | {name: spoiled(tensors[name])}))
    config = read_config(gguf_folder(file, tmp_path / "cache"))
    with pytest.raises(ModelLoadError, match=r"1\.mlp\.down_proj\.weight' in .*model\.gguf"):
        check_model(config, Asked())


_CONFIG = read_config(demo.model_path())
HEADS = int(_CONFIG.need("num_attention_heads")), int(_CONFIG.need("num_key_value_heads"))


@pytest.mark.parametrize(
    ("checkpoint", "ending"),
    [
        ("gptq-act-g128", "scales"),
        ("ar-awq-asym", "scales"),
        ("ct-w4a16-g128-sym", "weight_scale"),
        ("bnb-nf4", "absmax"),
        ("bnb-nf4", "quant_map"),
    ],
)
def test_checkpoints_of_other_tools_are_refused_by_name(
    tmp_path: Path, checkpoint: str, ending: str
) -> None:
    folder = real_checkpoint(checkpoint, tmp_path)
    config = read_config(folder)
    assert check_model(config, Asked()) == []
    name, stored = next(
        (n, t) for n, t in sorted(read_headers(folder).items()) if n.endswith(f".{ending}")
    )
    content = bytearray(stored.file.read_bytes())
    content[stored.end - 2 : stored.end] = b"\xff\xff"
    stored.file.unlink()  # it may be a link to the original
    stored.file.write_bytes(content)
    with pytest.raises(ModelLoadError, match=f"{name}' in .* holds a scale that is infinite"):
        check_model(config, Asked())
