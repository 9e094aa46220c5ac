"""Pickles into safetensors: what torch.load reads is what is written, by any road."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from tests.conversion.support import (
    assert_equal,
    bits,
    converted,
    save,
    write_folder,
    write_parts,
)
from tgi_trio.conversion import child
from tgi_trio.conversion.convert import convert_folder
from tgi_trio.conversion.folder import STAGING, conversion_due, find_pickles
from tgi_trio.errors import ModelLoadError
from tgi_trio.hub.folders import check_folder

TYPED = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)
UNTYPED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64)


def silent(line: str) -> None:
    """Nobody wants to know."""


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(shape) * 50).abs().to(dtype)


@pytest.mark.parametrize("legacy", [False, True])
def test_every_dtype_is_what_torch_load_reads(tmp_path: Path, legacy: bool) -> None:
    kinds = TYPED if legacy else TYPED + UNTYPED
    tensors = {f"a.{kind}": numbers(3, 4, dtype=kind) for kind in kinds}
    write_folder(tmp_path, tensors, legacy=legacy)
    convert_folder(tmp_path, silent)
    wanted = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert_equal(converted(tmp_path), wanted)


@pytest.mark.parametrize("legacy", [False, True])
def test_views_parameters_scalars_and_nothing_at_all(tmp_path: Path, legacy: bool) -> None:
    whole = numbers(6, 8)
    tensors = {
        "transposed": numbers(5, 3).t(),
        "rows": whole[1:4],
        "columns": whole[:, 2:5],
        "every second": whole.reshape(-1)[1::2],
        "permuted": numbers(2, 3, 4).permute(2, 0, 1),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 7),
        "parameter": torch.nn.Parameter(numbers(2, 2)),
        "ünïcode and \"quotes\"": numbers(2),
    }  # fmt: skip
    write_folder(tmp_path, tensors, legacy=legacy)
    convert_folder(tmp_path, silent)
    assert_equal(converted(tmp_path), tensors)


@given(st.data())
def test_any_view_is_what_torch_load_reads(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("view")
    tensor = torch.arange(120, dtype=torch.int32).reshape(4, 5, 6)
    for _ in range(data.draw(st.integers(0, 3))):
        axis = data.draw(st.integers(0, 2))
        start = data.draw(st.integers(0, tensor.shape[axis]))
        end = data.draw(st.integers(start, tensor.shape[axis]))
        index = [slice(None)] * 3
        index[axis] = slice(start, end, data.draw(st.integers(1, 3)))
        tensor = tensor[tuple(index)].transpose(axis, data.draw(st.integers(0, 2)))
    legacy = data.draw(st.booleans())
    write_folder(folder, {"x": tensor}, legacy=legacy)
    convert_folder(folder, silent)
    assert_equal(converted(folder), {"x": tensor})


def test_a_module_s_state_dict_and_what_a_trainer_wraps_it_in(tmp_path: Path) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    for name, value in (
        ("plain", module.state_dict()),
        ("in", {"state_dict": module.state_dict()}),
    ):
        folder = write_folder(tmp_path / name, {})
        save(value, folder / "pytorch_model.bin")
        convert_folder(folder, silent)
        assert_equal(converted(folder), module.state_dict())


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        ({}, False),
        ({"tie_word_embeddings": False}, True),
        ({"text_config": {"tie_word_embeddings": False}}, True),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, True),
    ],
)
def test_tied_weights_are_written_once_unless_the_model_wants_them_apart(
    tmp_path: Path, config: dict[str, Any], kept: bool
) -> None:
    shared = numbers(6, 3)
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    tensors = dict(zip(names, [shared, numbers(3), shared], strict=True))
    write_folder(tmp_path, tensors, **config)
    convert_folder(tmp_path, silent)
    if not kept:
        with safe_open(tmp_path / "model.safetensors", "pt") as opened:
            assert opened.metadata()["format"] == "pt"
            assert opened.metadata()["lm_head.weight"] == "model.embed_tokens.weight"
        del tensors["lm_head.weight"]
    assert_equal(converted(tmp_path), tensors)


PARTS = {
    "pytorch_model-00001-of-00002.bin": {"a": torch.ones(3), "b": torch.zeros(2, 2)},
    "pytorch_model-00002-of-00002.bin": {"c": torch.arange(4.0)},
}


def test_several_files_and_their_index(tmp_path: Path) -> None:
    write_parts(tmp_path, PARTS)
    convert_folder(tmp_path, silent)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    assert index == {
        "metadata": {"total_size": 4 * (3 + 4 + 4)},
        "weight_map": {"a": first, "b": first, "c": second},
    }
    assert_equal(converted(tmp_path), {k: v for part in PARTS.values() for k, v in part.items()})
    assert check_folder(tmp_path) == tmp_path
    assert not (tmp_path / STAGING).exists()


def test_what_an_index_promises_must_be_there(tmp_path: Path) -> None:
    write_parts(tmp_path, PARTS)
    index = tmp_path / "pytorch_model.bin.index.json"
    table = json.loads(index.read_text())
    table["weight_map"]["d"] = "pytorch_model-00002-of-00002.bin"
    index.write_text(json.dumps(table))
    with pytest.raises(ModelLoadError, match="names 'd', which is in none of its files"):
        convert_folder(tmp_path, silent)
    table["weight_map"]["d"] = "pytorch_model-00003-of-00003.bin"
    index.write_text(json.dumps(table))
    with pytest.raises(ModelLoadError, match=r"incomplete: .* names pytorch_model-00003"):
        convert_folder(tmp_path, silent)
    table["weight_map"]["d"] = "../elsewhere.bin"
    index.write_text(json.dumps(table))
    with pytest.raises(ModelLoadError, match="which is no file beside it"):
        convert_folder(tmp_path, silent)
    assert not list(tmp_path.glob("*.safetensors"))


def test_an_interrupted_conversion_goes_on_where_it_was(tmp_path: Path) -> None:
    write_parts(tmp_path, PARTS)
    second = tmp_path / "pytorch_model-00002-of-00002.bin"
    whole = second.read_bytes()
    second.write_bytes(whole[:-30])
    with pytest.raises(ModelLoadError, match=r"00002-of-00002\.bin cannot be converted"):
        convert_folder(tmp_path, silent)
    assert not list(tmp_path.glob("*.safetensors"))  # nothing that a server would take for a model
    second.write_bytes(whole)
    said: list[str] = []
    convert_folder(tmp_path, said.append)
    assert len(said) == 1 and "00002-of-00002.bin, 2 of 2" in said[0]
    assert_equal(converted(tmp_path), {k: v for part in PARTS.values() for k, v in part.items()})
    convert_folder(tmp_path, said.append)
    assert len(said) == 1  # nothing is due


@pytest.mark.parametrize("gone", ["model-00001-of-00002.safetensors", "both"])
def test_killed_between_the_index_and_the_files(tmp_path: Path, gone: str) -> None:
    write_parts(tmp_path, PARTS)
    convert_folder(tmp_path, silent)
    (tmp_path / STAGING).mkdir()
    for path in tmp_path.glob("*.safetensors"):
        if gone in (path.name, "both"):
            path.unlink()
    assert conversion_due(tmp_path)
    assert check_folder(tmp_path) == tmp_path
    assert_equal(converted(tmp_path), {k: v for part in PARTS.values() for k, v in part.items()})


def test_a_pickle_that_changes_is_converted_again(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a": torch.zeros(3)})
    check_folder(tmp_path)
    assert not conversion_due(tmp_path)
    save({"a": torch.ones(3)}, tmp_path / "pytorch_model.bin")
    check_folder(tmp_path)
    assert_equal(converted(tmp_path), {"a": torch.ones(3)})
    (tmp_path / "pytorch_model.bin").unlink()  # it is no longer needed
    assert check_folder(tmp_path) == tmp_path


def test_weights_of_their_own_are_never_touched(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    write_folder(tmp_path, {"a": torch.zeros(3)})
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / STAGING).mkdir()
    check_folder(tmp_path)
    convert_folder(tmp_path, silent)
    assert_equal(converted(tmp_path), {"a": torch.ones(3)})


def test_which_pickles_are_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pt", "x.pt"):
        save({"x": torch.ones(1)}, tmp_path / name)
    assert [path.name for path in find_pickles(tmp_path)] == ["x.pt"]
    convert_folder(tmp_path, silent)
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["x.safetensors"]


def test_a_folder_that_cannot_be_written_to_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path, {"a": torch.ones(3)})
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ModelLoadError, match=r"cannot be written to. Convert a copy") as caught:
        check_folder(tmp_path)
    assert f"cp -rL {tmp_path} {tmp_path.name}-safetensors && python -m" in str(caught.value)


def test_a_disk_that_fails_is_told_in_one_sentence(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a": torch.ones(3)})
    (tmp_path / STAGING).write_text("a file where the folder should be")
    with pytest.raises(ModelLoadError, match="cannot be written to") as caught:
        check_folder(tmp_path)
    assert "Traceback" not in str(caught.value)


def test_the_process_tells_what_it_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_parts(tmp_path, PARTS)
    with caplog.at_level(logging.INFO, "tgi_trio"):
        child.convert(tmp_path, find_pickles(tmp_path))
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(",")[0] for line in said] == [f"converting {name}" for name in PARTS]


def test_one_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    write_parts(tmp_path, PARTS)
    (tmp_path / "pytorch_model.bin.index.json").unlink()
    save({"a": torch.ones(1)}, tmp_path / "pytorch_model-00003-of-00003.bin")
    with pytest.raises(ModelLoadError, match="'a' is in two files"):
        convert_folder(tmp_path, silent)


def test_a_model_of_transformers(tmp_path: Path) -> None:
    """What transformers loads from the pickles it loads from what they were converted to."""
    import transformers

    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    model = transformers.GPT2LMHeadModel(config)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)
    save(model.state_dict(), tmp_path / "pytorch_model.bin")
    check_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, tensor in model.state_dict().items():
        assert bits(again.state_dict()[name]) == bits(tensor), name
