"""Mistral Large 4 (2026): layers share latents, an index chooses tokens, and some do not turn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.deepseek import deepseek_spec
from tgi_trio.model.families.sparse import choosing_layers
from tgi_trio.model.reading import with_rotary
from tgi_trio.model.specs.decoder import (
    DecoderSpec,
    ExpertsSpec,
    HeadSizes,
    IndexSpec,
    LatentSpec,
    LayerSpec,
    RotarySpec,
)

_ROTARY: Final[dict[str, Any]] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 2048.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "attention_factor": 1.0,
}


def mistral_large4(config: ModelConfig) -> DecoderSpec | None:
    """The text of Mistral Large 4.

    None for experts in groups, for queries that are compressed, for a first layer without an index,
    and where the latents that config.json names are not those that transformers would read.
    """
    config = with_rotary(config, _ROTARY)
    count = int(config.need("num_hidden_layers"))
    turns = _turning_layers(config, count)
    sources = [int(own) for own in config.get("kv_source_layers", range(count))]
    chooses = choosing_layers(config, count)
    if int(config.get("n_group", 1)) > 1 or config.get("q_lora_rank") or not chooses[0]:
        return None
    if not _reads_the_last(turns, sources):
        return None
    spec = deepseek_spec(
        replace(config, values={**config.values, "rope_interleave": True, "mlp_bias": False}),
        _experts(config),
        names.MISTRAL_LARGE4,
        sparse=_sparse(config, count),
        query_rank=0,
        plain_dim=64,
        norm_eps=1e-5,
    )
    latent, rotary_spec = spec.latent, spec.layers[0].rotary
    if latent is None or rotary_spec is None:
        raise ValueError("there are no latents")
    latent = replace(latent, norm_eps=spec.norm_eps)
    rotary_spec = replace(rotary_spec, log_positions=True, learned=True)
    index = IndexSpec(
        heads=int(config.get("index_n_heads", 32)),
        dim=int(config.get("index_head_dim", 128)),
        most=int(config.get("index_topk", 2048)),
        rotary=rotary_spec,
        reads_input=True,
    )
    layers = tuple(
        _layer(layer, latent, index, turns=own)
        for layer, own in zip(spec.layers, turns, strict=True)
    )
    spec = replace(
        spec,
        latent=latent,
        index=index,
        head_dim=spec.head_dim + index.dim,
        final_soft_cap=float(config.get("final_logit_softcapping", 30.0)),
    )
    return replace(spec, layers=tuple(_share(spec, layers, sources, chooses)))


def _turning_layers(config: ModelConfig, count: int) -> list[bool]:
    """Return which layers rotate: 1 in config.json, whatever the name says."""
    every = int(config.get("no_rope_layer_interval", 4))
    default = [(i + 1) % every != 0 for i in range(count)]
    return [bool(own) for own in config.get("no_rope_layers", default)][:count]


def _reads_the_last(turns: list[bool], sources: list[int]) -> bool:
    """Return whether each layer reads the latents that were last made for several layers.

    transformers keeps one set of those that are rotated, and one of the others.
    """
    last: dict[bool, int] = {}
    for i, (own, source) in enumerate(zip(turns, sources, strict=True)):
        if source == i:
            if i in sources[i + 1 :]:
                last[own] = i
        elif last.get(own) != source:
            return False
    return True


def _sparse(config: ModelConfig, count: int) -> list[bool]:
    if kinds := config.get("mlp_layer_types"):
        return [kind == "sparse" for kind in kinds]
    first = int(config.get("first_k_dense_replace", 1))
    return [i >= first for i in range(count)]


def _experts(config: ModelConfig) -> ExpertsSpec:
    width = int(config.get("moe_intermediate_size", 6144))
    count = config.get("num_experts", config.get("num_local_experts", 128))
    return ExpertsSpec(
        count=int(config.get("n_routed_experts", count)),
        per_token=int(config.get("num_experts_per_tok", 4)),
        width=width,
        normalise=True,
        shared_width=width * int(config.get("n_shared_experts", 1)),
        routing="grouped-softmax",
        scale=float(config.get("routed_scaling_factor", 1.0)),
    )


def _layer(layer: LayerSpec, latent: LatentSpec, index: IndexSpec, *, turns: bool) -> LayerSpec:
    """Return a layer with its latents and index; one that does not turn has no part that would."""
    if turns:
        return replace(layer, rotary=index.rotary)
    still = RotarySpec(dim=0, log_positions=True)
    plain = latent.plain_dim + latent.rotary_dim
    return replace(
        layer,
        rotary=still,
        latent=replace(latent, plain_dim=plain, rotary_dim=0),
        index=replace(index, rotary=still),
    )


def _share(
    spec: DecoderSpec, layers: tuple[LayerSpec, ...], sources: list[int], chooses: list[bool]
) -> list[LayerSpec]:
    """Return layers with what they read of each other.

    Index keys of layers that read another's latents lie behind those, one after another.
    """
    shared = []
    for i, (layer, source) in enumerate(zip(layers, sources, strict=True)):
        latent = spec.latent_of(layers[source])
        if latent is None or spec.index is None:
            raise ValueError("there are no latents")
        keepers = [j for j, own in enumerate(sources) if own == source and chooses[j]]
        width = latent.rank + latent.rotary_dim + spec.index.kept * len(keepers)
        own = replace(
            layer,
            chooses=chooses[i],
            sizes=HeadSizes(1, width, width),
            reads_layer=None if source == i else source,
            index_place=keepers.index(i) if chooses[i] else 0,
        )
        shared.append(own)
    return shared
