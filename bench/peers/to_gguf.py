"""Write a llama or qwen2 checkpoint as GGUF, its weights in bfloat16 as they are.

    FOLDER/venv/bin/python bench/peers/to_gguf.py CHECKPOINT OUTPUT.gguf

Runs in the peer's own environment (numpy and gguf). Without a tokenizer: the benchmark feeds ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_LAYER_PARTS = {
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
_BF16_FILE = 32  # llama.cpp's number for files whose weights are bfloat16


def tensors(path: Path) -> dict[str, Any]:
    """Return name -> uint16 array, the bits of bfloat16."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    data = np.memmap(path, np.uint8, "r", 8 + size)
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            found[name] = data[begin:end].view(np.uint16).reshape(entry["shape"])
    return found


def renamed(name: str) -> str:
    """Return llama.cpp's name of a tensor."""
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, *part, kind = name.split(".")
    return f"blk.{layer}.{_LAYER_PARTS['.'.join(part)]}.{kind}"


def neighbours(weight: Any, heads: int) -> Any:
    """Reorder rows so that rotary pairs are neighbours, as llama.cpp wants them of llama."""
    parts = weight.reshape(heads, 2, -1, weight.shape[-1])
    return np.ascontiguousarray(parts.swapaxes(1, 2).reshape(weight.shape))


def main(checkpoint: Path, output: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    kind = config["model_type"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim", config["hidden_size"] // heads)
    writer = gguf.GGUFWriter(output, kind)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(_BF16_FILE)
    for name, bits in tensors(checkpoint / "model.safetensors").items():
        if bits.ndim == 1:
            values = (bits.astype(np.uint32) << 16).view(np.float32)
            writer.add_tensor(renamed(name), values)
            continue
        if kind == "llama" and ("q_proj" in name or "k_proj" in name):
            bits = neighbours(bits, heads if "q_proj" in name else kv_heads)
        writer.add_tensor(
            renamed(name),
            np.ascontiguousarray(bits).view(np.uint8),
            raw_dtype=gguf.GGMLQuantizationType.BF16,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
