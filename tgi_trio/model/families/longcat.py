"""LongCat-Flash (Meituan 2025): layers of two attentions and MLPs, with experts across them.

Each is two layers here. Experts read what the first MLP does, and join after the second one, so
that they can be computed beside all between. Source: its technical report (arXiv 2509.01322),
sections 2.1 and 2.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.deepseek import deepseek_spec
from tgi_trio.model.specs.decoder import DecoderSpec, ExpertsSpec, Names


def longcat_flash(config: ModelConfig) -> DecoderSpec | None:
    """Latents and queries are scaled as if compressed to the width of the hidden state."""
    count, hidden = int(config.need("num_layers")), int(config.need("hidden_size"))
    spec = deepseek_spec(
        _renamed(config, count),
        _experts(config),
        names.LONGCAT_FLASH,
        sparse=[True, False] * count,
        norm_eps=1e-5,
        theta=10000000.0,
    )
    latent = spec.latent
    if latent is None or not latent.query_rank or config.get("router_bias", False):
        return None
    if int(config.get("qk_head_dim", 0)) not in (0, latent.plain_dim + latent.rotary_dim):
        return None
    sharper = (hidden / latent.query_rank) ** 0.5
    layers = tuple(
        replace(layer, scale=layer.scale * sharper, names=own, later=layer.experts is not None)
        for layer, own in zip(spec.layers, _names(spec), strict=True)
    )
    return replace(spec, layers=layers, latent=replace(latent, scale=(hidden / latent.rank) ** 0.5))


def _renamed(config: ModelConfig, count: int) -> ModelConfig:
    """Return the config with the names that other families have for the same."""
    own = {
        "num_hidden_layers": 2 * count,
        "intermediate_size": config.get("ffn_hidden_size", config.get("intermediate_size", 12288)),
        "rope_interleave": True,
        "mlp_bias": False,
    }
    return replace(config, values={**config.values, **own})


def _experts(config: ModelConfig) -> ExpertsSpec:
    width = config.get("expert_ffn_hidden_size", config.get("moe_intermediate_size", 2048))
    return ExpertsSpec(
        count=int(config.get("n_routed_experts", config.get("num_local_experts", 512))),
        per_token=int(config.get("moe_topk", config.get("num_experts_per_tok", 12))),
        width=int(width),
        normalise=False,
        routing="biased-softmax",
        scale=float(config.get("routed_scaling_factor", 6.0)),
        idle=int(config.values.get("zero_expert_num", 256) or 0),
    )


def _names(spec: DecoderSpec) -> Iterator[Names]:
    """Yield the names of each layer: halves of the same one follow one another."""
    for index in range(len(spec.layers)):
        whole, half = divmod(index, 2)
        yield names.longcat_half(names.LONGCAT_FLASH, whole, half)
