"""The models that the CPU kernels compute: the spec's fields that they read, and their values.

No numba in this file, since the router reads it as well.
"""

from __future__ import annotations

from typing import Final

from tgi_trio.errors import ConfigurationError
from tgi_trio.model.block_index import BlockIndexSpec
from tgi_trio.model.claims import (
    ANY,
    CONVOLVED,
    Claim,
    Claims,
    every_field,
    find_unclaimed,
    multiples,
    only,
)
from tgi_trio.model.decoder_matrices import NAMES
from tgi_trio.model.gated_streams import GatedStreamsSpec
from tgi_trio.model.mixers import Mamba2
from tgi_trio.model.ngrams import NgramsSpec
from tgi_trio.model.pooled_index import PooledIndexSpec
from tgi_trio.model.spec import (
    CompressionSpec,
    DecoderSpec,
    ExpertsSpec,
    HyperSpec,
    IndexSpec,
    SharedBlock,
    SharedKeySpec,
)
from tgi_trio.model.split import Portion

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
_DTYPES = ("float32", "bfloat16")

_KEYS = Claim(
    lambda size: size % PANEL == 0 and size <= MOST_KEYS,
    f"a state of {{}} numbers per value, which is no multiple of {PANEL} up to {MOST_KEYS}",
)
_VALUES = multiples(PANEL, f"values of {{}} numbers, which is no multiple of {PANEL}")
_CHANNELS = multiples(PANEL, f"{{}} channels are no multiple of {PANEL}")
_MLP = multiples(PANEL, f"MLP width {{}} is no multiple of {PANEL}")
_LATENTS = multiples(PANEL, f"latents with {{}} numbers, which is no multiple of {PANEL}")

# Parts of what is refused.
_REFUSED: Final = (
    *(BlockIndexSpec, CompressionSpec, GatedStreamsSpec, HyperSpec, IndexSpec, NgramsSpec),
    *(PooledIndexSpec, SharedBlock, SharedKeySpec),
)
CLAIMS: Final[Claims] = {
    **NAMES,
    "Names.final_norm": Claim(bool, "there is no norm before the head"),
    "DecoderSpec.family": ANY,
    "DecoderSpec.vocab_size": ANY,
    "DecoderSpec.heads": ANY,
    "DecoderSpec.kv_heads": ANY,
    "DecoderSpec.layers": ANY,
    "DecoderSpec.names": ANY,
    "DecoderSpec.index": only(None, refusal="an index chooses what tokens attend to"),
    "LayerSpec.blocks": only(None, refusal="an index chooses the blocks that tokens attend to"),
    "DecoderSpec.mlp_limit": only(0.0, refusal="gates of dense MLPs are limited"),
    "DecoderSpec.mlp_raised": ANY,  # part of what is refused
    "LayerSpec.chooses": ANY,  # part of what is refused, like the next ones
    "IndexSpec.heads": ANY,
    "IndexSpec.dim": ANY,
    "IndexSpec.most": ANY,
    "IndexSpec.pool": ANY,
    "IndexSpec.rotary": ANY,
    "LayerSpec.pooled": only(None, refusal="an index chooses the blocks that tokens attend to"),
    "LayerSpec.ngrams": only(None, refusal="layers embed n-grams"),
    "DecoderSpec.gated_streams": only(None, refusal="layers are between several hidden states"),
    **every_field(*_REFUSED),
    **{f"IndexSpec.{name}": ANY for name in ("heads", "dim", "most", "rotary", "last", "norm_eps")},
    "DecoderSpec.shared_key": only(None, refusal="all heads share one key, which is their value"),
    "LayerSpec.compression": ANY,  # part of what is refused
    "DecoderSpec.hyper": only(None, refusal="layers are between several hidden states"),
    **{f"HyperSpec.{name}": ANY for name in ("count", "iterations", "eps", "added", "added_eps")},
    "DecoderSpec.latent": ANY,
    "LatentSpec.rank": _LATENTS,
    "LatentSpec.query_rank": _LATENTS,
    "LatentSpec.plain_dim": _LATENTS,
    "LatentSpec.rotary_dim": _LATENTS,
    "LatentSpec.value_dim": _LATENTS,
    "LatentSpec.bias": ANY,
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
    "LayerSpec.crosses": only(None, refusal="layers attend to images"),
    # Parts of what is refused, like the next ones.
    "Crossing.blind": only("reads all", "feeds", refusal="tokens before all images that {!r}"),
    "Crossing.together": ANY,
    "Crossing.gate_shape": ANY,
    "Crossing.query_norm": ANY,
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
        *("grouped", "stacked", "mixed", "separate", "compressed"), refusal="layout {!r}"
    ),
    "DeltaRule.tiled": ANY,
    "DeltaRule.norm_eps": ANY,
    "DeltaRule.channel_rank": multiples(
        PANEL, f"decays per channel of {{}} numbers, which is no multiple of {PANEL}"
    ),
    "DeltaRule.gate": only("silu", "sigmoid", refusal="gate {!r} is not built"),
    "DeltaRule.least_decay": only(0.0, refusal="decays of a delta rule have a bound"),
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
    "DecoderSpec.own_inputs": ANY,
    "OwnInputsSpec.width": multiples(
        PANEL, f"layers' own embeddings of {{}} numbers, which is no multiple of {PANEL}"
    ),
    "OwnInputsSpec.rows": ANY,
    "OwnInputsSpec.image_token": ANY,
    "LayerSpec.experts": ANY,
    "LayerSpec.names": ANY,
    "LayerSpec.shared": only(None, refusal="layers share blocks of attention and MLP"),
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
    "DecoderSpec.gated_values": only(False, refusal="what is read of latents has gates"),
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
    "QueryScale.beta": ANY,
    "QueryScale.step": ANY,
    "QueryScale.offset": ANY,
    "RotarySpec.parameters": ANY,  # `rotary_frequencies.py` reads them, by kind
}


def unserved(reason: object) -> ConfigurationError:
    """Return the error for `--cpu-backend numba` where the kernels do not fit for `reason`."""
    return ConfigurationError(
        f"The CPU kernels cannot serve this model: {reason}. Leave --cpu-backend out to serve it "
        "with torch."
    )


def find_unsupported(spec: DecoderSpec | None, dtype: str) -> str | None:
    """Return why the kernels cannot run a model, or None."""
    if spec is None:
        return "the model runs through transformers"
    if dtype not in _DTYPES:
        return f"dtype {dtype} is not one of {', '.join(_DTYPES)}"
    if reason := _find_odd_layer(spec):
        return reason
    return find_unclaimed(spec, CLAIMS)


def undivided(part: str) -> str:
    """Return the reason for a part of a model that the kernels do not split over ranks."""
    return f"ranks divide every layer, which the kernels do not do with {part}"


def find_undivided(spec: DecoderSpec, ranks: int) -> str | None:
    """Return why the kernels cannot split every layer of a model over ranks, or None.

    They compute all layers on one rank, or whole layers on each of several.
    """
    if ranks == 1:
        return None
    parts = {
        "a state": any(layer.mixer for layer in spec.layers),
        "experts": any(layer.experts for layer in spec.layers),
        "layers that read others'": any(layer.reads_layer is not None for layer in spec.layers),
        "gates cut at a bound": any(layer.sparsity for layer in spec.layers),
        "several hidden states": spec.streams is not None,
        "embeddings of layers' own": spec.own_inputs is not None,
        "compressed keys and values": spec.latent is not None,
        "gates of heads": spec.gated_attention or spec.gated_heads,
        "a norm of all heads together": spec.query_key_norm == "whole",
        "linear biases": spec.alibi,
        "sinks": bool(spec.names.sinks),
    }
    if found := [name for name, there in parts.items() if there]:
        return undivided(found[0])
    own = Portion(0, ranks).sizes_of(spec)
    for layer in own.layers:
        sizes = own.sizes(layer)
        widths = {
            "query heads": sizes.heads * sizes.dim,
            "key heads": sizes.kv_heads * sizes.dim,
            "value heads": sizes.kv_heads * sizes.value_dim,
            "what heads say": sizes.heads * sizes.value_dim,
            "an MLP": layer.mlp_width or own.mlp_width,
        }
        for name, width in widths.items():
            if width % PANEL or sizes.dim % PANEL or sizes.value_dim % PANEL:
                return (
                    f"a rank has {width} numbers of {name} with heads of {sizes.dim}, which are no "
                    f"multiples of {PANEL}"
                )
    return None


def _find_odd_layer(spec: DecoderSpec) -> str | None:
    """Return a combination of a layer's parts that is not implemented, or None."""
    if spec.latent is not None and (reason := _find_odd_latents(spec)):
        return reason
    if spec.embedding_width > spec.hidden_size:
        return "rows of embeddings are wider than hidden states"
    if reason := _find_odd_branches(spec):
        return reason
    if spec.streams is not None and (reason := _find_odd_streams(spec)):
        return reason
    if spec.latent is None and (reason := _find_odd_heads(spec)):
        return reason
    post_norm = bool(spec.names.mlp_post_norm)
    for layer in spec.layers:
        turning = layer.rotary
        if turning is not None and turning.sections and turning.kind in ("dynamic", "longrope"):
            return "rotary frequencies depend on the length, and on places in images"
        if layer.mixer is not None and layer.attends and not isinstance(layer.mixer, Mamba2):
            return "a layer has attention and keeps a state beside it that is not Mamba-2's"
        if layer.sparsity and spec.gate_scale != 1.0:
            return "gates are scaled and cut at a bound"
        if layer.mixer is not None and spec.parallel:
            return "what keeps a state is parallel to the MLP"
        if layer.experts and _has_odd_limits(layer.experts):
            return "a shared expert's gates have limits before their activation"
        compressed = layer.experts.latent_width if layer.experts else 0
        if compressed > spec.hidden_size:
            return "experts read compressed tokens that are wider than others"
        if compressed and (layer.beside or post_norm):
            return "experts read compressed tokens, and there is a norm behind them"
        if layer.beside and (spec.parallel or not post_norm):
            return "experts beside an MLP join it without a norm"
    return None


def _has_odd_limits(experts: ExpertsSpec) -> bool:
    """Whether a shared expert has limits of a kind that is not implemented."""
    limit = experts.limit if experts.shared_limit is None else experts.shared_limit
    return bool(experts.shared_width and limit and (experts.raised or not experts.bounds_opened))


def _find_odd_branches(spec: DecoderSpec) -> str | None:
    """Return what is not implemented together with a norm after attention, or with latents."""
    normed = bool(spec.names.attention_post_norm)
    both = any(layer.mixer is not None and layer.attends for layer in spec.layers)
    if both and (normed or spec.latent is not None):
        return "a layer has attention and keeps a state beside it, and their sum is normed"
    mixers = [layer.mixer for layer in spec.layers if isinstance(layer.mixer, Mamba2)]
    scaled = any(mixer.output_multiplier != 1.0 for mixer in mixers)
    if normed and (scaled or spec.attention_scale != 1.0):
        return "what attention or a state space says is scaled, then normed"
    return None


def _find_odd_heads(spec: DecoderSpec) -> str | None:
    """Return what is not implemented together with heads that do not fill whole panels."""
    if reason := _find_odd_head_norms(spec):
        return reason
    for layer in spec.layers:
        own = spec.sizes(layer)
        if not layer.attends or own.dim % PANEL == own.value_dim % PANEL == 0:
            continue
        heads = f"heads have {own.dim} numbers, which is no multiple of {PANEL}, and"
        if spec.gated_attention or spec.gated_heads:
            return f"{heads} gates"
        if spec.value_norm:
            return f"{heads} their values are normalised"
        if own.heads * own.value_dim % PANEL:
            return f"{heads} all of them together {own.heads * own.value_dim}, which is none either"
    return None


def _find_odd_head_norms(spec: DecoderSpec) -> str | None:
    """Return what is not implemented of norms of each query and key, or None."""
    if spec.query_key_norm not in ("head", "each", "bare"):
        return None
    if not spec.norm.startswith("layer"):
        if spec.query_key_norm == "each":
            return "query and key heads have norms of their own, without a mean"
        return "query and key norms have biases" if spec.query_key_norm_bias else None
    if spec.norm_after_rotary or spec.query_key_norm == "bare":
        return "query and key norms have a mean, and follow their rotation or have no weights"
    for layer in spec.layers:
        if layer.attends and (size := spec.sizes(layer).dim) % LANES:
            return f"norms of heads of {size} numbers, no multiple of {LANES}, have a mean"
    return None


def _find_odd_streams(spec: DecoderSpec) -> str | None:
    """Return what is not implemented together with several hidden states of a token."""
    dense = all(layer.attends and layer.feeds and not layer.experts for layer in spec.layers)
    if not dense or spec.parallel or spec.latent is not None:
        return "layers with several hidden states are not those of Gemma 3n"
    if spec.own_inputs is None:
        return "layers with several hidden states have no embeddings of their own"
    return None


def _find_odd_latents(spec: DecoderSpec) -> str | None:
    """Return what is not implemented together with latent attention."""
    if spec.parallel or spec.alibi or spec.names.sinks:
        return "compressed keys and values have what only whole ones have here"
    if spec.gated_attention or spec.gated_heads:
        return "what is read of compressed keys and values has gates"
    if any(layer.rotary is not None and layer.rotary.sections for layer in spec.layers):
        return "compressed keys turn by places in images"
    return None
