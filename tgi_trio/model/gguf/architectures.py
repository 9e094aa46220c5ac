"""The architectures of GGUF files that are read: how each translates its metadata and tensors.

A new one is a function that translates its metadata into a family's config, and a row of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from tgi_trio.model.gguf import (
    balanced,
    convolutions,
    deepseek,
    deepseek4,
    delta_rules,
    gemmas,
    glm5_next,
    gpt_like,
    granite,
    llama_kin,
    mixtures,
    muse,
    state_spaces,
    windowed,
)
from tgi_trio.model.gguf.files import GgufModel
from tgi_trio.model.gguf.stated import Values

# (the file, its common keys as translated by `config.py`) -> further values
Convert = Callable[[GgufModel, Values], Values]
Roles = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture of llama.cpp."""

    config: Convert
    # The converter makes rotary pairs neighbours: rows of queries and keys are reordered.
    side_by_side: bool = False
    # llama.cpp's norms do not add 1 to their weights: files have 1 added to the checkpoint's.
    norms_plus_one: bool = False
    latent: bool = False  # latent attention
    # Roles in tensors' names -> fields of `Names`, where they differ from `tensors.py`.
    roles: Roles = field(default_factory=dict)
    # Roles of a mixer's tensors -> the part of the mixer's name.
    mixer: Mapping[str, str] = field(default_factory=dict)
    # roles of other tensors -> the name in a layer, or of the model
    parts: Mapping[str, str] = field(default_factory=dict)
    # lists in the metadata -> the name in a layer
    listed: Mapping[str, str] = field(default_factory=dict)
    # config keys whose values may differ by layer; 0: not in this layer
    by_layer: tuple[str, ...] = ()
    without: tuple[str, ...] = ()  # config keys that the model does not have
    narrow_values: bool = False  # values may be shorter than keys
    # Layers that draft go on from the model's, though they do not in the family's checkpoints.
    has_mtp: bool = False
    absorbed: tuple[str, ...] = ()  # roles whose numbers `config` has read, or nothing reads


_FALCON: Final[Roles] = {
    "attn_norm": ("mlp_norm", "attention_norm"),  # the MLP's norm, if there are two
    "attn_norm_2": ("attention_norm",),
}
_DEEPSEEK: Final = {
    "attn_q_a": ("query_down",),
    "attn_q_a_norm": ("query_norm",),
    "attn_q_b": ("query_up",),
    "attn_kv_a_mqa": ("latent_down",),
    "attn_kv_a_norm": ("latent_norm",),
    "attn_kv_b": ("latent_up",),
}

_HEADS: Final = ("num_attention_heads", "num_key_value_heads")
_KV_HEADS: Final = ("num_key_value_heads",)  # 0 in layers without attention
_ONE_PART: Final = (*_KV_HEADS, "intermediate_size")  # and 0 in layers without an MLP
_NO_HEADS: Final = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
_LFM2: Final[Roles] = {"token_embd_norm": ("final_norm",)}  # its name in older files
_CONVOLUTION: Final = {
    "shortconv.conv": "conv",
    "shortconv.in_proj": "in_proj",
    "shortconv.out_proj": "out_proj",
}
_SHARED_MLP: Final[Roles] = {
    "ffn_gate_shexp": ("gate",),
    "ffn_up_shexp": ("up",),
    "ffn_down_shexp": ("down",),
}
# Gate and up of an MLP beside experts are one tensor.
_SHARED_GATE_UP: Final[Roles] = {"ffn_up_shexp": ("gate_up",), "ffn_down_shexp": ("down",)}
_BLOCK_INDEX: Final[Roles] = {
    "indexer.q_proj": ("index_query",),
    "indexer.q_norm": ("index_query_norm",),
    "indexer.k_proj": ("index_key",),
    "indexer.k_norm": ("index_norm",),
}
_NORM_BEFORE_MLP: Final[Roles] = {"post_attention_norm": ("mlp_norm",)}
_INNER_NORMS: Final[Roles] = {
    "attn_sub_norm": ("attention_inner_norm",),
    "ffn_sub_norm": ("mlp_inner_norm",),
}
_DBRX: Final[Roles] = {"attn_output_norm": ("mlp_norm",)}
_QWEN35: Final = Architecture(
    delta_rules.qwen35moe,
    norms_plus_one=True,
    roles=_NORM_BEFORE_MLP,
    mixer=delta_rules.QWEN35,
    has_mtp=True,
)

ARCHITECTURES: Final[Mapping[str, Architecture]] = {
    "llama": Architecture(llama_kin.llama, side_by_side=True),
    "baichuan": Architecture(llama_kin.baichuan, side_by_side=True),
    "internlm2": Architecture(llama_kin.plain("llama"), side_by_side=True),
    "xverse": Architecture(llama_kin.xverse, side_by_side=True),
    "exaone": Architecture(llama_kin.plain("llama")),
    "pangu-embedded": Architecture(llama_kin.plain("llama")),
    "minicpm": Architecture(llama_kin.minicpm, side_by_side=True),
    "orion": Architecture(llama_kin.orion),
    "maincoder": Architecture(llama_kin.plain("hunyuan_v1_dense"), side_by_side=True),
    "smollm3": Architecture(llama_kin.plain("smollm3"), side_by_side=True),
    "mistral3": Architecture(llama_kin.mistral3, side_by_side=True),
    "llama4": Architecture(llama_kin.llama4),
    "apertus": Architecture(llama_kin.apertus, listed=llama_kin.XIELU),
    "arcee": Architecture(llama_kin.plain("arcee"), side_by_side=True),
    "bitnet": Architecture(llama_kin.bitnet, roles=_INNER_NORMS),
    "seed_oss": Architecture(llama_kin.seed_oss, roles=_NORM_BEFORE_MLP),
    "nemotron": Architecture(llama_kin.nemotron, norms_plus_one=True),
    "ernie4_5": Architecture(llama_kin.ernie4_5),
    "exaone4": Architecture(llama_kin.exaone4),
    "exaone-moe": Architecture(balanced.exaone_moe),
    "jais2": Architecture(llama_kin.jais2),
    "qwen2": Architecture(llama_kin.plain("qwen2")),
    "qwen3": Architecture(llama_kin.plain("qwen3")),
    # The text of vision models: without images, a token's three positions are equal.
    "qwen2vl": Architecture(llama_kin.plain("qwen2")),
    "qwen3vl": Architecture(llama_kin.plain("qwen3")),
    "qwen3vlmoe": Architecture(mixtures.qwen3vlmoe),
    "qwen3next": Architecture(
        delta_rules.qwen3next,
        norms_plus_one=True,
        roles=_NORM_BEFORE_MLP,
        mixer=delta_rules.QWEN3_NEXT,
    ),
    "qwen35": replace(_QWEN35, config=delta_rules.qwen35),
    "qwen35moe": _QWEN35,
    "kimi-linear": Architecture(
        delta_rules.kimi_linear,
        latent=True,
        roles=_DEEPSEEK,
        mixer=delta_rules.KIMI,
        by_layer=_KV_HEADS,
    ),
    "chatglm": Architecture(balanced.chatglm),
    "glm4": Architecture(balanced.glm4),
    "gemma": Architecture(llama_kin.plain("gemma"), norms_plus_one=True),
    "gemma2": Architecture(gemmas.gemma2, norms_plus_one=True),
    "gemma3": Architecture(gemmas.gemma3, norms_plus_one=True),
    "gemma3n": Architecture(gemmas.gemma3n, by_layer=("intermediate_size",), parts=gemmas.STREAMS),
    "gemma4": Architecture(gemmas.gemma4, by_layer=("intermediate_size", "num_key_value_heads")),
    "muse-glimmer": Architecture(
        muse.muse_glimmer,
        side_by_side=True,
        norms_plus_one=True,
        absorbed=("attn_q_norm", "attn_k_norm"),
    ),
    "phi3": Architecture(llama_kin.phi3),
    "granite": Architecture(granite.granite, side_by_side=True),
    "olmo2": Architecture(llama_kin.olmo2),
    "starcoder2": Architecture(llama_kin.starcoder2),
    "command-r": Architecture(llama_kin.command_r),
    "cohere2": Architecture(llama_kin.cohere2),
    "olmo": Architecture(llama_kin.olmo, side_by_side=True),
    "phi2": Architecture(llama_kin.phi2),
    "stablelm": Architecture(llama_kin.stablelm),
    "qwen2moe": Architecture(mixtures.qwen2moe),
    "qwen3moe": Architecture(mixtures.qwen3moe),
    "olmoe": Architecture(mixtures.olmoe),
    "phimoe": Architecture(mixtures.phimoe),
    "gpt-oss": Architecture(mixtures.gpt_oss, roles=_NORM_BEFORE_MLP),
    "dbrx": Architecture(mixtures.dbrx, roles=_DBRX),
    "glm4moe": Architecture(balanced.glm4moe, roles=_NORM_BEFORE_MLP),
    "bailingmoe": Architecture(granite.bailingmoe, side_by_side=True, roles=_SHARED_MLP),
    "bailingmoe2": Architecture(balanced.bailingmoe2),
    "dots1": Architecture(balanced.dots1),
    "ernie4_5-moe": Architecture(balanced.ernie4_5_moe),
    "minimax-m2": Architecture(balanced.minimax_m2),
    "afmoe": Architecture(windowed.afmoe),
    "cohere2moe": Architecture(windowed.cohere2moe),
    "laguna": Architecture(windowed.laguna, by_layer=_HEADS),
    "mellum": Architecture(windowed.mellum),
    "step35": Architecture(windowed.step35, norms_plus_one=True, by_layer=_HEADS),
    "minimax-m3": Architecture(balanced.minimax_m3, norms_plus_one=True, roles=_BLOCK_INDEX),
    "hunyuan-dense": Architecture(llama_kin.plain("hunyuan_v1_dense")),
    "hunyuan-moe": Architecture(balanced.hunyuan_moe),
    "hy_v3": Architecture(balanced.hy_v3),
    "granitemoe": Architecture(granite.granitemoe, side_by_side=True, roles=_SHARED_MLP),
    "granite_swa": Architecture(granite.granite_swa, side_by_side=True, roles=_SHARED_GATE_UP),
    "granitehybrid": Architecture(
        granite.granitehybrid,
        side_by_side=True,
        by_layer=_KV_HEADS,
        roles=_SHARED_MLP,
        mixer=state_spaces.MAMBA2,
    ),
    "falcon-h1": Architecture(state_spaces.falcon_h1, mixer=state_spaces.MAMBA2),
    "nemotron_h": Architecture(
        state_spaces.nemotron_h, by_layer=_ONE_PART, mixer=state_spaces.MAMBA2
    ),
    "nemotron_h_moe": Architecture(
        state_spaces.nemotron_h, by_layer=_ONE_PART, mixer=state_spaces.MAMBA2
    ),
    "jamba": Architecture(state_spaces.jamba, by_layer=_KV_HEADS, mixer=state_spaces.MAMBA1),
    "mamba": Architecture(state_spaces.mamba, without=_NO_HEADS, mixer=state_spaces.MAMBA1),
    "mamba2": Architecture(state_spaces.mamba2, without=_NO_HEADS, mixer=state_spaces.MAMBA2),
    "lfm2": Architecture(convolutions.lfm2, by_layer=_KV_HEADS, roles=_LFM2, mixer=_CONVOLUTION),
    "lfm2moe": Architecture(
        convolutions.lfm2moe, by_layer=_KV_HEADS, roles=_LFM2, mixer=_CONVOLUTION
    ),
    "mimo2": Architecture(balanced.mimo2, by_layer=("num_key_value_heads",), narrow_values=True),
    "minicpm3": Architecture(deepseek.minicpm3, latent=True, roles=_DEEPSEEK),
    "deepseek2": Architecture(deepseek.deepseek2, latent=True, roles=_DEEPSEEK),
    "mistral4": Architecture(deepseek.deepseek2, latent=True, roles=_DEEPSEEK),
    "deepseek32": Architecture(deepseek.deepseek32, latent=True, roles=_DEEPSEEK | deepseek.INDEX),
    "deepseek4": Architecture(
        deepseek4.deepseek4,
        roles=deepseek4.ROLES,
        parts=deepseek4.PARTS,
        absorbed=("exp_probs_b_vl",),  # of images' tokens
    ),
    "glm-dsa": Architecture(deepseek.glm_dsa, latent=True, roles=_DEEPSEEK | deepseek.INDEX),
    "glm5-next": Architecture(
        glm5_next.glm5_next,
        roles=_DEEPSEEK | deepseek.INDEX,
        mixer=delta_rules.KIMI,
        parts=glm5_next.PARTS,
        by_layer=_KV_HEADS,
    ),
    "gpt2": Architecture(gpt_like.gpt2),
    "starcoder": Architecture(gpt_like.starcoder),
    "gptneox": Architecture(gpt_like.gptneox),
    "bloom": Architecture(gpt_like.bloom),
    "falcon": Architecture(gpt_like.falcon, roles=_FALCON),
    "mpt": Architecture(gpt_like.mpt),
}
