"""Write a checkpoint of `harness/checkpoints.py` as GGUF: the same bits, under llama.cpp's names.

    PEER/venv/bin/python bench/peers/to_gguf.py CHECKPOINT OUTPUT NUMBERS

NUMBERS is BF16, or Q8_0 for matrices that are quantised as llama.cpp does it. Matrices of GPTQ's or
AWQ's codes become Q4_0 in any case, which says the very same weights where every zero point is 8.

Runs in llama.cpp's environment, with numpy and gguf. llama.cpp's own converter refuses tokenizers
that it does not know by their hash, and ours is made up.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj_exps": "ffn_gate_exps",
    "mlp.up_proj_exps": "ffn_up_exps",
    "mlp.down_proj_exps": "ffn_down_exps",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}
# Tensors with names of their own, and what they are called.
_WHOLE = {"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}
_ARCHITECTURES = {"qwen3_moe": "qwen3moe", "qwen3_5_text": "qwen35"}
_EXPERTS = ".mlp.experts."
_OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
}


# How numbers are read; bfloat16 as its bits.
_DTYPES: dict[str, type[np.generic]] = {"BF16": np.uint16, "F16": np.float16, "I32": np.int32}
_NIBBLES, _ZERO, _BLOCK = 8, 8, 32  # codes in an int32, the code of 0, weights in a block of Q4_0
# By format: the nibble of an int32 where each of eight codes is, and its word of zero points.
_PLACES = {"gptq": (0, 1, 2, 3, 4, 5, 6, 7), "awq": (0, 4, 1, 5, 2, 6, 3, 7)}
_ZEROS = {"gptq": 0x77777777, "awq": -0x77777778}  # GPTQ stores one less


def tensors(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield names and arrays: uint16 for the bits of bfloat16, float16, int32."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    data = np.memmap(file, np.uint8, "r", offset=8 + size)
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield name, data[begin:end].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])


def with_blocks(tensors: Iterator[tuple[str, Any]], form: str) -> Iterator[tuple[str, Any]]:
    """Yield blocks of Q4_0, uint8 [out, bytes], for the parts of a matrix of codes.

    `form`: gptq or awq. Raises SystemExit for zero points that Q4_0 has not.
    """
    parts: dict[str, dict[str, Any]] = {}
    for name, found in tensors:
        matrix, _, part = name.rpartition(".")
        if part not in ("qweight", "qzeros", "scales", "g_idx"):
            yield name, found
            continue
        own = parts.setdefault(matrix, {})
        own[part] = found
        if own.keys() >= {"qweight", "qzeros", "scales"} and part != "g_idx":
            if (own["qzeros"] != _ZEROS[form]).any():
                raise SystemExit(f"to_gguf: {matrix} has zero points other than {_ZERO}")
            yield f"{matrix}.weight", blocks_of(form, own["qweight"], own["scales"])


def blocks_of(form: str, words: Any, scales: Any) -> Any:
    """Return blocks of Q4_0, uint8 [out, bytes], of packed codes and float16 [groups, out]."""
    shifts = np.array(_PLACES[form], np.int32) * 4
    along = words[:, None, :] if form == "gptq" else words[:, :, None]
    codes = along >> (shifts[:, None] if form == "gptq" else shifts) & 15
    outputs = scales.shape[1]
    lanes = codes.reshape(-1, outputs).T.reshape(outputs, -1, 2, _BLOCK // 2).astype(np.uint8)
    nibbles = lanes[:, :, 0] | lanes[:, :, 1] << 4
    repeats = nibbles.shape[1] // scales.shape[0]  # blocks in a group
    heads = np.repeat(np.ascontiguousarray(scales.T), repeats, axis=1)[:, :, None].view(np.uint8)
    return np.concatenate((heads, nibbles), axis=2).reshape(outputs, -1)


def with_stacked_experts(tensors: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield one tensor for all experts of a layer, as if it were that of an MLP."""
    stacks: dict[str, dict[int, Any]] = {}
    for name, bits in tensors:
        layer, _, rest = name.partition(_EXPERTS)
        if rest:
            number, _, part = rest.partition(".")
            stacks.setdefault(f"{layer}.mlp.{part}", {})[int(number)] = bits
        else:
            yield name, bits
    for name, stack in stacks.items():
        yield name, np.stack([stack[i] for i in range(len(stack))])


def renamed(name: str, config: dict[str, Any]) -> str:
    """Return llama.cpp's name of a tensor."""
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    _, _, layer, *part, kind = name.split(".")
    if whole := _WHOLE.get(".".join([*part, kind])):
        return f"blk.{layer}.{whole}"
    role = _LAYER[".".join(part)]
    if is_hybrid(config) and role == "ffn_norm":
        role = "post_attention_norm"
    return f"blk.{layer}.{role}.{kind}"


def is_hybrid(config: dict[str, Any]) -> bool:
    """Return whether some layers have a delta rule in the place of attention."""
    return "linear_num_key_heads" in config


def vector(name: str, bits: Any, config: dict[str, Any]) -> Any:
    """Return a vector or kernel of a hybrid as llama.cpp wants it, of others as it is.

    Norms have the one that is added to them, rates of decay are no logarithms.
    """
    values = to_float32(bits)
    if not is_hybrid(config):
        return values
    if name.endswith("A_log"):
        return -np.exp(values)
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return values + np.float32(1)
    return values.squeeze()


def add_states(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Write the numbers of delta rules. llama.cpp wants as many values to a head as keys."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if keys != heads:
        raise SystemExit("to_gguf: value heads that share a key are not among our shapes")
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(keys)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * config["linear_value_head_dim"])
    writer.add_full_attention_interval(config["layer_types"].index("full_attention") + 1)
    writer.add_rope_dimension_sections([11, 11, 10, 0])


def rotary_pairs_side_by_side(weight: Any, heads: int) -> Any:
    """Reorder the rows of a llama's query or key matrix: both halves of a pair are neighbours."""
    halves = weight.reshape(heads, 2, -1, weight.shape[-1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def rotary_divisors(config: dict[str, Any]) -> Any:
    """Return by what Llama 3 divides each rotary frequency, float32 [head_dim / 2].

    Waves longer than the original context are slowed by `factor`, short ones are left, and in
    between it is mixed. (llama.cpp's rope_freqs)
    """
    scaling, dim = config["rope_scaling"], config["head_dim"]
    if scaling["rope_type"] != "llama3":
        raise SystemExit(f"to_gguf: rope_type {scaling['rope_type']} is not among our shapes")
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    frequencies = config["rope_theta"] ** -(np.arange(0, dim, 2) / dim)
    turns = scaling["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - kept) / scaling["factor"] + kept)).astype(np.float32)


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any], numbers: str) -> None:
    heads = config["num_attention_heads"]
    dim = config.get("head_dim", config["hidden_size"] // heads)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    rope = config.get("rope_parameters", config)
    writer.add_rope_dimension_count(int(dim * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if is_hybrid(config):
        add_states(writer, config)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{numbers}"])


def add_tokenizer(writer: gguf.GGUFWriter, checkpoint: Path, config: dict[str, Any]) -> None:
    """Write the byte-level BPE; its pre-tokenizer is GPT-2's."""
    found = json.loads((checkpoint / "tokenizer.json").read_text())
    special = {token["content"] for token in found["added_tokens"]}
    model = found["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = [gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(True)


def to_float32(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def add_tensor(
    writer: gguf.GGUFWriter, name: str, bits: Any, config: dict[str, Any], numbers: str
) -> None:
    """Add a matrix as BF16, Q8_0 or its blocks, a vector and a router as float32."""
    if bits.ndim == 1 or name.endswith(("mlp.gate.weight", "conv1d.weight")):
        writer.add_tensor(renamed(name, config), vector(name, bits, config))
        return
    if bits.ndim == 3:
        name = name.replace("_proj", "_proj_exps")
    if config["model_type"] == "llama" and "q_proj" in name:
        bits = rotary_pairs_side_by_side(bits, config["num_attention_heads"])
    if config["model_type"] == "llama" and "k_proj" in name:
        bits = rotary_pairs_side_by_side(bits, config["num_key_value_heads"])
    kind = gguf.GGMLQuantizationType["Q4_0" if bits.dtype == np.uint8 else numbers]
    raw = np.ascontiguousarray(bits).view(np.uint8)
    if numbers != "BF16" and bits.dtype == np.uint16:
        raw = gguf.quants.quantize(to_float32(bits), kind)
    writer.add_tensor(renamed(name, config), raw, raw_dtype=kind)


def main(checkpoint: Path, output: Path, numbers: str) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    kind = config["model_type"]
    writer = gguf.GGUFWriter(output, _ARCHITECTURES.get(kind, kind))
    add_config(writer, config, numbers)
    add_tokenizer(writer, checkpoint, config)
    found = tensors(checkpoint / "model.safetensors")
    if said := config.get("quantization_config"):
        found = with_blocks(found, said["quant_method"])
    for name, bits in with_stacked_experts(found):
        add_tensor(writer, name, bits, config, numbers)
    if "rope_scaling" in config:
        writer.add_tensor("rope_freqs.weight", rotary_divisors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
