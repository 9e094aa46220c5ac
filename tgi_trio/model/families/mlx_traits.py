"""What mlx-lm's form of a checkpoint means for the config of its family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.checkpoint_files import read_headers, stored_names
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families.mixtures import SEPARATE_EXPERTS
from tgi_trio.model.mlx_names import has_experts_apart

# Families with gate and up of an expert, or more, in one tensor, which mlx-lm divides.
_DIVIDED: Final = (
    *("dbrx", "gemma4_text", "gpt_oss", "granitemoe", "granitemoehybrid", "llama4_text"),
    *("mistral4", "qwen3_vl_moe_text"),
)


def fit_mlx(config: ModelConfig) -> ModelConfig:
    """Return `config` adapted to a checkpoint of mlx-lm's, or unchanged: it is another's."""
    if config.text_type not in (*_DIVIDED, "falcon_h1"):
        return config
    try:
        more = _read_traits(config)
    except ModelLoadError:  # there are no weights: code that needs them reports it
        return config
    return replace(config, values={**config.values, **more}) if more else config


def _read_traits(config: ModelConfig) -> dict[str, Any]:
    if config.text_type == "falcon_h1":
        taps = read_headers(config.folder).get("model.layers.0.mamba.conv1d.weight")
        return _fold_factors(config) if taps is not None and taps.shape[-1:] == (1,) else {}
    names = stored_names(config.folder)
    divided = has_experts_apart(names)
    if config.text_type == "granitemoehybrid":  # dense ones have MLPs that are divided
        divided = divided or any(".mlp.gate_proj." in name for name in names)
    return {SEPARATE_EXPERTS: True} if divided else {}


def _fold_factors(config: ModelConfig) -> dict[str, Any]:
    """Return Falcon H1's factors, which mlx-lm multiplies into weights: all but those of keys, and
    of what values are made of.
    """
    head, embedding, entry = (
        float(config.get(f"{name}_multiplier", 1.0))
        for name in ("lm_head", "embedding", "attention_in")
    )
    tied = bool(config.get("tie_word_embeddings", False))
    return {
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": entry,
        "embedding_multiplier": 1.0,
        "lm_head_multiplier": head / embedding if tied else 1.0,
        "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": 1.0,
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0] * 5,
    }
