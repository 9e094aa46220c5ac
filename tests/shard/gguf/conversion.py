"""What llama.cpp's converter does to every model, or to those of several kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Config = Mapping[str, Any]
Tensors = Iterator[tuple[str, Array]]
Modify = Callable[[str, Array, Config], Tensors]


def common(config: Config) -> dict[str, Any]:
    """Return what is written of every model."""
    sets: dict[str, Any] = config.get("rope_parameters") or {}
    rope: dict[str, Any] = sets.get("full_attention", sets)
    said = {
        "block_count": config["num_hidden_layers"],
        "context_length": config.get("max_position_embeddings") or config.get("model_max_length"),
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size"),
        "attention.head_count": config.get("num_attention_heads"),
        "attention.head_count_kv": config.get("num_key_value_heads"),
        "rope.freq_base": rope.get("rope_theta"),
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps"),
        "expert_count": config.get("num_local_experts", config.get("num_experts")),
        "expert_used_count": config.get(
            "num_experts_per_tok", config.get("num_experts_per_token", config.get("top_k_experts"))
        ),
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
        "attention.key_length": config.get("head_dim"),
        "attention.value_length": config.get("head_dim"),
    }
    if rope.get("rope_type") == "yarn":
        said |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope.get("beta_fast"),
            "rope.scaling.yarn_beta_slow": rope.get("beta_slow"),
        }
    return {key: value for key, value in said.items() if value is not None}


def halves_of_latents(own: str, array: Array, heads: int, config: Config) -> Tensors:
    both = array.reshape(heads, -1, array.shape[-1])
    key, layer = config["qk_nope_head_dim"], own.split(".")[2]
    yield f"blk.{layer}.attn_k_b.weight", both[:, :key].swapaxes(1, 2)
    yield f"blk.{layer}.attn_v_b.weight", both[:, key:]


def side_by_side(own: str, array: Array, config: Config) -> Tensors:
    """Rows of queries and keys that turn together lie side by side."""
    counts = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for part, count in counts.items():
        if f".{part}." in own:
            halves = array.reshape(config[count], 2, -1, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
    yield own, array


def llama3_divisors(rope: Config, pairs: int) -> Array:
    """Return by what Llama 3 divides the frequencies of as many pairs."""
    frequencies = rope["rope_theta"] ** -(np.arange(pairs) / pairs)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    divisors: Array = 1 / ((1 - kept) / rope["factor"] + kept)
    return divisors
