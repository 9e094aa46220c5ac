"""Towers of SigLIP: Gemma 3, and Idefics 3 with SmolVLM."""

from __future__ import annotations

from typing import Final

from tgi_trio.model.gguf.files import GgufModel
from tgi_trio.model.gguf.projectors.projector import (
    Kind,
    Names,
    Projector,
    read_activation,
    read_epsilon,
    read_scale,
    read_tower,
    square,
)
from tgi_trio.model.gguf.stated import Values, read_count

_GELU: Final = "gelu_pytorch_tanh"
_GEMMA_MERGE: Final = 4  # patches along a side of a token, where files do not say it
_IDEFICS_MERGE: Final = 2
_NORM: Final = "multi_modal_projector.mm_soft_emb_norm"


def name_encoder(tower: str) -> Names:
    """Return the names of an encoder of transformers' SigLIP or CLIP; `tower`: its own."""
    block, ours = f"{tower}.encoder.layers.{{}}", "v.blk.{}"
    return {
        f"{tower}.embeddings.patch_embedding": "v.patch_embd",
        f"{tower}.embeddings.position_embedding": "v.position_embd",
        f"{tower}.post_layernorm": "v.post_ln",
        f"{block}.layer_norm1": f"{ours}.ln1",
        f"{block}.layer_norm2": f"{ours}.ln2",
        f"{block}.self_attn.q_proj": f"{ours}.attn_q",
        f"{block}.self_attn.k_proj": f"{ours}.attn_k",
        f"{block}.self_attn.v_proj": f"{ours}.attn_v",
        f"{block}.self_attn.out_proj": f"{ours}.attn_out",
        f"{block}.mlp.fc1": f"{ours}.ffn_up",
        f"{block}.mlp.fc2": f"{ours}.ffn_down",
    }


def _describe_gemma3(model: GgufModel, text: Values) -> Values:
    tower = _describe_siglip(model)
    merge = read_scale(model, _GEMMA_MERGE)
    along = tower["image_size"] // tower["patch_size"] // merge
    if not along:
        raise ValueError(f"its images are less than {merge} patches high")
    kind = {"model_type": "siglip_vision_model", "vision_use_head": False}
    return {"vision_config": tower | kind, "mm_tokens_per_image": along**2}


def _describe_idefics3(model: GgufModel, text: Values) -> Values:
    merge = read_scale(model, _IDEFICS_MERGE)
    return {"vision_config": _describe_siglip(model), "scale_factor": merge}


def _describe_siglip(model: GgufModel) -> Values:
    return read_tower(model) | {
        "layer_norm_eps": read_epsilon(model, 1e-6),
        "hidden_act": read_activation(model, _GELU),
    }


def _process_gemma3(model: GgufModel) -> Values:
    return {"size": square(read_count(model, "vision.image_size"))}


def _process_idefics3(model: GgufModel) -> Values:
    """Files made before they stated the longest side have none of the tiles that it is cut into:
    it is that of Idefics 3 and SmolVLM, four of them.
    """
    tile = read_count(model, "vision.image_size")
    longest = read_count(model, "vision.preproc_image_size", default=4 * tile)
    return {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": tile}}


GEMMA3: Final = Projector(
    {"gemma3": Kind("gemma3")},
    _describe_gemma3,
    _process_gemma3,
    {
        **name_encoder("vision_tower"),
        "multi_modal_projector.mm_input_projection_weight": "mm.input_projection.weight",
        _NORM: "mm.soft_emb_norm",
    },
    ("mm.input_projection.weight", 1),
    "<image_soft_token>",
    {f"{_NORM}.weight": "plus_one"},
)
IDEFICS3: Final = Projector(
    {"llama": Kind("idefics3")},
    _describe_idefics3,
    _process_idefics3,
    {**name_encoder("vision_model"), "connector.modality_projection.proj": "mm.model.fc"},
    ("mm.model.fc.weight", 0),
    "<image>",
)
