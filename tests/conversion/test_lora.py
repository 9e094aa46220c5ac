"""Adapters merged into their base, held to PEFT's merge_and_unload.

`data/` has what PEFT 0.21 and transformers wrote: a base, an adapter with random matrices, and
`merged.safetensors`. GPT-2's matrices are stored transposed; Llama's adapter has rsLoRA and
patterns of ranks and alphas.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conversion.support import assert_equal
from tgi_trio.conversion.adapters import is_adapter, merge_model, read_base
from tgi_trio.conversion.lora import merge_adapter
from tgi_trio.errors import ModelLoadError
from tgi_trio.hub.resolve import resolve_model

DATA = Path(__file__).parent / "data"
MODELS = ("gpt2", "llama")


def silent(line: str) -> None:
    """Nobody wants to know."""


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of one of `data`, which a test may change."""
    return Path(shutil.copytree(DATA / request.param, tmp_path / request.param))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA / "llama", tmp_path / "llama"))


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def merged(folder: Path) -> dict[str, torch.Tensor]:
    merge_adapter(folder / "adapter", folder / "base", folder / "out", silent)
    return load_file(folder / "out" / "model.safetensors")


def assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=2e-6)


def test_the_sum_is_peft_s(model: Path) -> None:
    found, wanted = merged(model), load_file(model / "merged.safetensors")
    assert_close(found, wanted)
    base = load_file(model / "base" / "model.safetensors")
    changed = [name for name in base if not torch.equal(base[name], wanted[name])]
    assert len(changed) > 7
    assert_equal({k: v for k, v in found.items() if k not in changed},
                 {k: v for k, v in base.items() if k not in changed})  # fmt: skip
    assert (model / "out" / "config.json").read_text() == (model / "base/config.json").read_text()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_in_half_precision_are_rounded_once(llama: Path, dtype: torch.dtype) -> None:
    base = load_file(llama / "base" / "model.safetensors")
    save_file({k: v.to(dtype) for k, v in base.items()}, llama / "base" / "model.safetensors")
    delta = {k: v - base[k] for k, v in load_file(llama / "merged.safetensors").items()}
    for name, tensor in merged(llama).items():
        exact = base[name].to(dtype).double() + delta[name].double()
        assert tensor.dtype == dtype
        unit = torch.finfo(dtype).eps * exact.abs() / 2 + 1e-5
        assert ((tensor.double() - exact).abs() <= unit).all(), name


def test_numbers_of_64_bits_are_added_as_32(llama: Path) -> None:
    wanted = load_file(llama / "merged.safetensors")
    for part in ("base/model", "adapter/adapter_model"):
        path = llama / f"{part}.safetensors"
        save_file({name: tensor.double() for name, tensor in load_file(path).items()}, path)
    found = merged(llama)
    assert {tensor.dtype for tensor in found.values()} == {torch.float64}
    assert_close({name: tensor.float() for name, tensor in found.items()}, wanted)


def test_a_base_of_several_files_and_an_adapter_that_is_a_pickle(model: Path) -> None:
    whole = load_file(model / "base" / "model.safetensors")
    (model / "base" / "model.safetensors").unlink()
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    where = {name: files[i % 2] for i, name in enumerate(sorted(whole))}
    for file in files:
        own = {name: whole[name] for name in where if where[name] == file}
        save_file(own, model / "base" / file)
    (model / "base" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    adapter = model / "adapter" / "adapter_model.safetensors"
    torch.save(load_file(adapter), adapter.with_suffix(".bin"))
    adapter.unlink()
    merge_adapter(model / "adapter", model / "base", model / "out", silent)
    found = {k: v for file in files for k, v in load_file(model / "out" / file).items()}
    assert_close(found, load_file(model / "merged.safetensors"))


def test_a_checkpoint_of_the_bare_model(model: Path) -> None:
    """Its names lack the first part; those of the adapter have it."""
    prefix = {"gpt2": "transformer.", "llama": "model."}[model.name]
    for path in (model / "base" / "model.safetensors", model / "merged.safetensors"):
        save_file({k.removeprefix(prefix): v for k, v in load_file(path).items()}, path)
    assert_close(merged(model), load_file(model / "merged.safetensors"))


def test_an_adapter_given_as_a_model_is_merged_once(
    llama: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(llama)
    adapter = llama / "adapter"
    assert is_adapter(adapter) and read_base(adapter) == ("base", None)
    folder = resolve_model(str(adapter))
    assert_close(load_file(folder / "model.safetensors"), load_file(llama / "merged.safetensors"))
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(str(adapter)) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert resolve_model(str(adapter), merge_lora=False) == adapter
    # trained on: another model
    path = adapter / "adapter_model.safetensors"
    save_file({k: v * 2 for k, v in load_file(path).items()}, path)
    assert resolve_model(str(adapter)) != folder
    # of another base: another one, too
    base = llama / "base" / "model.safetensors"
    save_file({k: v * 2 for k, v in load_file(base).items()}, base)
    assert merge_model(adapter, llama / "base", tmp_path / "other").is_dir()


def test_a_merge_that_was_killed_leaves_nothing_that_is_taken_for_it(
    llama: Path, tmp_path: Path
) -> None:
    folder = merge_model(llama / "adapter", llama / "base", tmp_path / "cache")
    folder.rename(folder.with_name(f"{folder.name}.part"))
    (folder.with_name(f"{folder.name}.part") / "model.safetensors").write_bytes(b"half of it")
    again = merge_model(llama / "adapter", llama / "base", tmp_path / "cache")
    assert again == folder
    assert_close(load_file(again / "model.safetensors"), load_file(llama / "merged.safetensors"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'"),
        ({"bias": "some"}, "bias 'some'"),
        ({"target_parameters": ["x"]}, "target_parameters"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa'"),
        ({"something_of_tomorrow": 3}, "something_of_tomorrow 3"),
    ],
)
def test_what_is_not_merged_is_refused_by_name(
    llama: Path, changes: dict[str, Any], named: str
) -> None:
    edit(llama, **changes)
    with pytest.raises(ModelLoadError, match=f"cannot be merged because of {named}"):
        merged(llama)
    assert not (llama / "out").exists()


def test_what_nothing_can_merge_is_refused_in_other_words(llama: Path) -> None:
    edit(llama, peft_type="PROMPT_TUNING")
    with pytest.raises(ModelLoadError, match="nothing can merge it: it is not served"):
        merged(llama)


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
        "base_model.model.model.layers.0.self_attn.q_proj.weight",
        "base_model.model.model.layers.0.self_attn.q_proj.base_layer.bias",
    ],
)
def test_tensors_that_the_configuration_does_not_announce_are_refused(
    llama: Path, name: str
) -> None:
    path = llama / "adapter" / "adapter_model.safetensors"
    save_file({**load_file(path), name: torch.ones(2)}, path)
    with pytest.raises(ModelLoadError, match=f"because of the tensor '{name}'"):
        merged(llama)


def test_an_adapter_of_another_base(llama: Path) -> None:
    path = llama / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    first = next(name for name in tensors if name.endswith("lora_B.weight"))
    save_file({**tensors, first: torch.ones(99, tensors[first].shape[1])}, path)
    with pytest.raises(ModelLoadError, match=r"what the adapter has for it \[99, .*another base"):
        merged(llama)
    save_file({**tensors, first: torch.ones(8, 7)}, path)
    with pytest.raises(ModelLoadError, match="does not fit the rank"):
        merged(llama)
    save_file({k: v for k, v in tensors.items() if k != first}, path)
    with pytest.raises(ModelLoadError, match="only one of the two matrices"):
        merged(llama)
    moved = {name.replace("layers.0", "layers.7"): tensor for name, tensor in tensors.items()}
    save_file(moved, path)
    with pytest.raises(ModelLoadError, match="made for another base"):
        merged(llama)


def test_bases_that_nothing_can_be_added_to(llama: Path) -> None:
    config = llama / "base" / "config.json"
    plain = config.read_text()
    quantised = {"quantization_config": {"bits": 4}}
    for changes in (quantised, {"text_config": quantised}):
        config.write_text(json.dumps({**json.loads(plain), **changes}))
        with pytest.raises(ModelLoadError, match="quantised weights"):
            merged(llama)
    config.write_text(plain)
    path = llama / "base" / "model.safetensors"
    base = load_file(path)
    save_file({k: v.to(torch.float8_e4m3fn) for k, v in base.items()}, path)
    with pytest.raises(ModelLoadError, match="is F8_E4M3: nothing can be added"):
        merged(llama)
    save_file({k: v.half() * 0 + 65504 for k, v in base.items()}, path)
    adapter = llama / "adapter" / "adapter_model.safetensors"
    save_file({k: v.abs() * 100 + 10 for k, v in load_file(adapter).items()}, adapter)
    with pytest.raises(ModelLoadError, match="with the adapter is not finite in F16"):
        merged(llama)


def test_a_hostile_adapter(llama: Path) -> None:
    import os

    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {llama / 'trace'}",)

    (llama / "adapter" / "adapter_model.safetensors").unlink()
    torch.save({"a": Evil()}, llama / "adapter" / "adapter_model.bin")
    with pytest.raises(ModelLoadError, match=r"asks for posix\.system"):
        merged(llama)
    assert not (llama / "trace").exists()


def test_an_adapter_without_a_base(llama: Path) -> None:
    edit(llama, base_model_name_or_path=None)
    with pytest.raises(ModelLoadError, match="does not say which model the adapter belongs to"):
        resolve_model(str(llama / "adapter"))
    edit(llama, base_model_name_or_path="./nowhere")
    with pytest.raises(ModelLoadError, match=r"no folder \./nowhere: base_model_name_or_path of"):
        resolve_model(str(llama / "adapter"))
    edit(llama, base_model_name_or_path="no name of the hub")
    with pytest.raises(ModelLoadError, match=r"check base_model_name_or_path of adapter_config"):
        resolve_model(str(llama / "adapter"))
