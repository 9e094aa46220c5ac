"""Writes GGUF files as the format's description has them, without a library of the format's."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

F32, F16, Q8_0, IQ2_XXS = 0, 1, 8, 16  # numbers of types
Tensor = tuple[tuple[int, ...], int, bytes]  # shape (rows last but one), type, content
ALIGNMENT = 32

_U8, _I32, _U32, _F32, _BOOL, _STRING, _LIST, _U64 = 0, 5, 4, 6, 7, 8, 9, 10


def string(text: str) -> bytes:
    data = text.encode("utf-8", errors="surrogatepass")
    return struct.pack("<Q", len(data)) + data


def value(content: Any) -> bytes:
    """Return a value's type and bytes, of the type that its Python type suggests."""
    if isinstance(content, bool):
        return struct.pack("<I?", _BOOL, content)
    if isinstance(content, int):
        kind, letter = (
            (_U32, "I") if 0 <= content < 1 << 32 else (_U64 if content > 0 else _I32, "q")
        )
        return struct.pack(f"<I{letter if kind != _I32 else 'i'}", kind, content)
    if isinstance(content, float):
        return struct.pack("<If", _F32, content)
    if isinstance(content, str):
        return struct.pack("<I", _STRING) + string(content)
    elements = [value(each) for each in content]
    kind = struct.unpack("<I", elements[0][:4])[0] if elements else _U8
    return struct.pack("<IIQ", _LIST, kind, len(elements)) + b"".join(e[4:] for e in elements)


def gguf(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    version: int = 3,
    alignment: int = ALIGNMENT,
) -> bytes:
    """Return a file's bytes."""
    head = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(metadata))
    head += b"".join(string(name) + value(content) for name, content in metadata.items())
    data = b""
    for name, (shape, kind, content) in tensors.items():
        dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += string(name) + dimensions + struct.pack("<IQ", kind, len(data))
        data += content + bytes(-len(content) % alignment)
    return head + bytes(-len(head) % alignment) + data


def float32(values: Any) -> Tensor:
    array = np.ascontiguousarray(values, np.float32)
    return array.shape, F32, array.tobytes()


def q8_0(values: Any) -> Tensor:
    """Return a matrix whose blocks of 32 have scales that float16 holds exactly."""
    array = np.asarray(values, np.float32)
    blocks = array.reshape(-1, 32)
    scales = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype(np.float16)
    safe = np.where(scales == 0, 1, scales).astype(np.float32)
    codes = np.clip(np.rint(blocks / safe), -127, 127).astype(np.int8)
    return array.shape, Q8_0, np.hstack([scales.view(np.uint8), codes.view(np.uint8)]).tobytes()


_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_INNER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def llama_tensors(folder: Path, heads: int, kv_heads: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors of a Llama's folder, float32, as llama.cpp names and turns them.

    Its converter moves the two halves of every query and key head into pairs.
    """
    found = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        array = tensor.float().numpy()
        part, _, ending = name.rpartition(".")
        if part in _OUTER:
            found[f"{_OUTER[part]}.{ending}"] = array
            continue
        layer, _, role = part.removeprefix("model.layers.").partition(".")
        count = {"self_attn.q_proj": heads, "self_attn.k_proj": kv_heads}.get(role)
        if count is not None:
            halves = array.reshape(count, 2, -1, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        found[f"blk.{layer}.{_INNER[role]}.{ending}"] = array
    return found


def llama_metadata(folder: Path, pre: str = "smollm") -> dict[str, Any]:
    """Return the metadata of a Llama's folder with a byte-level tokenizer."""
    config = json.loads((folder / "config.json").read_text())
    return {
        "general.architecture": "llama",
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.dimension_count": config["head_dim"],
        "llama.rope.freq_base": config["rope_parameters"]["rope_theta"],
        **tokenizer_metadata(folder, pre),
    }


def tokenizer_metadata(folder: Path, pre: str) -> dict[str, Any]:
    """Return the metadata of a folder's byte-level tokenizer, whose texts are cut as `pre` says."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    words = json.loads((folder / "tokenizer_config.json").read_text())
    ids = tokenizer["model"]["vocab"] | {t["content"]: t["id"] for t in tokenizer["added_tokens"]}
    tokens = sorted(ids, key=lambda token: ids[token])
    special = {t["content"] for t in tokenizer["added_tokens"] if t["special"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": ids[words["bos_token"]],
        "tokenizer.ggml.eos_token_id": ids[words["eos_token"]],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": words["chat_template"],
    }


def write_llama(
    source: Path, file: Path, changes: Mapping[str, Any] | None = None, *, quantised: bool = False
) -> Path:
    """Write a Llama's folder as one file, float32 or (its matrices) Q8_0. Returns the file.

    `changes`: of the metadata; None takes a key out.
    """
    config = json.loads((source / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tensors = {
        name: q8_0(array) if quantised and array.ndim == 2 else float32(array)
        for name, array in llama_tensors(source, heads, kv_heads).items()
    }
    metadata = llama_metadata(source) | dict(changes or {})
    kept = {name: content for name, content in metadata.items() if content is not None}
    file.write_bytes(gguf(kept, tensors))
    return file


def write_parts(source: Path, folder: Path, count: int) -> list[Path]:
    """Write a Llama's folder as a split model; returns its files."""
    config = json.loads((source / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tensors = {n: float32(a) for n, a in llama_tensors(source, heads, kv_heads).items()}
    files = []
    for number in range(count):
        own = dict(list(tensors.items())[number::count])
        metadata = {} if number else llama_metadata(source)
        metadata |= {
            "split.no": number,
            "split.count": count,
            "split.tensors.count": len(tensors),
        }
        files.append(folder / f"model-{number + 1:05d}-of-{count:05d}.gguf")
        files[-1].write_bytes(gguf(metadata, own))
    return files
