"""Random-weight checkpoints in the shapes of real models, for benchmarks.

    python -m bench.harness.checkpoints M /tmp/model-m

Speed is that of the real model, quality is none. bfloat16, one safetensors file, and a tokenizer in
which every id is text. A shape that was made before is left as it is.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tgi_trio.testing.checkpoints import make_tokenizer

# Sources: config.json of SmolLM2-135M, Qwen2.5-0.5B and Llama-3.2-1B.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {  # nobody's: to see in a second whether a benchmark runs
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 2048,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
    },
    "S": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
    },
    "M": {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    },
    "L": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "K": {  # Qwen3-0.6B's layers, 12 of 28, with a third of its vocabulary
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    },
    "E": {  # nobody's: OLMoE's experts and Qwen3's layers, small enough to be held several times
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    },
    "H": {  # Qwen3.5-0.8B's layers, with a fifth of its vocabulary
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 6,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000.0,
            "partial_rotary_factor": 0.25,
        },
    },
}
_ALL = {
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def make(shape: str, folder: Path, *, seed: int = 0) -> Path:
    """Write the checkpoint of `shape`, a key of SHAPES, to `folder` unless it is there.

    Matrices keep the size of what passes through them, so activations stay in a model's range.
    Returns `folder`.
    """
    import torch
    from safetensors.torch import save_file

    config: dict[str, Any] = _ALL | SHAPES[shape]
    done = folder / "config.json"  # written last
    if done.exists() and json.loads(done.read_text()) == config:
        return folder
    make_tokenizer(folder, config["vocab_size"])
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, size in tensor_sizes(config).items():
        if len(size) == 1:
            value = 0.0 if name.endswith("bias") else 1.0
            tensors[name] = torch.full(size, value, dtype=torch.bfloat16)
        else:
            tensors[name] = torch.empty(size, dtype=torch.bfloat16).normal_(
                std=size[-1] ** -0.5, generator=generator
            )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    done.write_text(json.dumps(config, indent=2))
    return folder


def tensor_sizes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of what SHAPES describes, by name."""
    sizes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], config["hidden_size"]),
        "model.norm.weight": (config["hidden_size"],),
    }
    if not config["tie_word_embeddings"]:
        sizes["lm_head.weight"] = (config["vocab_size"], config["hidden_size"])
    attention, mlp = _attention_sizes(config), _mlp_sizes(config)
    kinds = config.get("layer_types", ["full_attention"] * config["num_hidden_layers"])
    for index, kind in enumerate(kinds):
        own = attention if kind == "full_attention" else _delta_sizes(config)
        layer = own | mlp
        sizes |= {f"model.layers.{index}.{name}": size for name, size in layer.items()}
    return sizes


def _attention_sizes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads, kind = config["hidden_size"], config["num_attention_heads"], config["model_type"]
    dim = config.get("head_dim", hidden // heads)
    query, key = heads * dim, config["num_key_value_heads"] * dim
    gated = kind == "qwen3_5_text"
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (2 * query if gated else query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
    }
    if kind in ("qwen3", "qwen3_moe", "qwen3_5_text"):
        layer |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    if kind == "qwen2":
        for name, size in (("q", query), ("k", key), ("v", key)):
            layer[f"self_attn.{name}_proj.bias"] = (size,)
    return layer


def _delta_sizes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a delta rule, as Qwen 3.5 stores it."""
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    dim = config["linear_value_head_dim"]
    channels = 2 * keys + heads * dim
    parts: dict[str, tuple[int, ...]] = {
        "in_proj_qkv.weight": (channels, hidden),
        "in_proj_z.weight": (heads * dim, hidden),
        "in_proj_b.weight": (heads, hidden),
        "in_proj_a.weight": (heads, hidden),
        "conv1d.weight": (channels, 1, config["linear_conv_kernel_dim"]),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (dim,),
        "out_proj.weight": (hidden, heads * dim),
    }
    return {f"linear_attn.{name}": size for name, size in parts.items()}


def _mlp_sizes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors of the MLP or of experts, and the norms that all layers have."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    places = ["mlp."]
    if count := config.get("num_experts", 0):
        inner, places = config["moe_intermediate_size"], [f"mlp.experts.{i}." for i in range(count)]
        layer["mlp.gate.weight"] = (count, hidden)
    for place in places:
        layer[f"{place}gate_proj.weight"] = layer[f"{place}up_proj.weight"] = (inner, hidden)
        layer[f"{place}down_proj.weight"] = (hidden, inner)
    return layer


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="bench.harness.checkpoints", description=__doc__)
    parser.add_argument("shape", choices=sorted(SHAPES))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args(argv)
    folder = make(options.shape, options.folder)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{folder}: shape {options.shape}, {size / 1e9:.2f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
