"""Tiny models of DeepSeek-OCR 1 and 2 in two folders: of transformers' class, and as published.

transformers writes tensors by the names of published files, so that both have the same ones.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tgi_trio.testing.wrapped_checkpoints import make_wrapped

# What config.json does not say of the towers is what the class has where nothing is said.
_SAM: dict[str, Any] = {
    **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_dim": 64},
    **{"image_size": 128, "global_attn_indexes": [1], "downsample_channels": [8, 16]},
    "output_channels": 256,
}
_CLIP = {
    **{"hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "image_size": 28, "patch_size": 14},
}
# Of the second tower of DeepSeek-OCR 2 config.json says the width alone.
QWEN2 = {
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"intermediate_size": 24, "max_position_embeddings": 512, "rms_norm_eps": 1e-6},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
ARCHITECTURES = {
    "unlimited_ocr": "DeepseekOCRForCausalLM",
    "deepseek_ocr2": "DeepseekOCR2ForCausalLM",
}


def make_deepseek_ocr(
    folder: Path, family: str, *, all_windows: bool = False, **options: Any
) -> tuple[Path, Path]:
    """Write a random model; return its folders, of transformers' class and as it is published.

    `family`: of that class; `all_windows`: no layer of its first tower sees all of a view;
    `options`: as of `make_wrapped`.
    """
    first = family == "unlimited_ocr"
    sam = _SAM | ({"global_attn_indexes": []} if all_windows else {})
    towers = {"sam_config": sam, "encoder_config": _CLIP if first else {"hidden_size": 16} | QWEN2}
    whole = {"vision_config": towers} | options.pop("whole", {})
    theirs = make_wrapped(folder / "theirs", family, whole=whole, **options)
    return theirs, publish(theirs, folder / "published", family)


def publish(theirs: Path, folder: Path, family: str) -> Path:
    """Write a folder of transformers' class as it would be published; return it."""
    shutil.copytree(theirs, folder)
    (folder / "preprocessor_config.json").unlink(missing_ok=True)
    whole = json.loads((theirs / "config.json").read_text())
    text, sam = whole["text_config"], whole["vision_config"]["sam_config"]
    sparse = text.pop("mlp_layer_types").index("sparse")
    for name in ("layer_types", "model_type", "head_dim"):
        text.pop(name, None)
    text |= {"first_k_dense_replace": sparse, "use_mla": False, "v_head_dim": 0}
    text |= {"kv_lora_rank": None, "q_lora_rank": None, "topk_method": "greedy"}
    told = {
        **{"width": _SAM["hidden_size"], "layers": 2, "heads": 2},
        "global_attn_indexes": sam["global_attn_indexes"],
        "downsample_channels": [8, 32],  # the second is not that of the file
    }
    clip = {"width": 16, "layers": 2, "heads": 2, "image_size": 28, "patch_size": 14}
    second = {"clip-l-14-224": clip} if family == "unlimited_ocr" else {"qwen2-0-5b": {"dim": 16}}
    values = {
        **{"model_type": "deepseek_vl_v2", "architectures": [ARCHITECTURES[family]]},
        "auto_map": {"AutoModel": "modeling_deepseekocr.DeepseekOCRForCausalLM"},
        **{"candidate_resolutions": [[1024, 1024]], "global_view_pos": "head", "tile_tag": "2D"},
        "language_config": text,
        "projector_config": {"model_type": "mlp_projector", "projector_type": "linear"},
        "vision_config": {
            **{"image_size": 128, "mlp_ratio": 3.7362, "model_type": "vision"},
            "width": {"sam_vit_b": told, **second},
        },
        **{"bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "float32"},
        **{name: text[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size")},
    }
    (folder / "config.json").write_text(json.dumps(values))
    return folder
