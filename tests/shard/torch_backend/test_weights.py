"""Reading checkpoints: every way a folder can be wrong is named; slices make up the whole."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from transformers import AutoModelForCausalLM

from tests.shard.torch_backend.models_support import GreedyRecorder, generated, load, run, sequence
from tgi_trio.errors import ConfigurationError, ModelLoadError
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import BLOCK_SIZE, WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.shard.torch_backend.kv_cache import KVCache, KVShape
from tgi_trio.shard.torch_backend.models.decoder import Decoder
from tgi_trio.shard.torch_backend.models.layer import Attention, Layer
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner
from tgi_trio.shard.torch_backend.torch_runner import TorchRunner

Checkpoint = Callable[..., Path]
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("error:The given NumPy array"),  # of torch, about read-only memory
]


@pytest.fixture
def folder(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A Llama checkpoint that a test may damage."""
    source = checkpoint("llama")
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def _load(folder: Path, **options: Any) -> TorchRunner:
    settings = ShardSettings(model_path=folder, **options)
    runner = load_torch_runner(settings, read_config(folder), sampler=GreedyRecorder())
    assert isinstance(runner, TorchRunner)
    return runner


def _attention(layer: Layer) -> Attention:
    assert layer.attention is not None
    return layer.attention


def _decoder(runner: TorchRunner) -> Decoder:
    assert isinstance(runner.model, Decoder)
    return runner.model


def _rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


# --- what is wrong is named ---------------------------------------------------------------------


def test_missing_tensor_is_named(folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    _rewrite(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelLoadError, match=f"'{name}' is missing"):
        _load(folder)


def test_misshapen_tensor_is_named_with_both_shapes(folder: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    _rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(31, 64)}))
    with pytest.raises(ModelLoadError, match=rf"'{name}'.*\[31, 64\].*\[32, 64\]"):
        _load(folder)


def test_truncated_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors.*truncated"):
        _load(folder)


def test_file_that_is_no_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"<html>not found</html>")
    with pytest.raises(ModelLoadError, match="cannot be read as safetensors"):
        _load(folder)


@pytest.mark.parametrize("model_type", ["llama", "codegen"])
def test_bin_only_folder_names_the_conversion(folder: Path, model_type: str) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    _edit(folder, model_type=model_type)
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin.*tgi_trio download-weights "):
        _load(folder)


def test_folder_without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"no \.safetensors file"):
        _load(folder)


def test_no_folder_no_config_damaged_config(folder: Path) -> None:
    with pytest.raises(ModelLoadError, match="is not a folder"):
        _load(folder / "nowhere")
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json cannot be read"):
        _load(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="model_type"):
        _load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"holds no config\.json"):
        _load(folder)


def test_config_without_a_number_it_needs(folder: Path) -> None:
    _edit(folder, hidden_size=None)
    with pytest.raises(ModelLoadError, match="hidden_size"):
        _load(folder)


@pytest.mark.parametrize("changes", [{"num_attention_heads": 0}, {"hidden_size": "wide"}])
def test_config_that_makes_no_sense(folder: Path, changes: dict[str, object]) -> None:
    _edit(folder, **changes, head_dim=None)
    with pytest.raises(ModelLoadError, match=r"config\.json cannot be right"):
        _load(folder)


def test_unknown_activation_dtype_and_rotary_are_named(folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"int3.*float32, bfloat16.*--dtype"):
        _load(folder, dtype="int3")
    _edit(folder, hidden_act="snake")
    with pytest.raises(ModelLoadError, match="snake"):
        _load(folder)
    _edit(folder, hidden_act="silu", rope_parameters={"rope_type": "spiral"})
    with pytest.raises(ModelLoadError, match="spiral"):
        _load(folder)


def test_type_that_transformers_does_not_know(folder: Path) -> None:
    _edit(folder, model_type="no_such_model")
    with pytest.raises(ModelLoadError, match="no_such_model"):
        _load(folder)


# --- layouts of a checkpoint --------------------------------------------------------------------


def test_sharded_by_index(folder: Path) -> None:
    expected = _tokens(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    where: dict[Any, Any] = {}
    for part in range(3):
        file = f"model-{part}.safetensors"
        save_file({name: tensors[name] for name in names[part::3]}, folder / file)
        where |= dict.fromkeys(names[part::3], file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    assert _tokens(folder) == expected
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"lacks model-1\.safetensors"):
        _load(folder)
    index.write_text("[]")
    with pytest.raises(ModelLoadError, match=r"index\.json cannot be read"):
        _load(folder)


def test_index_that_names_a_tensor_its_file_lacks(folder: Path) -> None:
    names = list(load_file(folder / "model.safetensors"))
    where = dict.fromkeys(names, "model.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    _rewrite(folder, lambda tensors: tensors.pop("model.norm.weight"))
    with pytest.raises(ModelLoadError, match=r"'model\.norm\.weight' is missing"):
        _load(folder)


def test_names_without_the_base_prefix(checkpoint: Checkpoint, tmp_path: Path) -> None:
    """GPT-2 on the hub was saved from the bare model."""
    source = checkpoint("gpt2")
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(source / "model.safetensors")
    stripped = {name.removeprefix("transformer."): t for name, t in tensors.items()}
    save_file(stripped, tmp_path / "model.safetensors")
    assert _tokens(tmp_path) == _tokens(source)


def test_older_names_of_rotary_and_dtype(folder: Path) -> None:
    """`rope_theta`, `rope_scaling` with `type`, and `torch_dtype` are read as well."""
    scaling = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    _edit(folder, rope_parameters=scaling)
    expected = _tokens(folder)
    older = {"type": "linear", "factor": 2.0}
    _edit(folder, rope_parameters=None, rope_scaling=older, rope_theta=5000.0)
    assert _tokens(folder) == expected
    _edit(folder, dtype=None, torch_dtype="bfloat16")
    assert _load(folder).info.dtype == "bfloat16"
    _edit(folder, torch_dtype="float16")
    assert _load(folder).info.dtype == "float32"
    assert _load(folder, dtype="float16").info.dtype == "float16"


def test_eos_ids_come_from_the_generation_config_first(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert _load(folder).info.eos_ids == (7, 9)
    (folder / "generation_config.json").unlink()
    assert _load(folder).info.eos_ids == (1,)


def test_tied_head_takes_no_memory_of_its_own(checkpoint: Checkpoint) -> None:
    runner = _load(checkpoint("llama", tie_word_embeddings=True))
    model = _decoder(runner)
    assert model.head.weight.data_ptr() == model.embedding.data_ptr()
    file = checkpoint("llama", tie_word_embeddings=True) / "model.safetensors"
    # Norm weights are so few that they are not counted.
    assert model.nbytes() == pytest.approx(file.stat().st_size, rel=0.05)


def test_whole_tensors_are_views_of_the_file(folder: Path) -> None:
    """What needs no change is not copied: a change in the file shows."""
    runner = _load(folder)
    weight = _attention(_decoder(runner).layers[0]).output.weight
    before = weight.clone()
    data = bytearray((folder / "model.safetensors").read_bytes())
    wanted = before.numpy().tobytes()
    start = bytes(data).index(wanted)
    with open(folder / "model.safetensors", "r+b") as file:
        file.seek(start)
        file.write(bytes(len(wanted)))
    assert not weight.any() and before.any()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")
def test_large_weights_are_packed_and_given_up(checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama", hidden_size=512, intermediate_size=1024)
    runner = _load(folder)
    joined = [_attention(layer).qkv for layer in _decoder(runner).layers]
    assert all(qkv.packed is not None for qkv in joined)
    assert not any(qkv.weight.numel() for qkv in joined)
    file = folder / "model.safetensors"
    assert runner.model.nbytes() == pytest.approx(file.stat().st_size, rel=0.05)


# --- warm-up ------------------------------------------------------------------------------------


def test_warm_up_sizes_the_cache(checkpoint: Checkpoint) -> None:
    runner = _load(checkpoint("llama"))
    asked = runner.warm_up(WarmupRequest(64, 256, 16, 1000))
    assert asked.blocks == 1 + -(-1000 // BLOCK_SIZE)  # block 0 is never handed out
    assert asked.kv_bytes == asked.blocks * BLOCK_SIZE * runner.info.kv_bytes_per_token
    free = runner.warm_up(WarmupRequest(64, 256, 16, 0))
    assert free.blocks * BLOCK_SIZE >= 16 * 256 and free.spare_bytes > 0
    with pytest.raises(ConfigurationError, match="--max-batch-total-tokens"):
        runner.warm_up(WarmupRequest(64, 256, 16, 1 << 50))


def test_step_before_warm_up(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigurationError, match="warmed up"):
        run(_load(checkpoint("llama")), [sequence(0, [5, 6], [1], new=2)])


def test_fresh_cache_is_zero() -> None:
    """Masked slots are still multiplied: garbage that reads as NaN would spread."""
    cache = KVCache(KVShape(2, 2, 8), 3, torch.float32, torch.device("cpu"))
    assert not cache.key.any() and not cache.value.any()


def test_a_value_that_is_its_key_is_kept_once() -> None:
    shape = KVShape(layers=2, kv_heads=1, head_dim=8, same=True)
    cache = KVCache(shape, 3, torch.float32, torch.device("cpu"))
    assert cache.value is cache.key
    assert shape.bytes_per_token(torch.float32) == 2 * 8 * 4
    assert cache.nbytes == 3 * BLOCK_SIZE * shape.bytes_per_token(torch.float32)


def test_transformers_is_not_imported_on_the_served_path(checkpoint: Checkpoint) -> None:
    folder = checkpoint("llama")
    code = f"""
import sys
from pathlib import Path
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.shard.torch_backend.torch_loading import load_torch_runner

class Nothing:
    pass

settings = ShardSettings(model_path=Path({str(folder)!r}))
runner = load_torch_runner(settings, read_config(settings.model_path), sampler=Nothing())
runner.warm_up(WarmupRequest(64, 128, 4, 512))
unwanted = {{"transformers", "trio", "quart", "hypercorn"}} & set(sys.modules)
print("unwanted", sorted(unwanted))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "unwanted []"


def _tokens(folder: Path) -> list[int]:
    runner, _ = load(folder)
    row = sequence(0, [9, 8, 7, 30], [1, 2], new=16)
    run(runner, [row])
    return generated(row)


def _edit(folder: Path, **changes: object) -> None:
    """Change values of config.json; None takes one away."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def test_a_tied_head_may_be_stored_under_its_own_name_alone(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """`save_model` stores shared tensors once, under the first name in alphabetical order."""
    source = checkpoint("llama", tie_word_embeddings=True)
    shutil.copy(source / "config.json", tmp_path)
    save_model(AutoModelForCausalLM.from_pretrained(source), str(tmp_path / "model.safetensors"))
    stored = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" in stored and "model.embed_tokens.weight" not in stored
    texts = []
    for folder in (source, tmp_path):
        runner, _ = load(folder, dtype="float32")
        row = sequence(0, [5, 6, 7], [1, 2], 8, ignore_eos=True)
        run(runner, [row])
        texts.append(generated(row))
    assert texts[0] == texts[1] and len(set(texts[0])) > 1
