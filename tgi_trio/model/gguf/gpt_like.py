"""Architectures of GPT-2's shape: their metadata in the families' terms.

Files do not state which approximation of GELU a model uses: each gets that of its family.
"""

from __future__ import annotations

from tgi_trio.model.gguf.files import GgufModel
from tgi_trio.model.gguf.stated import Values, read_number

_EPS = 1e-5  # of LayerNorms, if the file does not state it


def _layer_norm_eps(model: GgufModel) -> float:
    return read_number(model, "attention.layer_norm_epsilon", _EPS)


def _gpt2_numbers(model: GgufModel, values: Values) -> Values:
    return {
        "n_embd": values["hidden_size"],
        "n_head": values["num_attention_heads"],
        "n_layer": values["num_hidden_layers"],
        "n_inner": values["intermediate_size"],
        "n_positions": values["max_position_embeddings"],
        "layer_norm_epsilon": _layer_norm_eps(model),
    }


def gpt2(model: GgufModel, values: Values) -> Values:
    return {"model_type": "gpt2"} | _gpt2_numbers(model, values)


def starcoder(model: GgufModel, values: Values) -> Values:
    """StarCoder, whose heads share one key: llama.cpp has no other variant."""
    return {"model_type": "gpt_bigcode", "multi_query": True} | _gpt2_numbers(model, values)


def gptneox(model: GgufModel, values: Values) -> Values:
    return {
        "model_type": "gpt_neox",
        "use_parallel_residual": bool(model.get("use_parallel_residual", True)),
        "attention_bias": "blk.0.attn_qkv.bias" in model.tensors,
        "layer_norm_eps": _layer_norm_eps(model),
    }


def bloom(model: GgufModel, values: Values) -> Values:
    return {
        "model_type": "bloom",
        "n_layer": values["num_hidden_layers"],
        "n_head": values["num_attention_heads"],
        "layer_norm_epsilon": _layer_norm_eps(model),
    }


def falcon(model: GgufModel, values: Values) -> Values:
    """Falcon, whose three variants differ in their heads and norms.

    In the first all heads share a key; in the others groups do, and the largest models have two
    norms.
    """
    kv_heads = values.get("num_key_value_heads", 1)
    return {
        "model_type": "falcon",
        "new_decoder_architecture": kv_heads > 1,
        "multi_query": kv_heads == 1,
        "num_kv_heads": kv_heads,
        "num_ln_in_parallel_attn": 2 if "blk.0.attn_norm_2.weight" in model.tensors else 1,
        "parallel_attn": True,
        "bias": "blk.0.attn_qkv.bias" in model.tensors,
        "alibi": False,
        "ffn_hidden_size": values["intermediate_size"],
        "layer_norm_epsilon": _layer_norm_eps(model),
    }


def mpt(model: GgufModel, values: Values) -> Values:
    slopes = read_number(model, "attention.max_alibi_bias", 0.0)
    return {
        "model_type": "mpt",
        "d_model": values["hidden_size"],
        "n_heads": values["num_attention_heads"],
        "n_layers": values["num_hidden_layers"],
        "no_bias": not any(name.endswith(".bias") for name in model.tensors),
        "layer_norm_epsilon": _layer_norm_eps(model),
        "attn_config": {
            "alibi": slopes > 0,
            "alibi_bias_max": slopes,
            "clip_qkv": model.get("attention.clamp_kqv"),
            "qk_ln": any("attn_q_norm" in name for name in model.tensors),
        },
    }
