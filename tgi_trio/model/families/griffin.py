"""Griffin's family: windowed attention among gated recurrences (De, others 2024)."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, islice
from math import sqrt
from struct import pack, unpack
from typing import Final

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.linear_attention import set_mixers
from tgi_trio.model.families.llama_like import llama_spec
from tgi_trio.model.reading import rotary
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.specs.mixers import RecurrentGate

_KINDS: Final = {"attention": "full_attention", "recurrent": "linear_attention"}


def recurrent_gemma(config: ModelConfig) -> DecoderSpec:
    """RecurrentGemma: two recurrences, then a layer of windowed attention."""
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    count = int(config.need("num_hidden_layers"))
    # Any other statement about heads is ignored, as in transformers.
    config = replace(config, values={**config.values, "head_dim": hidden // heads})
    pattern = config.get("block_types", ("recurrent", "recurrent", "attention"))
    act = config.get("hidden_activation", "gelu_pytorch_tanh")
    spec = llama_spec(
        config,
        windows=[int(config.get("attention_window_size", 2048))] * count,
        rotary_spec=rotary(config, hidden // heads, partial=0.5),
        names=names.RECURRENT_GEMMA,
        norm="rms_plus_one",
        mlp_width=int(config.get("intermediate_size", 3 * hidden)) // 2,
        mlp_bias=True,
        qkv_bias=bool(config.get("attention_bias", False)),
        output_bias=True,
        activation=act,
        embedding_scale=_as_bfloat16(sqrt(hidden)),
        final_soft_cap=float(config.get("logits_soft_cap", 30.0)),
        tied_head=bool(config.get("tie_word_embeddings", True)),
    )
    mixer = RecurrentGate(
        heads=heads,
        head_dim=int(config.get("lru_width", hidden)) // heads,
        taps=int(config.get("conv1d_width", 4)),
        activation=act,
    )
    return set_mixers(spec, mixer, [_KINDS[word] for word in islice(cycle(pattern), count)])


def _as_bfloat16(value: float) -> float:
    """Return the nearest bfloat16, in which the family stores this number whatever its dtype is."""
    (bits,) = unpack("<I", pack("<f", value))
    return float(unpack("<f", pack("<I", (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000))[0])
