"""Zamba2 (Zyphra 2024): Mamba-2 in every layer, and a few blocks of attention shared by many."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.llama_like import llama_spec
from tgi_trio.model.reading import rotary
from tgi_trio.model.specs.decoder import DecoderSpec, LayerSpec, SharedBlock
from tgi_trio.model.specs.mixers import Mamba2

_HYBRID: Final = "hybrid"  # the name in configs of a layer that uses a block
_OTHERS: Final = ("mamba", "mamba2", "linear_attention")
# The first Zamba2 does not state it: lengths of runs without a block, each followed by one.
_RUNS: Final = (6, *[5] * 6, 4, 3)


def zamba2(config: ModelConfig) -> DecoderSpec:
    """Zamba2: blocks read the hidden state and the embedding, so heads are twice as wide."""
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    head_dim, biased = 2 * hidden // heads, bool(config.get("add_bias_linear", False))
    width = int(config.get("intermediate_size") or 4 * hidden)
    kinds = _kinds(config)
    stated = {"intermediate_size": width, "num_hidden_layers": len(kinds)}
    config = replace(config, values={**config.values, **stated})
    spec = llama_spec(
        config,
        head_dim=head_dim,
        rotary_spec=rotary(config, head_dim) if config.get("use_mem_rope", False) else None,
        rotates=bool(config.get("use_mem_rope", False)),
        scale=(head_dim / 2) ** -0.5,
        names=names.ZAMBA2,
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        mlp_bias=biased,
        activation=config.get("hidden_act", "gelu"),
        tied_head=bool(config.get("tie_word_embeddings", True)),
    )
    inner = int(config.get("mamba_expand", 2) * hidden)
    mamba_heads = int(config.get("n_mamba_heads", 8))
    mixer = Mamba2(
        heads=mamba_heads,
        head_dim=inner // mamba_heads,
        groups=int(config.get("mamba_ngroups", 1)),
        state_dim=int(config.get("mamba_d_state", 64)),
        taps=int(config.get("mamba_d_conv", 4)),
        norm_eps=1e-5,  # whatever the layers' is
        inner_bias=biased,
        output_bias=biased,
        least_step=float(config.get("time_step_min", 0.001)),
    )
    return replace(spec, layers=tuple(_layers(config, spec, kinds, mixer)))


def _kinds(config: ModelConfig) -> list[str]:
    """Return the kind of each layer; raises ValueError for an unknown name."""
    default = [word for run in _RUNS for word in (*[_OTHERS[0]] * run, _HYBRID)]
    default += [_OTHERS[0]] * 2
    kinds = list(config.get("layers_block_type") or config.get("layer_types") or default)
    known = (_HYBRID, *_OTHERS)
    if unknown := [word for word in kinds if word not in known]:
        raise ValueError(f"{unknown[0]!r} is no kind of layer; known are {', '.join(known)}")
    return kinds


def _layers(
    config: ModelConfig, spec: DecoderSpec, kinds: list[str], mixer: Mamba2
) -> Iterator[LayerSpec]:
    """Yield the layers; blocks are stored in the first layers that use one, and used in turn."""
    using = [index for index, word in enumerate(kinds) if word == _HYBRID]
    blocks, rank = int(config.get("num_mem_blocks", 1)), int(config.get("adapter_rank", 128))
    for index, layer in enumerate(spec.layers):
        if index not in using:
            yield replace(layer, mixer=mixer, attends=False, feeds=False, rotary=None)
            continue
        use = using.index(index)
        shared = SharedBlock(
            layer=using[use % blocks],
            use=use,
            rank=rank,
            attention_rank=rank if config.get("use_shared_attention_adapter", False) else 0,
        )
        yield replace(layer, mixer=mixer, names=names.ZAMBA2_HYBRID, shared=shared)
