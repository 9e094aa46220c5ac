"""BitNet b1.58 (Microsoft 2025): Llama's layers, with norms of what their last linears read.

Its weights are -1, 0 or 1 times a number of the matrix: see `quantised/bitnet_layout.py`.
"""

from __future__ import annotations

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families import names
from tgi_trio.model.families.llama_like import attention_bias, llama_spec
from tgi_trio.model.reading import rotary
from tgi_trio.model.specs.decoder import DecoderSpec


def bitnet(config: ModelConfig) -> DecoderSpec:
    hidden, heads = int(config.need("hidden_size")), int(config.need("num_attention_heads"))
    head_dim = int(config.get("head_dim", hidden // heads))
    return llama_spec(
        config,
        rotary_spec=rotary(config, head_dim, theta=500000.0),
        names=names.BITNET,
        norm_eps=float(config.get("rms_norm_eps", 1e-5)),
        activation=config.get("hidden_act", "relu2"),
        **attention_bias(config),
    )
