"""Tiny models of InternVL in two folders: of transformers' class, and as they are published."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tgi_trio.testing.wrapped_checkpoints import make_wrapped

# Names of transformers' class -> those of OpenGVLab's, of whose joined projections below.
_NAMES = (
    (r"^vision_tower\.", "vision_model."),
    (r"\.embeddings\.cls_token$", ".embeddings.class_embedding"),
    (r"\.patch_embeddings\.projection\.", ".patch_embedding."),
    (r"\.position_embeddings$", ".position_embedding"),
    (r"^vision_model\.encoder\.layer\.", "vision_model.encoder.layers."),
    (r"^(vision_model\..*)\.attention\.projection_layer\.", r"\1.attn.proj."),
    (r"^(vision_model\..*)\.attention\.", r"\1.attn."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.lambda_([12])$", r".ls\1"),
    (r"^multi_modal_projector\.layer_norm\.", "mlp1.0."),
    (r"^multi_modal_projector\.linear_1\.", "mlp1.1."),
    (r"^multi_modal_projector\.linear_2\.", "mlp1.3."),
)
_PART = re.compile(r"(vision_model\..*\.attn)\.q_proj\.(weight|bias)$")


def make_internvl(
    folder: Path, *, whole: dict[str, Any] | None = None, large: bool = False, **text: Any
) -> tuple[Path, Path]:
    """Write a random model; return its folders, of transformers' class and as it is published.

    `large`: its tower has the norms of InternViT-6B. Others are as of `make_wrapped`. Tensors of
    both are the same, and each has a head of its own.
    """
    norms = {"norm_type": "rms_norm", "use_qk_norm": True} if large else {}
    vision = {
        **{"image_size": [16, 16], "patch_size": [8, 8], "hidden_size": 16, **norms},
        **{"intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
        "attention_bias": not large,
    }
    given = {"tie_word_embeddings": False, "vision_config": vision} | (whole or {})
    theirs = make_wrapped(
        folder / "theirs", "internvl", whole=given, tie_word_embeddings=False, **text
    )
    return theirs, publish(theirs, folder / "published")


def publish(theirs: Path, folder: Path) -> Path:
    """Write a folder of transformers' class as it would be published; return it.

    What is of the text has the same names in both.
    """
    shutil.copytree(theirs, folder)
    values = json.loads((theirs / "config.json").read_text())
    tower, text = values["vision_config"], values["text_config"]
    side, *_ = tower["image_size"]
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    vision = {name: tower[name] for name in (*kept, "norm_type", "layer_norm_eps", "num_channels")}
    vision |= {"qkv_bias": tower["attention_bias"], "qk_normalization": tower["use_qk_norm"]}
    vision |= {"model_type": "intern_vit_6b", "image_size": side, "drop_path_rate": 0.1}
    told = {
        **{"model_type": "internvl_chat", "architectures": ["InternVLChatModel"]},
        "auto_map": {"AutoModel": "modeling_internvl_chat.InternVLChatModel"},
        **{"downsample_ratio": values["downsample_ratio"], "ps_version": "v2"},
        **{"dynamic_image_size": True, "force_image_size": side, "use_thumbnail": True},
        **{"min_dynamic_patch": 1, "max_dynamic_patch": 6, "pad2square": False},
        **{"select_layer": values["vision_feature_layer"], "template": "internvl2_5"},
        **{"hidden_size": text["hidden_size"], "tie_word_embeddings": False},
        **{"use_backbone_lora": 0, "use_llm_lora": 0, "torch_dtype": "float32"},
        "llm_config": {**text, "architectures": ["LlamaForCausalLM"], "auto_map": {}},
        "vision_config": {**vision, "patch_size": tower["patch_size"][0]},
    }
    (folder / "config.json").write_text(json.dumps(told))
    save_file(_rename(theirs), folder / "model.safetensors", {"format": "pt"})
    return folder


def _rename(theirs: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, tensor in load_file(theirs / "model.safetensors").items():
        for found, other in _NAMES:
            name = re.sub(found, other, name)
        tensors[name] = tensor
    for name in list(tensors):
        if part := _PART.match(name):
            names = [f"{part[1]}.{one}_proj.{part[2]}" for one in "qkv"]
            tensors[f"{part[1]}.qkv.{part[2]}"] = torch.cat([tensors.pop(each) for each in names])
    return tensors
