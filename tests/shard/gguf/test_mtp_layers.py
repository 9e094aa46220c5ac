"""Layers that draft further tokens, from llama.cpp's files: they draft as the checkpoint's do."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.shard.gguf.converted import convert
from tests.shard.gguf.converted_first import made
from tests.shard.gguf.files import gguf, write
from tests.shard.speculation.mtp_support import mtp_checkpoint
from tests.shard.speculation.test_mtp import find_drafts, load
from tgi_trio.model.config import read_config
from tgi_trio.model.facts import read_model_facts
from tgi_trio.model.gguf.folder import gguf_folder
from tgi_trio.model.speculators.mtp import count_mtp

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("quantised", [False, True])
def test_they_draft_as_the_numbers_in_the_file_say(quantised: bool, tmp_path: Path) -> None:
    name, source, said, arrays = made(
        lambda family, **options: mtp_checkpoint(tmp_path / "model", family, **options), "glm4moe"
    )
    kind = gguf.GGMLQuantizationType.Q8_0
    blocks = {
        own: gguf.quantize(np.ascontiguousarray(array), kind)
        for own, array in arrays.items()
        if quantised and array.ndim > 1 and array.shape[-1] % 32 == 0 and "ffn_gate_inp" not in own
    }
    exact = {own: gguf.dequantize(content, kind) for own, content in blocks.items()}
    folders = []
    for file, own in (("blocks", blocks), ("exact", exact)):
        write(tmp_path / f"{file}.gguf", name, said, arrays | own)
        cache = tmp_path / file
        folders.append(gguf_folder(tmp_path / f"{file}.gguf", cache, tokenizer=False))
    assert read_model_facts(folders[0]).mtp_layers == 1
    some = slice(6 if quantised else None)  # then rounding may decide between two tokens
    expected = find_drafts(load(source if not quantised else folders[1]))[0][some]
    assert find_drafts(load(folders[0]))[0][some] == expected
    kernels = load(folders[0], cpu_backend="kernels", activations=16)
    assert find_drafts(kernels)[0][some] == expected


@pytest.mark.parametrize(
    ("name", "family"),
    [
        *(("glm-dsa", "glm_moe_dsa"), ("deepseek32", "deepseek_v32")),  # of latents
        *(("qwen35", "qwen3_5_text"), ("qwen35moe", "qwen3_5_moe_text")),  # of other names
    ],
)
def test_such_layers_of_newer_models_are_found(name: str, family: str, tmp_path: Path) -> None:
    source = mtp_checkpoint(tmp_path / "model", family)
    config = json.loads((source / "config.json").read_text())
    stored = {
        own: tensor.float().numpy()
        for own, tensor in load_file(source / "model.safetensors").items()
    }
    said, arrays = convert(name, config, stored)
    said |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": list(map(str, range(512)))}
    write(tmp_path / "model.gguf", name, said, arrays)
    folder = gguf_folder(tmp_path / "model.gguf", tmp_path / "cache", tokenizer=False)
    assert count_mtp(read_config(folder)) == 1
    assert find_drafts(load(folder))[0] == find_drafts(load(source))[0]
