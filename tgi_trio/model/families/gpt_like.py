"""Families of GPT-2's shape: LayerNorm with biases, plain MLP, packed or biased projections."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.reading import rotary
from tgi_trio.model.specs.decoder import DecoderSpec, LayerSpec


def _spec(
    config: ModelConfig, *, hidden: int, heads: int, layers: tuple[LayerSpec, ...], **changes: Any
) -> DecoderSpec:
    """Return the spec of GPT-2 without its positions; `changes`: fields that differ."""
    fields: dict[str, Any] = {
        "family": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "mlp_width": 4 * hidden,
        "layers": layers,
        "norm": "layer",
        "norm_eps": float(config.get("layer_norm_epsilon", config.get("layer_norm_eps", 1e-5))),
        "norm_bias": True,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "gated": False,
    }
    return DecoderSpec(**(fields | changes))


def _gpt2_numbers(config: ModelConfig) -> dict[str, Any]:
    """What GPT-2 and GPT-BigCode share."""
    hidden, heads = int(config.get("n_embd", 768)), int(config.get("n_head", 12))
    scale = (hidden // heads) ** -0.5 if config.get("scale_attn_weights", True) else 1.0
    by_layer = config.get("scale_attn_by_inverse_layer_idx", False)
    return {
        "hidden": hidden,
        "heads": heads,
        "layers": tuple(
            LayerSpec(scale=scale / (i + 1) if by_layer else scale)
            for i in range(int(config.get("n_layer", 12)))
        ),
        "names": names.GPT2,
        "mlp_width": int(config.get("n_inner", 4 * hidden)),
        "tied_head": bool(config.get("tie_word_embeddings", True)),
        "position_rows": int(config.get("n_positions", 1024)),
    }


def gpt2(config: ModelConfig) -> DecoderSpec | None:
    if config.get("add_cross_attention", False):
        return None
    return _spec(
        config,
        qkv_layout="stacked",
        transposed=True,
        activation=config.get("activation_function", "gelu_new"),
        **_gpt2_numbers(config),
    )


def openai_gpt(config: ModelConfig) -> DecoderSpec:
    """The first GPT (OpenAI 2018): the norm of a sum takes its place."""
    numbers, said = _gpt2_numbers(config), config.get("afn", "gelu")
    changes: dict[str, Any] = {
        "names": names.OPENAI_GPT,
        "mlp_width": 4 * numbers["hidden"],
        "position_rows": int(config.get("n_positions", 512)),
        "qkv_layout": "stacked",
        "transposed": True,
        "activation": "gelu_new" if said == "gelu" else said,
    }
    return _end_with_sum(_spec(config, **numbers | changes))


def _end_with_sum(spec: DecoderSpec) -> DecoderSpec:
    """Return a spec of normalised sums; the norm of the last stands for later models' final one."""
    last = len(spec.layers) - 1
    kept = replace(spec.names, final_norm=spec.names.layer.format(last) + spec.names.mlp_sum_norm)
    end = replace(spec.layers[last], names=replace(kept, mlp_sum_norm=""))
    return replace(spec, names=kept, layers=(*spec.layers[:last], end))


def gpt_bigcode(config: ModelConfig) -> DecoderSpec | None:
    if config.get("add_cross_attention", False):
        return None
    numbers = _gpt2_numbers(config)
    one_key = bool(config.get("multi_query", True))
    return _spec(
        config,
        kv_heads=1 if one_key else numbers["heads"],
        qkv_layout="stacked" if one_key else "grouped",
        activation=config.get("activation_function", "gelu_pytorch_tanh"),
        **numbers,
    )


def gpt_neo(config: ModelConfig) -> DecoderSpec:
    """GPT-Neo (EleutherAI 2021): scores are not scaled; "local" layers have a window."""
    hidden, heads = int(config.get("hidden_size", 2048)), int(config.get("num_heads", 16))
    runs = config.get("attention_types") or [[["global", "local"], 12]]
    kinds = config.get("attention_layers") or [kind for run, times in runs for kind in run * times]
    if len(kinds) != int(config.get("num_layers", 24)) or set(kinds) - {"global", "local"}:
        stated = f"attention_types or attention_layers, {kinds},"
        raise ValueError(f"{stated} are no 'global' or 'local' for each layer")
    window = int(config.get("window_size", 256))
    return _spec(
        config,
        hidden=hidden,
        heads=heads,
        layers=tuple(LayerSpec(scale=1.0, window=window * (kind == "local")) for kind in kinds),
        names=names.GPT_NEO,
        mlp_width=int(config.get("intermediate_size", 4 * hidden)),
        qkv_bias=False,
        activation=config.get("activation_function", "gelu_new"),
        tied_head=bool(config.get("tie_word_embeddings", True)),
        position_rows=config.max_positions,
    )


def gptj(config: ModelConfig) -> DecoderSpec:
    hidden, heads = int(config.get("n_embd", 4096)), int(config.get("n_head", 16))
    head_dim = hidden // heads
    part = int(config.values.get("rotary_dim", 64) or head_dim) / head_dim  # null: whole heads
    layer = LayerSpec(
        scale=head_dim**-0.5, rotary=rotary(config, head_dim, partial=part, interleaved=True)
    )
    return _spec(
        config,
        hidden=hidden,
        heads=heads,
        layers=(layer,) * int(config.get("n_layer", 28)),
        names=names.GPT_J,
        mlp_width=int(config.get("n_inner", 4 * hidden)),
        parallel=True,
        qkv_bias=False,
        output_bias=False,
        head_bias=True,
        activation=config.get("activation_function", "gelu_new"),
        tied_head=bool(config.get("tie_word_embeddings", False)),
    )


def gpt_neox(config: ModelConfig) -> DecoderSpec:
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    head_dim = hidden // heads
    part = float(config.get("rotary_pct", 0.25))
    theta = float(config.get("rotary_emb_base", 10000.0))
    layer = LayerSpec(
        scale=head_dim**-0.5, rotary=rotary(config, head_dim, theta=theta, partial=part)
    )
    biased = bool(config.get("attention_bias", True))
    return _spec(
        config,
        hidden=hidden,
        heads=heads,
        layers=(layer,) * int(config.need("num_hidden_layers")),
        names=names.GPT_NEOX,
        mlp_width=int(config.need("intermediate_size")),
        parallel=bool(config.get("use_parallel_residual", True)),
        qkv_layout="grouped",
        qkv_bias=biased,
        output_bias=biased,
        activation=config.get("hidden_act", "gelu"),
        tied_head=bool(config.get("tie_word_embeddings", False)),
    )


def persimmon(config: ModelConfig) -> DecoderSpec:
    """Persimmon (Adept 2023): LayerNorm of queries and keys, squared ReLU."""
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    head_dim = hidden // heads
    normed = bool(config.get("qk_layernorm", True))
    layer = LayerSpec(scale=head_dim**-0.5, rotary=rotary(config, head_dim, partial=0.5))
    return _spec(
        config,
        hidden=hidden,
        heads=heads,
        layers=(layer,) * int(config.need("num_hidden_layers")),
        names=names.PERSIMMON,
        mlp_width=int(config.need("intermediate_size")),
        qkv_layout="grouped",
        query_key_norm="head" if normed else "none",
        query_key_norm_bias=normed,
        activation=config.get("hidden_act", "relu2"),
        tied_head=bool(config.get("tie_word_embeddings", False)),
    )


def phi(config: ModelConfig) -> DecoderSpec | None:
    if config.get("qk_layernorm", False):
        return None
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    head_dim = hidden // heads
    layer = LayerSpec(scale=head_dim**-0.5, rotary=rotary(config, head_dim, partial=0.5))
    return _spec(
        config,
        hidden=hidden,
        heads=heads,
        layers=(layer,) * int(config.need("num_hidden_layers")),
        kv_heads=int(config.get("num_key_value_heads", heads)),
        names=names.PHI,
        mlp_width=int(config.need("intermediate_size")),
        parallel=True,
        head_bias=True,
        activation=config.get("hidden_act", "gelu_new"),
        tied_head=bool(config.get("tie_word_embeddings", False)),
    )


def opt(config: ModelConfig) -> DecoderSpec | None:
    """OPT (Meta 2022); that of 350M normalises sums, and has narrower embeddings."""
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    before = bool(config.get("do_layer_norm_before", True))
    if before and config.get("_remove_final_layer_norm", False):
        return None
    if not config.get("layer_norm_elementwise_affine", True):
        return None
    biased = bool(config.get("enable_bias", True))
    width = int(config.get("word_embed_proj_dim", hidden))
    kept = names.OPT if before else names.OPT_OF_SUMS
    spec = _spec(
        config,
        hidden=hidden,
        heads=heads,
        layers=(LayerSpec(scale=(hidden // heads) ** -0.5),)
        * int(config.need("num_hidden_layers")),
        names=kept if width == hidden else replace(kept, **names.OPT_PROJECTED),
        embedding_width=0 if width == hidden else width,
        mlp_width=int(config.need("ffn_dim")),
        norm_eps=1e-5,
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=biased,
        activation=config.get("activation_function", "relu"),
        tied_head=bool(config.get("tie_word_embeddings", True)),
        position_rows=config.max_positions + 2,  # the first two rows are for padding
        position_offset=2,
    )
    return spec if before else _end_with_sum(spec)


def xglm(config: ModelConfig) -> DecoderSpec | None:
    """XGLM (Meta 2021): OPT with scaled embeddings and computed positions."""
    padding = int(config.get("pad_token_id", 1))
    if config.get("add_cross_attention", False) or padding >= 2:
        return None  # transformers zeroes the row of positions with the number of padding
    hidden, heads = int(config.get("d_model", 1024)), int(config.get("attention_heads", 16))
    scaled = bool(config.get("scale_embedding", True))
    config.need("max_position_embeddings")  # no tensor shows how many positions there are
    return _spec(
        config,
        hidden=hidden,
        heads=heads,
        layers=(LayerSpec(scale=(hidden // heads) ** -0.5),) * int(config.get("num_layers", 24)),
        names=names.XGLM,
        mlp_width=int(config.get("ffn_dim", 4096)),
        norm_eps=1e-5,
        activation=config.get("activation_function", "gelu"),
        embedding_scale=hidden**0.5 if scaled else 1.0,
        tied_head=bool(config.get("tie_word_embeddings", True)),
        position_rows=config.max_positions + 2,  # the first two rows are for padding
        position_offset=2,
        sine_positions=True,
    )


def biogpt(config: ModelConfig) -> DecoderSpec:
    """BioGPT (Microsoft 2022): OPT with scaled embeddings."""
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    scaled = bool(config.get("scale_embedding", True))
    return _spec(
        config,
        hidden=hidden,
        heads=heads,
        layers=(LayerSpec(scale=(hidden // heads) ** -0.5),)
        * int(config.need("num_hidden_layers")),
        names=names.BIOGPT,
        mlp_width=int(config.need("intermediate_size")),
        norm_eps=1e-5,  # whatever config.json says
        activation=config.get("hidden_act", "gelu"),
        embedding_scale=hidden**0.5 if scaled else 1.0,
        tied_head=bool(config.get("tie_word_embeddings", True)),
        position_rows=config.max_positions + 2,  # the first two rows are for padding
        position_offset=2,
    )


def bloom(config: ModelConfig) -> DecoderSpec | None:
    if config.get("apply_residual_connection_post_layernorm", False):
        return None
    hidden = int(config.get("hidden_size", config.get("n_embed", 64)))
    heads = int(config.get("n_head", config.get("num_attention_heads", 8)))
    layers = int(config.get("n_layer", config.get("num_hidden_layers", 2)))
    return _spec(
        config,
        hidden=hidden,
        heads=heads,
        layers=(LayerSpec(scale=(hidden // heads) ** -0.5),) * layers,
        names=names.BLOOM,
        qkv_layout="grouped",
        alibi=True,
        activation="gelu_bloom",
        tied_head=bool(config.get("tie_word_embeddings", True)),
    )


def falcon(config: ModelConfig) -> DecoderSpec | None:
    if config.get("alibi", False):
        return None  # its biases are rounded to bfloat16 during the computation
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    head_dim = hidden // heads
    newer = bool(config.get("new_decoder_architecture", False))
    parallel = bool(config.get("parallel_attn", True)) or newer
    one_key = bool(config.get("multi_query", True)) and not newer
    where = names.FALCON_PARALLEL if parallel else names.FALCON
    if newer and int(config.get("num_ln_in_parallel_attn", 2)) == 2:
        where = names.FALCON_TWO_NORMS
    biased = bool(config.get("bias", False))
    layer = LayerSpec(scale=head_dim**-0.5, rotary=rotary(config, head_dim))
    return _spec(
        config,
        hidden=hidden,
        heads=heads,
        layers=(layer,) * int(config.need("num_hidden_layers")),
        kv_heads=1 if one_key else int(config.get("num_kv_heads", heads)) if newer else heads,
        names=where,
        mlp_width=int(config.get("ffn_hidden_size", 4 * hidden)),
        parallel=parallel,
        qkv_layout="grouped",
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=biased,
        activation=config.get("activation", "gelu"),
        tied_head=bool(config.get("tie_word_embeddings", True)),
    )


def refined_web(config: ModelConfig) -> DecoderSpec | None:
    """Falcon by its former name, with other names for its numbers."""
    values = config.values
    renamed = {
        "num_attention_heads": values.get("n_head"),
        "num_hidden_layers": values.get("n_layer"),
        "num_kv_heads": values.get("n_head_kv"),
        "new_decoder_architecture": "n_head_kv" in values,
    }
    return falcon(replace(config, values={**values, **renamed}))


def mpt(config: ModelConfig) -> DecoderSpec | None:
    attention = config.get("attn_config", {})
    if (
        attention.get("qk_ln")
        or not attention.get("alibi", True)
        or not config.get("no_bias", True)
    ):
        return None
    if int(attention.get("alibi_bias_max", 8)) != 8:
        return None
    hidden, heads = int(config.need("d_model")), int(config.need("n_heads"))
    scale = attention.get("softmax_scale") or (hidden / heads) ** -0.5
    return _spec(
        config,
        hidden=hidden,
        heads=heads,
        layers=(LayerSpec(scale=float(scale)),) * int(config.need("n_layers")),
        names=names.MPT,
        norm_bias=False,
        qkv_layout="stacked",
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        alibi=True,
        qkv_clip=float(attention.get("clip_qkv") or 0.0),
        activation="gelu",
        tied_head=bool(config.get("tie_word_embeddings", True)),
    )
