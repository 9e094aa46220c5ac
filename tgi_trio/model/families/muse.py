"""Muse Glimmer (Meta 2026)."""

from __future__ import annotations

from dataclasses import replace

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.llama_like import attention_bias, llama_spec
from tgi_trio.model.reading import rotary
from tgi_trio.model.specs.decoder import DecoderSpec, LayerSpec


def muse_glimmer(config: ModelConfig) -> DecoderSpec:
    """Heads and embeddings are normalised without weights; every fourth layer sees everything.

    Layers that see everything do not rotate; they are counted back from the last.
    """
    head_dim, count = int(config.get("head_dim", 128)), int(config.need("num_hidden_layers"))
    rotary_spec = rotary(config, head_dim)
    whole = [(count - 1 - i) % 4 == 0 for i in range(count)]
    if kinds := config.get("layer_types"):
        local = [kind == "sliding_attention" for kind in kinds]
    else:
        local = [not own for own in whole]
    window = int(config.values.get("sliding_window", 2048) or 0)
    # What an entry says is whether its layer rotates: all do by the model's own base.
    bases = config.get("layer_rope_theta") or [not own for own in whole]
    spec = llama_spec(
        config,
        head_dim=head_dim,
        rotary_spec=rotary_spec,
        names=names.MUSE_GLIMMER,
        norm="rms_plus_one",
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        post_norm_eps=float(config.get("post_norm_eps", 1e-8)),
        outer_norm="rms",
        normalised_embedding=True,
        query_key_norm="plain",
        gated_attention=True,
        activation=config.get("hidden_activation", "silu"),
        logit_scale=float(config.get("output_multiplier", 0.19611613513818404)),
        final_soft_cap=float(config.get("final_logit_softcapping", 20.0)),
        **attention_bias(config),
    )
    scale = head_dim**-0.5 * float(config.get("qk_scale_factor", 3.87))

    def kind(layer: LayerSpec, slides: bool, base: float) -> LayerSpec:
        return replace(
            layer,
            scale=scale,
            window=window if slides else 0,
            rotary=rotary_spec if base else None,
        )

    return replace(spec, layers=tuple(map(kind, spec.layers, local, bases)))
