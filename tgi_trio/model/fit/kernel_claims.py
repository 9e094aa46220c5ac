"""The models that the CPU kernels compute: the spec's fields that they read, and their values.

No llvmlite in this file, since the router reads it as well.
"""

from __future__ import annotations

from typing import Final

from tgi_trio.model.claims import (
    ANY,
    CONVOLVED,
    Claim,
    Claims,
    every_field,
    multiples,
    only,
)
from tgi_trio.model.fit.name_claims import NAMES
from tgi_trio.model.specs.decoder import (
    CompressionSpec,
    SharedKeySpec,
)
from tgi_trio.model.specs.ngrams import NgramsSpec

LANES = 16  # float32 numbers in a vector: one AVX512 register, two of AVX2, four of NEON
PANEL = 2 * LANES  # output features that are computed together

# Names in config.json; the kernels' `tables.py` maps them to functions.
ACTIVATIONS = (
    *("silu", "swish", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_bloom"),
    *("quick_gelu", "relu", "relu2", "xielu"),
)
ROUTINGS = (
    *("softmax", "biased-softmax", "sparse-mixer", "grouped-softmax", "grouped-sigmoid"),
    "sigmoid",
)
MOST_EXPERTS: Final = 4096  # limited by a thread's scratch memory
MOST_KEYS: Final = 4096  # dimensions of a state's keys; limited by a thread's scratch memory

_KEYS = Claim(
    lambda size: size % PANEL == 0 and size <= MOST_KEYS,
    f"a state of {{}} numbers per value, which is no multiple of {PANEL} up to {MOST_KEYS}",
)
_VALUES = multiples(PANEL, f"values of {{}} numbers, which is no multiple of {PANEL}")
_CHANNELS = multiples(PANEL, f"{{}} channels are no multiple of {PANEL}")
_MLP = multiples(PANEL, f"MLP width {{}} is no multiple of {PANEL}")
_LATENTS = multiples(PANEL, f"latents with {{}} numbers, which is no multiple of {PANEL}")
_RANKS = multiples(PANEL, f"what layers add to shared blocks is of rank {{}}, not of {PANEL}s")

# Parts of what is refused.
_REFUSED: Final = (*(CompressionSpec, SharedKeySpec),)
CLAIMS: Final[Claims] = {
    **NAMES,
    "DecoderSpec.family": ANY,
    "DecoderSpec.vocab_size": ANY,
    "DecoderSpec.heads": ANY,
    "DecoderSpec.kv_heads": ANY,
    "DecoderSpec.layers": ANY,
    "DecoderSpec.mtp": ANY,
    "DecoderSpec.names": ANY,
    "DecoderSpec.index": ANY,
    "LayerSpec.blocks": ANY,
    "BlockIndexSpec.dim": multiples(
        PANEL, f"an index has keys of {{}} numbers, which is no multiple of {PANEL}"
    ),
    "BlockIndexSpec.size": multiples(
        LANES, f"an index chooses blocks of {{}} tokens, which is no multiple of {LANES}"
    ),
    "BlockIndexSpec.most": ANY,
    "BlockIndexSpec.local": ANY,
    "DecoderSpec.mlp_limit": ANY,
    "DecoderSpec.mlp_raised": ANY,
    "LayerSpec.chooses": ANY,
    "IndexSpec.heads": ANY,
    "IndexSpec.dim": multiples(
        PANEL, f"an index has keys of {{}} numbers, which is no multiple of {PANEL}"
    ),
    "IndexSpec.most": ANY,
    "IndexSpec.pool": ANY,
    "IndexSpec.rotary": ANY,
    "IndexSpec.last": ANY,
    "IndexSpec.norm_eps": ANY,
    "IndexSpec.reads_input": ANY,
    "LayerSpec.pooled": ANY,
    "PooledIndexSpec.heads": ANY,
    "PooledIndexSpec.dim": multiples(
        PANEL, f"an index has keys of {{}} numbers, which is no multiple of {PANEL}"
    ),
    "PooledIndexSpec.size": ANY,
    "PooledIndexSpec.most": ANY,
    "LayerSpec.ngrams": ANY,
    **every_field(NgramsSpec),
    "NgramsSpec.width": multiples(
        PANEL, f"embeddings of n-grams of {{}} numbers, which is no multiple of {PANEL}"
    ),
    "DecoderSpec.gated_streams": ANY,
    "GatedStreamsSpec.count": Claim(
        lambda n: n <= LANES, f"a token has {{}} hidden states, which are more than {LANES}"
    ),
    "GatedStreamsSpec.rank": multiples(
        PANEL, f"gates of rank {{}}, which is no multiple of {PANEL}"
    ),
    **every_field(*_REFUSED),
    "DecoderSpec.shared_key": only(None, refusal="all heads share one key, which is their value"),
    "LayerSpec.compression": ANY,  # part of what is refused
    "DecoderSpec.hyper": ANY,
    "HyperSpec.count": Claim(
        lambda n: n <= LANES, f"a token has {{}} hidden states, which are more than {LANES}"
    ),
    "HyperSpec.iterations": ANY,
    **{f"HyperSpec.{name}": ANY for name in ("eps", "added", "added_eps")},
    "DecoderSpec.latent": ANY,
    "LatentSpec.rank": _LATENTS,
    "LatentSpec.query_rank": _LATENTS,
    "LatentSpec.plain_dim": _LATENTS,
    "LatentSpec.rotary_dim": _LATENTS,
    "LatentSpec.value_dim": _LATENTS,
    "LatentSpec.bias": ANY,
    "LatentSpec.doubled": ANY,
    "LatentSpec.scale": only(1.0, refusal="latents are scaled by {}"),
    "LatentSpec.norm_eps": ANY,
    "DecoderSpec.head_dim": ANY,
    "DecoderSpec.hidden_size": multiples(PANEL, f"hidden size {{}} is no multiple of {PANEL}"),
    "DecoderSpec.mlp_width": _MLP,
    "DecoderSpec.activation": only(*ACTIVATIONS, refusal="activation {!r} is not built"),
    "DecoderSpec.parallel": ANY,
    "LayerSpec.feeds": ANY,
    "LayerSpec.mixer": ANY,
    "LayerSpec.attends": ANY,
    "LayerSpec.cross_attention": only(None, refusal="layers attend to images"),
    # Parts of what is refused, like the next ones.
    "CrossAttentionSpec.blind": only(
        "reads all", "feeds", refusal="tokens before all images that {!r}"
    ),
    "CrossAttentionSpec.together": ANY,
    "CrossAttentionSpec.gate_shape": ANY,
    "CrossAttentionSpec.query_norm": ANY,
    "DecoderSpec.added_tokens": only(0, refusal="the last {} tokens have tables of their own"),
    "DecoderSpec.extra_tokens": only(0, refusal="the last {} tokens are never chosen"),
    "ShortConvolution.channels": _CHANNELS,
    "ShortConvolution.taps": ANY,
    "ShortConvolution.bias": ANY,
    "DeltaRule.key_heads": ANY,
    "DeltaRule.value_heads": ANY,
    "DeltaRule.key_dim": _KEYS,
    "DeltaRule.value_dim": _VALUES,
    "DeltaRule.taps": ANY,
    "DeltaRule.layout": only(
        *("grouped", "stacked", "mixed", "separate", "compressed", "low rank", "full rank"),
        refusal="layout {!r}",
    ),
    "DeltaRule.tiled": ANY,
    "DeltaRule.norm_eps": ANY,
    "DeltaRule.by_channel": ANY,
    "DeltaRule.channel_rank": multiples(
        PANEL, f"decays per channel of {{}} numbers, which is no multiple of {PANEL}"
    ),
    "DeltaRule.gate": only("silu", "sigmoid", refusal="gate {!r} is not built"),
    "DeltaRule.least_decay": ANY,  # by channel
    "DeltaRule.beta_scale": ANY,
    "DeltaRule.activation": CONVOLVED,
    "Mamba2.heads": ANY,
    "Mamba2.head_dim": _VALUES,
    "Mamba2.groups": ANY,
    "Mamba2.state_dim": _KEYS,
    "Mamba2.taps": ANY,
    "Mamba2.norm_eps": ANY,
    "Mamba2.norm": only("none", "before gate", "behind gate", refusal="norm {!r} is not built"),
    "Mamba2.convolution_bias": ANY,
    "Mamba2.inner_bias": ANY,
    "Mamba2.output_bias": ANY,
    "Mamba2.least_step": ANY,
    "Mamba2.most_step": ANY,
    "Mamba2.activation": CONVOLVED,
    "Mamba2.multipliers": ANY,
    "Mamba2.output_multiplier": ANY,
    "Mamba1.channels": _CHANNELS,
    "Mamba1.state_dim": multiples(
        LANES, f"a state of {{}} numbers per channel, which is no multiple of {LANES}"
    ),
    "Mamba1.step_rank": ANY,
    "Mamba1.taps": ANY,
    "Mamba1.norm": only("none", "plain", "weighted", refusal="norm {!r} is not built"),
    "Mamba1.norm_eps": ANY,
    "Mamba1.convolution_bias": ANY,
    "Mamba1.bias": ANY,
    "Mamba1.activation": CONVOLVED,
    "RecurrentGate.heads": ANY,
    "RecurrentGate.head_dim": _CHANNELS,
    "RecurrentGate.taps": ANY,
    "RecurrentGate.activation": only(*ACTIVATIONS, refusal="activation {!r} is not built"),
    "LayerSpec.ahead": ANY,
    "LayerSpec.sizes": ANY,
    "HeadSizes.kv_heads": ANY,
    "HeadSizes.dim": ANY,
    "HeadSizes.value_dim": ANY,
    "HeadSizes.heads": ANY,
    "LayerSpec.keys_as_values": ANY,
    "LayerSpec.reads_layer": ANY,
    "LayerSpec.latent": ANY,
    "LayerSpec.index": ANY,
    "LayerSpec.index_place": ANY,  # keys of each are kept apart here
    "LayerSpec.sinks": ANY,
    "LayerSpec.mlp_width": _MLP,
    "LayerSpec.sparsity": ANY,
    "DecoderSpec.streams": ANY,
    "StreamsSpec.count": Claim(
        lambda n: n <= LANES, f"a token has {{}} hidden states, which are more than {LANES}"
    ),
    "StreamsSpec.active": ANY,
    "StreamsSpec.scaled": ANY,
    "StreamsSpec.detour_rank": multiples(
        PANEL, f"detours of {{}} numbers, which is no multiple of {PANEL}"
    ),
    "LayerSpec.beside": ANY,
    "LayerSpec.later": only(False, refusal="what experts say joins behind the next layer"),
    "DecoderSpec.value_norm": ANY,
    "DecoderSpec.value_scale": ANY,
    "DecoderSpec.per_layer_inputs": ANY,
    "PerLayerInputsSpec.width": multiples(
        PANEL, f"layers' own embeddings of {{}} numbers, which is no multiple of {PANEL}"
    ),
    "PerLayerInputsSpec.rows": ANY,
    "PerLayerInputsSpec.image_token": ANY,
    "LayerSpec.experts": ANY,
    "LayerSpec.names": ANY,
    "LayerSpec.shared": ANY,
    "SharedBlock.layer": ANY,
    "SharedBlock.use": ANY,
    "SharedBlock.rank": _RANKS,
    "SharedBlock.attention_rank": _RANKS,
    "ExpertsSpec.count": Claim(
        lambda n: n <= MOST_EXPERTS, f"there are more than {MOST_EXPERTS} experts"
    ),
    "ExpertsSpec.per_token": ANY,
    "ExpertsSpec.width": multiples(PANEL, f"expert width {{}} is no multiple of {PANEL}"),
    "ExpertsSpec.shared_width": multiples(
        PANEL, f"width {{}} of the shared expert is no multiple of {PANEL}"
    ),
    "ExpertsSpec.latent_width": multiples(
        PANEL, f"experts read compressed tokens of {{}} numbers, which is no multiple of {PANEL}"
    ),
    "ExpertsSpec.routing": only(*ROUTINGS, refusal="routing {!r} is not built"),
    "ExpertsSpec.normalise": ANY,
    "ExpertsSpec.jitter": ANY,
    "ExpertsSpec.groups": ANY,
    "ExpertsSpec.groups_used": ANY,
    "ExpertsSpec.scale": ANY,
    "ExpertsSpec.result_scale": ANY,
    "ExpertsSpec.stacked": ANY,  # concerns only how weights are stored
    "ExpertsSpec.gate_up": only(  # likewise
        "turns", "halves", "rows", refusal="layout {!r} of experts is not known"
    ),
    "ExpertsSpec.biased": ANY,
    "ExpertsSpec.weighs_inputs": ANY,
    "ExpertsSpec.limit": ANY,
    "ExpertsSpec.bounds_opened": ANY,
    "ExpertsSpec.shared_limit": ANY,
    "ExpertsSpec.raised": ANY,
    "ExpertsSpec.by_token": only(False, refusal="a table has the experts of tokens"),
    "ExpertsSpec.logit_cap": ANY,
    "ExpertsSpec.idle": only(0, refusal="{} experts return their input"),
    "Names.sinks": ANY,
    "DecoderSpec.position_rows": ANY,
    "DecoderSpec.position_offset": ANY,  # of learned positions
    "DecoderSpec.sine_positions": ANY,
    "DecoderSpec.alibi": ANY,
    "DecoderSpec.alibi_scale": ANY,  # of linear biases
    "DecoderSpec.embedding_width": multiples(
        PANEL, f"rows of embeddings have {{}} numbers, which is no multiple of {PANEL}"
    ),
    "DecoderSpec.normalised_head": ANY,
    "DecoderSpec.normalised_embedding": ANY,
    "Names.embedding_norm": ANY,
    "DecoderSpec.query_key_norm": only(
        *("none", "head", "each", "whole", "bare", "plain"), refusal="norm of {!r}"
    ),
    "DecoderSpec.gated_heads": ANY,
    "DecoderSpec.gate_activation": only("sigmoid", "softplus", refusal="gates by {!r}"),
    "DecoderSpec.norm_gate_rank": ANY,
    "DecoderSpec.gated_values": ANY,  # of latents
    "DecoderSpec.gated_attention": ANY,
    "DecoderSpec.norm_after_rotary": ANY,
    "DecoderSpec.query_key_norm_bias": ANY,
    "DecoderSpec.qkv_clip": ANY,
    "DecoderSpec.transposed": ANY,
    "DecoderSpec.qkv_layout": only("separate", "stacked", "grouped", refusal="layout {!r}"),
    "DecoderSpec.norm": only(
        *("rms", "rms_plus_one", "layer", "layer_plus_one"), refusal="norm {!r} is not built"
    ),
    "DecoderSpec.norm_eps": ANY,
    "DecoderSpec.post_norm_eps": ANY,
    "DecoderSpec.outer_norm": only(
        *(None, "rms", "rms_plus_one", "layer", "layer_plus_one"), refusal="norm {!r} is not built"
    ),
    "DecoderSpec.norm_bias": ANY,
    "DecoderSpec.norm_weight": ANY,
    "DecoderSpec.qkv_bias": ANY,
    "DecoderSpec.output_bias": ANY,
    "DecoderSpec.mlp_bias": ANY,
    "DecoderSpec.head_bias": ANY,
    "DecoderSpec.gated": ANY,
    "DecoderSpec.tied_head": ANY,
    "DecoderSpec.attention_soft_cap": ANY,
    "DecoderSpec.final_soft_cap": ANY,
    "DecoderSpec.embedding_scale": ANY,
    "DecoderSpec.residual_scale": ANY,
    "DecoderSpec.attention_scale": ANY,
    "DecoderSpec.gate_scale": ANY,
    "DecoderSpec.mlp_scale": ANY,
    "DecoderSpec.logit_scale": ANY,
    "DecoderSpec.attention_input_scale": ANY,
    "DecoderSpec.head_input_scale": ANY,
    "LayerSpec.scale": ANY,
    "LayerSpec.window": ANY,
    "LayerSpec.chunk": ANY,
    "LayerSpec.rotary": ANY,
    "RotarySpec.interleaved": ANY,
    "RotarySpec.backwards": ANY,
    "RotarySpec.kind": only(
        *("default", "linear", "llama3", "yarn", "proportional", "divided", "dynamic", "longrope"),
        refusal="rotary scaling {!r} is not built",
    ),
    "RotarySpec.dim": ANY,
    "RotarySpec.theta": ANY,
    "RotarySpec.max_positions": ANY,
    "RotarySpec.sections": ANY,
    "RotarySpec.sections_alternate": ANY,
    "RotarySpec.query_scale": ANY,
    "RotarySpec.log_positions": ANY,
    "RotarySpec.learned": ANY,
    "QueryScale.beta": ANY,
    "QueryScale.step": ANY,
    "QueryScale.offset": ANY,
    "RotarySpec.parameters": ANY,  # `positions/rotary_frequencies.py` reads them
}
