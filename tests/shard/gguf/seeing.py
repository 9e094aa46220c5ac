"""Tiny random models that see, as transformers saves them, and as a text and a projector."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.shard.gguf import converted, converted_first
from tests.shard.gguf.files import write
from tgi_trio.model.wrappers import text_name

# The architecture of the text's file, by the family's name among tiny models, and a case's own.
ARCHITECTURES = {
    "gemma3": "gemma3",
    "gemma4": "gemma4",
    "gemma4/larger": "gemma4",
    "gemma4/clipped": "gemma4",
    "glm4v": "glm4",
    "idefics3": "llama",
    "internvl": "qwen2",
    "internvl/normed": "qwen3",
    "lfm2_vl": "lfm2",
    "llama4": "llama4",
    "mistral3": "llama",
    "mistral3/ministral": "mistral3",
    "pixtral": "llama",
    "qwen2_vl": "qwen2vl",
    "qwen2_5_vl": "qwen2vl",
    "qwen3_vl": "qwen3vl",
    "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe",
    "qwen3_vl_moe": "qwen3vlmoe",
    "smolvlm": "llama",
}
_GRID = {"out_hidden_size": 64, "patch_size": 4, "num_heads": 2, "hidden_act": "silu"}
_QWEN = _GRID | {"depth": 4, "hidden_size": 16, "intermediate_size": 24}
_BLOCKS = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "image_size": 16, "patch_size": 8},
}
_GEMMA4 = {
    **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4},
    **{"patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 128},
}
# Options of the text and, as `whole`, of the tower: of several blocks, and what files cannot say
# left as it is in published models.
OPTIONS: dict[str, dict[str, Any]] = {
    "gemma3": {"query_pre_attn_scalar": 16},
    "gemma4": {"whole": {"vision_config": _GEMMA4}},
    "gemma4/larger": {
        "whole": {"vision_config": _GEMMA4},
        **{"num_kv_shared_layers": 0, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0},
        "use_bidirectional_attention": "vision",
    },
    "gemma4/clipped": {
        "whole": {"vision_config": _GEMMA4 | {"use_clipped_linears": True, "standardize": True}}
    },
    "glm4v": {
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "rope_parameters": {
            **{"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
            "partial_rotary_factor": 0.5,
        },
        "whole": {"vision_config": _QWEN | {"depth": 2, "image_size": 16, "hidden_size": 16}},
    },
    "internvl/normed": {
        "model_type": "qwen3",
        "head_dim": 16,
        "whole": {
            "vision_config": {
                **{"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
                **{"num_attention_heads": 2, "image_size": [16, 16], "patch_size": [8, 8]},
                **{"use_qk_norm": True, "attention_bias": False, "norm_type": "rms_norm"},
            }
        },
    },
    "llama4": {"attention_chunk_size": 8192},
    "qwen2_vl": {
        "whole": {"vision_config": _QWEN | {"hidden_size": 64, "embed_dim": 16, "depth": 2}}
    },
    "qwen2_5_vl": {
        "whole": {
            "vision_config": _QWEN | {"fullatt_block_indexes": [1, 3], "tokens_per_second": 2}
        }
    },
    "qwen3_vl": {
        "num_hidden_layers": 3,
        "whole": {
            "vision_config": _QWEN
            | {"deepstack_visual_indexes": [1, 3], "hidden_act": "gelu_pytorch_tanh"}
            | {"num_position_embeddings": 16}
        },
    },
    "mistral3": {
        "whole": {
            "vision_config": _BLOCKS
            | {"model_type": "pixtral", "hidden_act": "silu", "image_size": 48}
        }
    },
    "mistral3/ministral": {
        "model_type": "ministral3",
        "sliding_window": None,
        "whole": {"vision_config": _BLOCKS | {"model_type": "pixtral", "image_size": 48}},
    },
    "smolvlm": {"whole": {"vision_config": _BLOCKS | {"model_type": "smolvlm_vision"}}},
}


def write_text(
    folder: Path, path: Path, architecture: str, said: Mapping[str, Any] | None = None
) -> Path:
    """Write the text of a composite model as a GGUF file. Returns the file.

    `folder`: as transformers has saved it; a plain one of the text is made beside `path`. `said`:
    further metadata.
    """
    whole = json.loads((folder / "config.json").read_text())
    config = {"tie_word_embeddings": whole.get("tie_word_embeddings", False)}
    config |= whole["text_config"]
    plain = path.with_suffix(".plain")
    plain.mkdir()
    stored = load_file(folder / "model.safetensors")
    kept = {text_name(name): tensor for name, tensor in stored.items() if _is_text(name)}
    if architecture == "qwen3vlmoe":
        kept = dict(_apart(kept))
    save_file(kept, plain / "model.safetensors")
    if architecture in converted.MODELS:
        arrays = {name: tensor.float().numpy() for name, tensor in kept.items()}
        found, tensors = converted.convert(architecture, config, arrays)
        tokens = [str(token) for token in range(config["vocab_size"])]
        found |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens}
    else:
        found = converted_first.metadata(architecture, config, architecture)
        tensors = converted_first.tensors(architecture, architecture, plain, config, found)
    found |= _describe(config, architecture)
    found |= said or {}
    write(path, architecture, found, tensors)
    return path


def _is_text(name: str) -> bool:
    plain = ("lm_head.", "model.layers.", "model.embed_tokens.", "model.norm.")
    return text_name(name) != name or name.startswith(plain)


def _apart(stored: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors, those of a layer's experts one by one."""
    for name, tensor in stored.items():
        place, _, own = name.rpartition(".experts.")
        if not place:
            yield name, tensor
            continue
        for expert, rows in enumerate(tensor):
            parts = rows.chunk(2) if own == "gate_up_proj" else (rows,)
            names = ("gate_proj", "up_proj") if own == "gate_up_proj" else (own,)
            for part, content in zip(names, parts, strict=True):
                yield f"{place}.experts.{expert}.{part}.weight", content.contiguous()


def _describe(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    """Return what a composite's text says beyond a plain one's."""
    found: dict[str, Any] = {}
    sections = (config.get("rope_parameters") or {}).get("mrope_section")
    if sections:
        found[f"{architecture}.rope.dimension_sections"] = [*sections, 0]
    if config.get("pad_token_id") is not None:
        found["tokenizer.ggml.padding_token_id"] = config["pad_token_id"]
    if architecture.startswith("qwen35"):  # with the layer that drafts, which is counted
        kinds = [int(kind != "full_attention") for kind in config["layer_types"]]
        found[f"{architecture}.attention.recurrent_layers"] = [*kinds, 0]
    return found
