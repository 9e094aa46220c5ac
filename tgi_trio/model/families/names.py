"""The names of tensors in each family's checkpoints: literal tables."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Final

from tgi_trio.model.specs.decoder import Names

LLAMA = Names(
    base="model.",
    embedding="model.embed_tokens",
    layer="model.layers.{}.",
    final_norm="model.norm",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    output="self_attn.o_proj",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
)

LLAMA_CROSSING = replace(
    LLAMA,
    query="cross_attn.q_proj",
    query_norm="cross_attn.q_norm",
    key="cross_attn.k_proj",
    key_norm="cross_attn.k_norm",
    value="cross_attn.v_proj",
    output="cross_attn.o_proj",
    attention_gate="cross_attn_attn_gate",
    mlp_gate="cross_attn_mlp_gate",
)

IDEFICS = replace(
    LLAMA,
    added_embedding="model.embed_tokens.additional_embedding",
    added_head="lm_head.additional_fc",
)
IDEFICS_CROSSING = replace(
    LLAMA_CROSSING,
    layer="model.gated_cross_attn_layers.{}.",
    query_norm="cross_attn.q_layer_norm",
    key_norm="cross_attn.k_layer_norm",
    attention_gate="alpha_cross_attn",
    mlp_gate="alpha_dense",
)

BAICHUAN = replace(LLAMA, qkv="self_attn.W_pack")

INTERNLM2 = Names(
    base="model.",
    embedding="model.tok_embeddings",
    layer="model.layers.{}.",
    final_norm="model.norm",
    attention_norm="attention_norm",
    mlp_norm="ffn_norm",
    qkv="attention.wqkv",
    output="attention.wo",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    head="output",
)

CHATGLM = Names(
    base="transformer.",
    embedding="transformer.embedding.word_embeddings",
    layer="transformer.encoder.layers.{}.",
    final_norm="transformer.encoder.final_layernorm",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    qkv="self_attention.query_key_value",
    output="self_attention.dense",
    gate_up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    head="transformer.output_layer",
)

MINICPM_MOE = replace(
    LLAMA,
    router="mlp.gate",
    experts="mlp.experts.{}.",
    expert_gate="w1",
    expert_up="w3",
    expert_down="w2",
)

QWEN3 = replace(LLAMA, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")

GPT2 = Names(
    base="transformer.",
    embedding="transformer.wte",
    positions="transformer.wpe",
    layer="transformer.h.{}.",
    final_norm="transformer.ln_f",
    attention_norm="ln_1",
    mlp_norm="ln_2",
    qkv="attn.c_attn",
    output="attn.c_proj",
    up="mlp.c_fc",
    down="mlp.c_proj",
)

PERSIMMON = replace(
    LLAMA,
    final_norm="model.final_layernorm",
    qkv="self_attn.query_key_value",
    output="self_attn.dense",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    gate="",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)

# Every sum is normalised, not what is read of it.
OPENAI_GPT = replace(
    GPT2,
    embedding="transformer.tokens_embed",
    positions="transformer.positions_embed",
    final_norm="",
    attention_norm="",
    mlp_norm="",
    attention_sum_norm="ln_1",
    mlp_sum_norm="ln_2",
)

GPT_NEO = replace(
    GPT2,
    qkv="",
    query="attn.attention.q_proj",
    key="attn.attention.k_proj",
    value="attn.attention.v_proj",
    output="attn.attention.out_proj",
)

EXAONE = replace(GPT_NEO, positions="", gate="mlp.c_fc_0", up="mlp.c_fc_1")

GPT_J = Names(
    base="transformer.",
    embedding="transformer.wte",
    layer="transformer.h.{}.",
    final_norm="transformer.ln_f",
    attention_norm="ln_1",
    query="attn.q_proj",
    key="attn.k_proj",
    value="attn.v_proj",
    output="attn.out_proj",
    up="mlp.fc_in",
    down="mlp.fc_out",
)

GPT_NEOX = Names(
    base="gpt_neox.",
    embedding="gpt_neox.embed_in",
    layer="gpt_neox.layers.{}.",
    final_norm="gpt_neox.final_layer_norm",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    qkv="attention.query_key_value",
    output="attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    head="embed_out",
)

PHI = replace(
    LLAMA,
    final_norm="model.final_layernorm",
    mlp_norm="",
    output="self_attn.dense",
    gate="",
    up="mlp.fc1",
    down="mlp.fc2",
)

PHI3 = replace(LLAMA, qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")

GLM4 = replace(
    PHI3,
    qkv="",
    attention_post_norm="post_self_attn_layernorm",
    mlp_norm="post_attention_layernorm",
    mlp_post_norm="post_mlp_layernorm",
)

GLM = replace(PHI3, qkv="")

HUNYUAN = replace(LLAMA, query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm")

# No gate: one matrix up, one down.
ARCEE = replace(LLAMA, gate="")

# Its norms have no weights.
NANOCHAT = replace(LLAMA, embedding_norm="model.norm", gate="", up="mlp.fc1", down="mlp.fc2")

APERTUS = replace(
    ARCEE,
    attention_norm="attention_layernorm",
    mlp_norm="feedforward_layernorm",
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
    activation="mlp.act_fn",
)

BITNET = replace(
    LLAMA,
    attention_inner_norm="self_attn.attn_sub_norm",
    mlp_inner_norm="mlp.ffn_sub_norm",
)

STARCODER2 = replace(LLAMA, gate="", up="mlp.c_fc", down="mlp.c_proj")

OLMO2 = replace(
    QWEN3,
    attention_norm="",
    mlp_norm="",
    attention_post_norm="post_attention_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)

EXAONE4 = OLMO2

# Its linear layers, and its attention layers as transformers writes them; on the hub the latter are
# OLMo 2's.
OLMO_HYBRID = replace(
    LLAMA,
    attention_norm="attention_layer_norm",
    mlp_norm="feedforward_layer_norm",
    mixer="linear_attn",
)
OLMO_HYBRID_ATTENTION = replace(OLMO2, attention_post_norm="feedforward_layer_norm")

GEMMA2 = replace(
    LLAMA,
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)

VAULT_GEMMA = replace(LLAMA, mlp_norm="pre_feedforward_layernorm")

GEMMA3 = replace(GEMMA2, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")

GEMMA4 = replace(GEMMA3, layer_scale="layer_scalar")

GEMMA4_MOE = replace(
    GEMMA4,
    router="router.proj",
    router_gain="router.scale",
    expert_scale="router.per_expert_scale",
    experts="experts.{}.",
    expert_gate_up="gate_up_proj",
    expert_down="down_proj",
    beside_norm="pre_feedforward_layernorm_2",
    dense_post_norm="post_feedforward_layernorm_1",
    beside_post_norm="post_feedforward_layernorm_2",
)

# In GGUF files, where gate and up are separate matrices.
_APART: Final = {"expert_gate_up": "", "expert_gate": "gate_proj", "expert_up": "up_proj"}
GEMMA4_MOE_APART = replace(GEMMA4_MOE, **_APART)

# For models with per-layer embeddings.
OWN_INPUTS: Final = {
    "own_table": "model.embed_tokens_per_layer",
    "own_projection": "model.per_layer_model_projection",
    "own_norm": "model.per_layer_projection_norm",
    "own_gate": "per_layer_input_gate",
    "own_up": "per_layer_projection",
    "own_post_norm": "post_per_layer_input_norm",
}

GEMMA3N = replace(
    GEMMA3,
    streams_in="model.altup_projections.{}",
    streams_out="model.altup_unembed_projections.{}",
    streams="altup.",
    detour="laurel.",
    **OWN_INPUTS,
)

SHARED_NORM = replace(LLAMA, mlp_norm="")  # attention and MLP read the same norm

COMMAND_R_PLUS = replace(SHARED_NORM, query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")

OPT = Names(
    base="model.",
    embedding="model.decoder.embed_tokens",
    positions="model.decoder.embed_positions",
    layer="model.decoder.layers.{}.",
    final_norm="model.decoder.final_layer_norm",
    attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    output="self_attn.out_proj",
    up="fc1",
    down="fc2",
)

OPT_OF_SUMS = replace(
    OPT,
    final_norm="",
    attention_norm="",
    mlp_norm="",
    attention_sum_norm="self_attn_layer_norm",
    mlp_sum_norm="final_layer_norm",
)
OPT_PROJECTED: Final = {
    "embedding_in": "model.decoder.project_in",
    "embedding_out": "model.decoder.project_out",
}

XGLM = replace(
    OPT,
    embedding="model.embed_tokens",
    positions="",
    layer="model.layers.{}.",
    final_norm="model.layer_norm",
)

BIOGPT = replace(
    OPT,
    base="biogpt.",
    embedding="biogpt.embed_tokens",
    positions="biogpt.embed_positions",
    layer="biogpt.layers.{}.",
    final_norm="biogpt.layer_norm",
    head="output_projection",
)

BLOOM = Names(
    base="transformer.",
    embedding="transformer.word_embeddings",
    embedding_norm="transformer.word_embeddings_layernorm",
    layer="transformer.h.{}.",
    final_norm="transformer.ln_f",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    qkv="self_attention.query_key_value",
    output="self_attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
)

FALCON = replace(BLOOM, embedding_norm="")
FALCON_PARALLEL = replace(FALCON, mlp_norm="")
FALCON_TWO_NORMS = replace(FALCON, attention_norm="ln_attn", mlp_norm="ln_mlp")

MPT = Names(
    base="transformer.",
    embedding="transformer.wte",
    layer="transformer.blocks.{}.",
    final_norm="transformer.norm_f",
    attention_norm="norm_1",
    mlp_norm="norm_2",
    qkv="attn.Wqkv",
    output="attn.out_proj",
    up="ffn.up_proj",
    down="ffn.down_proj",
)

MIXTRAL = replace(
    LLAMA,
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts.{}.",
    expert_gate="w1",
    expert_up="w3",
    expert_down="w2",
)

MINIMAX_M2 = replace(
    MIXTRAL,
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
    choice_bias="block_sparse_moe.e_score_correction_bias",
)

MINIMAX_M3 = replace(
    MINIMAX_M2,
    shared_expert="block_sparse_moe.shared_experts.",
    index_query="self_attn.index_q_proj",
    index_query_norm="self_attn.index_q_norm",
    index_key="self_attn.index_k_proj",
    index_norm="self_attn.index_k_norm",
)
# As transformers writes a text alone.
MINIMAX_M3_TEXT = replace(
    MINIMAX_M3,
    gate_up="mlp.gate_up_proj",
    router="mlp.gate",
    choice_bias="mlp.gate.e_score_correction_bias",
    experts="mlp.experts.{}.",
    expert_gate="gate_proj",
    expert_up="up_proj",
    expert_down="down_proj",
    shared_expert="mlp.shared_experts.",
    shared_gate_up="gate_up_proj",
    index_query="self_attn.indexer.q_proj",
    index_query_norm="self_attn.indexer.q_norm",
    index_key="self_attn.indexer.k_proj",
    index_norm="self_attn.indexer.k_norm",
)

QWEN2_MOE = replace(
    LLAMA,
    router="mlp.gate",
    experts="mlp.experts.{}.",
    expert_gate="gate_proj",
    expert_up="up_proj",
    expert_down="down_proj",
    shared_expert="mlp.shared_expert.",
    shared_router="mlp.shared_expert_gate",
)

QWEN3_MOE = replace(
    QWEN2_MOE,
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
    shared_expert="",
    shared_router="",
)

FLEX_OLMO = replace(
    QWEN3_MOE,
    attention_norm="",
    mlp_norm="",
    attention_post_norm=OLMO2.attention_post_norm,
    mlp_post_norm=OLMO2.mlp_post_norm,
)

COHERE2_MOE = replace(
    QWEN3_MOE, query_norm="", key_norm="", mlp_norm="", shared_expert="mlp.shared_experts."
)

KOLIBRI1 = replace(
    QWEN3_MOE,
    attention_post_norm="post_attn_norm",
    mlp_post_norm="post_ffn_norm",
    choice_bias="moe.router.expert_bias",
    shared_expert="mlp.shared_experts.",
)

AFMOE = replace(
    QWEN3_MOE,
    attention_post_norm="post_attention_layernorm",
    mlp_norm="pre_mlp_layernorm",
    mlp_post_norm="post_mlp_layernorm",
    output_gate="self_attn.gate_proj",
    router="mlp.router.gate",
    choice_bias="mlp.expert_bias",
    shared_expert="mlp.shared_experts.",
)

LAGUNA = replace(
    QWEN3_MOE,
    head_gate="self_attn.g_proj",
    choice_bias="mlp.experts.e_score_correction_bias",
    shared_expert="mlp.shared_expert.",
)
LAGUNA_WIDE_GATES = replace(LAGUNA, head_gate="", output_gate="self_attn.g_proj")

FLINT = replace(QWEN3_MOE, shared_expert="mlp.shared_expert.", sinks="self_attn.softmax_offset")

QWEN3_VL_MOE = replace(
    QWEN3_MOE, expert_gate="", expert_up="", expert_gate_up="gate_up_proj", expert_down="down_proj"
)

QWEN3_NEXT = replace(
    QWEN2_MOE,
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
    mixer="linear_attn",
)

QWEN3_5 = replace(QWEN3, mixer="linear_attn")

QWEN4 = replace(
    QWEN3_NEXT,
    final_norm="",
    attention_norm="",
    mlp_norm="",
    attention_streams="attn_hyper_connection.",
    mlp_streams="mlp_hyper_connection.",
    last_streams="model.hyper_connection_mixer.",
    index_query="self_attn.indexer.index_qk_proj",
    index_query_norm="self_attn.indexer.q_layernorm",
    index_norm="self_attn.indexer.k_layernorm",
    ngrams="ple",
)

KIMI_LINEAR = replace(
    LLAMA,
    mixer="self_attn",
    router="block_sparse_moe.gate",
    choice_bias="block_sparse_moe.gate.e_score_correction_bias",
    experts="block_sparse_moe.experts.{}.",
    expert_gate="w1",
    expert_up="w3",
    expert_down="w2",
    shared_expert="block_sparse_moe.shared_experts.",
    query_down="self_attn.q_a_proj",
    query_norm="self_attn.q_a_layernorm",
    query_up="self_attn.q_b_proj",
    latent_down="self_attn.kv_a_proj_with_mqa",
    latent_norm="self_attn.kv_a_layernorm",
    latent_up="self_attn.kv_b_proj",
)

GLM4_MOE = replace(
    QWEN3_MOE,
    shared_expert="mlp.shared_experts.",
    choice_bias="mlp.gate.e_score_correction_bias",
)

DOTS1 = GLM4_MOE

SOLAR_OPEN = replace(GLM4_MOE, query_norm="", key_norm="")

# The first of DeepSeek's mixtures, whose experts have no bias.
DEEPSEEK_MOE = replace(SOLAR_OPEN, choice_bias="")

BAILING_MOE = replace(
    DEEPSEEK_MOE,
    embedding="model.word_embeddings",
    qkv="attention.query_key_value",
    output="attention.dense",
)
BAILING_MOE_V2 = replace(
    BAILING_MOE,
    query_norm="attention.query_layernorm",
    key_norm="attention.key_layernorm",
    choice_bias="mlp.gate.expert_bias",
)

EXAONE_MOE = replace(GLM4_MOE, choice_bias="mlp.e_score_correction_bias")

HY_V3 = replace(
    GLM4_MOE,
    router="mlp.router.gate",
    shared_expert="mlp.shared_mlp.",
    choice_bias="mlp.expert_bias",
)

ERNIE4_5_MOE = replace(
    QWEN2_MOE,
    shared_expert="mlp.shared_experts.",
    shared_router="",
    choice_bias="mlp.moe_statics.e_score_correction_bias",
)

HUNYUAN_MOE = replace(
    QWEN2_MOE,
    query_norm=HUNYUAN.query_norm,
    key_norm=HUNYUAN.key_norm,
    router="mlp.gate.wg",
    shared_expert="mlp.shared_mlp.",
    shared_router="",
)

GRANITE_SWA = replace(LLAMA, sinks="self_attn.sinks")

HYPERCLOVAX = replace(LLAMA, attention_post_norm="post_norm1", mlp_post_norm="post_norm2")

GRANITE_MOE = replace(
    LLAMA,
    router="block_sparse_moe.router.layer",
    experts="block_sparse_moe.{}.",
    expert_gate_up="input_linear.weight",
    expert_down="output_linear.weight",
)

GRANITE_MOE_SEPARATE = replace(
    GRANITE_MOE,
    experts="block_sparse_moe.experts.{}.",
    expert_gate="gate",
    expert_up="up",
    expert_gate_up="",
    expert_down="down",
)

# An MLP beside the experts.
GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    gate="",
    up="",
    gate_up="shared_mlp.input_linear",
    down="shared_mlp.output_linear",
)

GRANITE_MOE_SHARED_SEPARATE = replace(
    GRANITE_MOE_SEPARATE,
    gate="shared_mlp.gate",
    up="shared_mlp.up",
    down="shared_mlp.output_linear",
)

GRANITE_MOE_SWA_SEPARATE = replace(
    GRANITE_MOE_SEPARATE,
    gate="",
    up="",
    gate_up="shared_mlp.input_linear",
    down="shared_mlp.output_linear",
    sinks="self_attn.sinks",
)

GRANITE_MOE_SWA = replace(
    GRANITE_MOE_SHARED,
    sinks="self_attn.sinks",
    router="block_sparse_moe.router",
    experts="block_sparse_moe.experts.{}.",
    expert_gate_up="gate_up_proj",
    expert_down="down_proj",
)

GRANITE_MOE_HYBRID = replace(
    GRANITE_MOE,
    gate="",
    up="",
    gate_up="shared_mlp.input_linear",
    down="shared_mlp.output_linear",
    mixer="mamba",
)

GRANITE_MOE_HYBRID_APART = replace(GRANITE_MOE_SHARED_SEPARATE, mixer="mamba")

BAMBA = replace(
    LLAMA,
    final_norm="model.final_layernorm",
    mlp_norm="pre_ff_layernorm",
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
    mixer="mamba",
)

NEMOTRON_H = Names(
    base="backbone.",
    embedding="backbone.embeddings",
    layer="backbone.layers.{}.",
    final_norm="backbone.norm_f",
    attention_norm="norm",
    mlp_norm="norm",
    query="mixer.q_proj",
    key="mixer.k_proj",
    value="mixer.v_proj",
    output="mixer.o_proj",
    up="mixer.up_proj",
    down="mixer.down_proj",
    mixer="mixer",
    router="mixer.gate",
    choice_bias="mixer.gate.e_score_correction_bias",
    experts="mixer.experts.{}.",
    expert_up="up_proj",
    expert_down="down_proj",
    shared_expert="mixer.shared_experts.",
    expert_entry="mixer.fc1_latent_proj",
    expert_exit="mixer.fc2_latent_proj",
)

FALCON_H1 = BAMBA

JAMBA = replace(
    BAMBA,
    router="feed_forward.router",
    experts="feed_forward.experts.{}.",
    expert_gate="gate_proj",
    expert_up="up_proj",
    expert_down="down_proj",
)

ZAMBA2 = replace(LLAMA, final_norm="model.final_layernorm", mixer="mamba")

# For layers that use a shared block, which is stored in the first layer that uses it.
ZAMBA2_HYBRID = replace(
    ZAMBA2,
    mlp_norm="pre_ff_layernorm",
    gate="",
    up="",
    gate_up="feed_forward.gate_up_proj",
    down="feed_forward.down_proj",
    mixer="mamba_decoder.mamba",
    mixer_norm="mamba_decoder.input_layernorm",
    block="shared_transformer.",
    block_exit="linear",
    query_change="self_attn.linear_q_adapter_list.{}",
    key_change="self_attn.linear_k_adapter_list.{}",
    value_change="self_attn.linear_v_adapter_list.{}",
    gate_up_change="feed_forward.gate_up_proj_adapter_list.{}",
)

# Every layer is a norm and a mixer.
MAMBA = Names(
    base="backbone.",
    embedding="backbone.embeddings",
    layer="backbone.layers.{}.",
    final_norm="backbone.norm_f",
    attention_norm="norm",
    output="",
    down="",
    mixer="mixer",
)

RECURRENT_GEMMA = replace(
    LLAMA,
    final_norm="model.final_norm",
    attention_norm="temporal_pre_norm",
    mlp_norm="channel_pre_norm",
    query="temporal_block.q_proj",
    key="temporal_block.k_proj",
    value="temporal_block.v_proj",
    output="temporal_block.o_proj",
    gate="mlp_block.gate_proj",
    up="mlp_block.up_proj",
    down="mlp_block.down_proj",
    mixer="temporal_block",
)

DBRX = Names(
    base="transformer.",
    embedding="transformer.wte",
    layer="transformer.blocks.{}.",
    final_norm="transformer.norm_f",
    attention_norm="norm_attn_norm.norm_1",
    mlp_norm="norm_attn_norm.norm_2",
    qkv="norm_attn_norm.attn.Wqkv",
    output="norm_attn_norm.attn.out_proj",
    down="",
    router="ffn.router.layer",
    experts="ffn.experts.mlp.",
    expert_gate="w1",
    expert_up="v1",
    expert_down="w2",
)

DBRX_SEPARATE = replace(DBRX, experts="ffn.experts.{}.")  # in GGUF files

MUSE_GLIMMER = replace(
    GEMMA2,
    output_gate="self_attn.gate_proj",
)

LLAMA4 = replace(
    LLAMA,
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
    router="feed_forward.router",
    experts="feed_forward.experts.{}.",
    expert_gate_up="gate_up_proj",
    expert_down="down_proj",
    shared_expert="feed_forward.shared_expert.",
)
LLAMA4_APART = replace(LLAMA4, **_APART)

GPT_OSS = replace(
    LLAMA,
    sinks="self_attn.sinks",
    router="mlp.router",
    experts="mlp.experts.{}.",
    expert_gate_up="gate_up_proj",
    expert_down="down_proj",
)

GPT_OSS_APART = replace(GPT_OSS, **_APART)

MIMO_V2_FLASH = replace(
    QWEN2_MOE,
    sinks="self_attn.attention_sink_bias",
    shared_expert="",
    shared_router="",
    choice_bias="mlp.gate.e_score_correction_bias",
)

_LATENT: Final = {
    "query_down": "self_attn.q_a_proj",
    "query_norm": "self_attn.q_a_layernorm",
    "query_up": "self_attn.q_b_proj",
    "latent_down": "self_attn.kv_a_proj_with_mqa",
    "latent_norm": "self_attn.kv_a_layernorm",
    "latent_up": "self_attn.kv_b_proj",
}
LATENT = replace(LLAMA, **_LATENT)  # dense

DEEPSEEK_V2 = replace(QWEN2_MOE, shared_expert="mlp.shared_experts.", shared_router="", **_LATENT)

MISTRAL4 = replace(DEEPSEEK_V2, expert_gate="", expert_up="", expert_gate_up="gate_up_proj")
MISTRAL4_APART = replace(MISTRAL4, **_APART)

DEEPSEEK_V3 = replace(DEEPSEEK_V2, choice_bias="mlp.gate.e_score_correction_bias")

AXK1 = replace(DEEPSEEK_V3, mlp_post_norm="post_mlp_layernorm")

DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    index_query="self_attn.indexer.wq_b",
    index_key="self_attn.indexer.wk",
    index_norm="self_attn.indexer.k_norm",
    index_weights="self_attn.indexer.weights_proj",
)

AXK2 = replace(
    DEEPSEEK_V32,
    attention_norm="input_layernorm.norm",
    attention_norm_gate="input_layernorm.W_",
    mlp_norm="post_attention_layernorm.norm",
    mlp_norm_gate="post_attention_layernorm.W_",
)

MISTRAL_LARGE4 = replace(
    DEEPSEEK_V32,
    choice_bias="",
    query_log_scale="self_attn.softmax_scaling.scale",
    query_log_bias="self_attn.softmax_scaling.bias",
    index_query_norm="self_attn.indexer.q_input_norm",
    index_log_scale="self_attn.indexer.softmax_scaling.scale",
    index_log_bias="self_attn.indexer.softmax_scaling.bias",
    rotary_factors="model.rotary_emb.alpha",
)

# Of the first half of its first layer; see `longcat_half`.
LONGCAT_FLASH = replace(
    DEEPSEEK_V3,
    attention_norm="input_layernorm.0",
    mlp_norm="post_attention_layernorm.0",
    query_down="self_attn.0.q_a_proj",
    query_norm="self_attn.0.q_a_layernorm",
    query_up="self_attn.0.q_b_proj",
    key="self_attn.0.k_proj",
    value="self_attn.0.v_proj",
    latent_down="self_attn.0.kv_a_proj_with_mqa",
    latent_norm="self_attn.0.kv_a_layernorm",
    latent_up="self_attn.0.kv_b_proj",
    output="self_attn.0.o_proj",
    gate="mlps.0.gate_proj",
    up="mlps.0.up_proj",
    down="mlps.0.down_proj",
    router="mlp.router.classifier",
    choice_bias="mlp.router.e_score_correction_bias",
    shared_expert="",
)


def longcat_half(first: Names, layer: int, half: int) -> Names:
    """Return the names in one `half` (0 or 1) of a `layer`, given those in a first half."""
    own = {each.name: getattr(first, each.name).replace(".0", f".{half}") for each in fields(first)}
    return replace(first, **own | {"layer": first.layer.format(layer)})


# The parts of Ling 3's attention of both kinds have the same place.
BAILING_HYBRID = replace(
    DEEPSEEK_V3,
    embedding="model.word_embeddings",
    choice_bias="mlp.gate.expert_bias",
    mixer="attention",
    query="attention.q_proj",
    latent_down="attention.kv_a_proj_with_mqa",
    latent_norm="attention.kv_a_layernorm",
    latent_up="attention.kv_b_proj",
    head_gate="attention.g_proj",
    output="attention.dense",
)

GLM5_NEXT = replace(
    DEEPSEEK_V32,
    mixer="self_attn",
    attention_streams="hc_attn_",
    mlp_streams="hc_ffn_",
    index_pool_gate="self_attn.indexer.index_kpool_compress_gate",
    index_pool_bias="self_attn.indexer.index_kpool_compress_ape",
)

STEP3P5 = replace(
    QWEN3_MOE,
    head_gate="self_attn.g_proj",
    router="moe.gate",
    choice_bias="moe.router_bias",
    experts="moe.{}.",
    shared_expert="share_expert.",
)

LFM2 = replace(
    LLAMA,
    final_norm="model.embedding_norm",
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    output="self_attn.out_proj",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    mixer="conv",
)

LFM3 = replace(
    LFM2,
    query_norm="self_attn.q_norm",
    key_norm="self_attn.k_norm",
    output="self_attn.o_proj",
    head_gate="self_attn.gate_proj",
    attention_post_norm="post_operator_norm",
    mlp_post_norm="post_ffn_norm",
)

LFM2_MOE = replace(
    LFM2,
    router="feed_forward.gate",
    choice_bias="feed_forward.expert_bias",
    experts="feed_forward.experts.{}.",
    expert_gate="w1",
    expert_up="w3",
    expert_down="w2",
)

DEEPSEEK_V4 = replace(
    DEEPSEEK_V3,
    query_norm="self_attn.q_a_norm",
    key="self_attn.kv_proj",
    key_norm="self_attn.kv_norm",
    output_down="self_attn.o_a_proj",
    output="self_attn.o_b_proj",
    sinks="self_attn.sinks",
    latent_down="",
    latent_norm="",
    latent_up="",
    compressor="self_attn.compressor.",
    index_compressor="self_attn.compressor.indexer.",
    index_query="self_attn.compressor.indexer.q_b_proj",
    index_weights="self_attn.compressor.indexer.scorer.weights_proj",
    expert_table="mlp.gate.tid2eid",
    attention_streams="attn_hc.",
    mlp_streams="ffn_hc.",
    last_streams="model.hc_head.hc_",
)

HY_V4 = replace(
    DEEPSEEK_V32,
    sinks="self_attn.sinks",
    value_gate="self_attn.gate_proj",
    attention_streams="attn_hc.",
    mlp_streams="ffn_hc.",
    last_streams="model.hc_head.hc_",
)
