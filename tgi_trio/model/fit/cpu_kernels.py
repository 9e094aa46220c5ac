"""Whether the CPU kernels compute a model, and why not.

No llvmlite in this file, since the router reads it as well.
"""

from __future__ import annotations

from tgi_trio.errors import ConfigurationError
from tgi_trio.model.claims import find_unclaimed
from tgi_trio.model.fit.kernel_claims import CLAIMS, LANES, PANEL
from tgi_trio.model.specs.decoder import DecoderSpec, LayerSpec
from tgi_trio.model.specs.mixers import DeltaRule, Mamba2
from tgi_trio.model.split import Portion

_DTYPES = ("float32", "bfloat16")


def kernels_error(reason: object, ranks: int = 1) -> ConfigurationError:
    """Return the error for `--cpu-backend kernels` where the kernels do not fit for `reason`.

    `ranks`: their number, if the kernels would serve the model by one.
    """
    if ranks > 1:
        return ConfigurationError(
            f"The CPU kernels cannot serve this model with --num-shard {ranks}: {reason}. Leave "
            "--cpu-backend out to serve it with torch, or --num-shard."
        )
    return ConfigurationError(
        f"The CPU kernels cannot serve this model: {reason}. Leave --cpu-backend out to serve it "
        "with torch."
    )


def activations_error(reason: str | None, ranks: int = 1) -> ConfigurationError:
    """Return the error for `--activations 8` where torch computes the model on a CPU.

    `reason`, `ranks`: as for `kernels_error`; None: `--cpu-backend torch` asks for it.
    """
    cure = "leave one of the two out"
    if reason is None:
        why = "--cpu-backend torch computes it with torch on a CPU"
    elif ranks > 1:
        why = f"with --num-shard {ranks} torch computes it on a CPU ({reason})"
    else:
        why, cure = f"torch computes it on a CPU ({reason})", "leave it out"
    return ConfigurationError(
        f"--activations 8 is for models that the CPU kernels or devices compute, and {why}: {cure}."
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


def explain_undivided(part: str) -> str:
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
        "several hidden states": bool(spec.streams or spec.gated_streams),
        "embeddings of layers' own": spec.per_layer_inputs is not None,
        "compressed keys and values": spec.latent is not None,
        "gates of heads": spec.gated_attention or spec.gated_heads,
        "a norm of all heads together": spec.query_key_norm == "whole",
        "norms inside attention and MLPs": _has_inner_norms(spec),
        "linear biases": spec.alibi,
        "sinks": bool(spec.names.sinks),
        "an index of blocks": any(layer.blocks or layer.pooled for layer in spec.layers),
    }
    if found := [name for name, there in parts.items() if there]:
        return explain_undivided(found[0])
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
    if reason := _find_odd_branches(spec) or _find_odd_inner_norms(spec):
        return reason
    if spec.streams is not None and (reason := _find_odd_streams(spec)):
        return reason
    if spec.hyper is not None and (reason := _find_odd_hyper(spec)):
        return reason
    if reason := _find_odd_gates(spec):
        return reason
    if spec.latent is None and (reason := _find_odd_heads(spec)):
        return reason
    post_norm = bool(spec.names.mlp_post_norm)
    for layer in spec.layers:
        turning = layer.rotary
        if layer.shared and (size := spec.sizes(layer).dim) % PANEL:
            return f"layers share a block with heads of {size} numbers, no multiple of {PANEL}"
        if turning is not None and turning.sections and turning.kind in ("dynamic", "longrope"):
            return "rotary frequencies depend on the length, and on places in images"
        if layer.mixer is not None and layer.attends and not isinstance(layer.mixer, Mamba2):
            return "a layer has attention and keeps a state beside it that is not Mamba-2's"
        if layer.sparsity and spec.gate_scale != 1.0:
            return "gates are scaled and cut at a bound"
        if layer.sparsity and spec.mlp_limit:
            return "gates are limited and cut at a bound"
        if (layer.blocks or layer.pooled) and (reason := _find_odd_blocks(spec, layer)):
            return reason
        if isinstance(layer.mixer, DeltaRule) and _has_odd_decays(layer.mixer):
            return "decays of a delta rule that are not by channel have a bound"
        if layer.mixer is not None and spec.parallel:
            return "what keeps a state is parallel to the MLP"
        compressed = layer.experts.latent_width if layer.experts else 0
        if compressed > spec.hidden_size:
            return "experts read compressed tokens that are wider than others"
        if compressed and (layer.beside or post_norm):
            return "experts read compressed tokens, and there is a norm behind them"
        if layer.beside and (spec.parallel or not post_norm):
            return "experts beside an MLP join it without a norm"
    return None


def _find_odd_blocks(spec: DecoderSpec, layer: LayerSpec) -> str | None:
    """Return what is not implemented in a layer with an index of blocks, or None."""
    sizes = spec.sizes(layer)
    size = sizes.dim if sizes.dim % PANEL else sizes.value_dim
    if size % PANEL:
        return f"an index chooses blocks for heads of {size} numbers, no multiple of {PANEL}"
    if spec.latent or layer.window or layer.chunk or layer.reads_layer is not None:
        return "an index chooses blocks of compressed, windowed or other layers' keys"
    if layer.pooled is not None and layer.rotary is None:
        return "an index chooses blocks of tokens without positions"
    if spec.attention_soft_cap or spec.alibi or spec.names.sinks or layer.shared:
        return "an index chooses blocks, and scores are capped or biased"
    return None


def _find_odd_gates(spec: DecoderSpec) -> str | None:
    """Return what is not implemented together with gated hidden states, or None."""
    if spec.gated_streams is None:
        if not spec.names.final_norm:
            return "there is no norm before the head"
        embeds = any(layer.ngrams for layer in spec.layers)
        return "layers with one hidden state embed n-grams" if embeds else None
    names = spec.names
    normed = names.attention_post_norm or names.mlp_post_norm or names.attention_sum_norm
    normed = normed or names.attention_norm or names.mlp_norm or names.final_norm
    several = spec.parallel or spec.streams is not None or spec.hyper is not None
    plain = all(layer.feeds and layer.attends != bool(layer.mixer) for layer in spec.layers)
    if not plain or several or normed or spec.latent is not None:
        return "layers between gated hidden states are not those of Qwen 4"
    for layer in spec.layers:
        if layer.ngrams and (size := layer.ngrams.width // layer.ngrams.heads) % LANES:
            return f"rows of n-grams have {size} numbers, which is no multiple of {LANES}"
    return None


def _has_odd_decays(mixer: DeltaRule) -> bool:
    """Whether decays of whole heads have a bound."""
    return bool(mixer.least_decay) and not mixer.by_channel


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


def _has_inner_norms(spec: DecoderSpec) -> bool:
    """Whether what the last linears of attention and MLPs read is normalised."""
    return bool(spec.names.attention_inner_norm or spec.names.mlp_inner_norm)


def _find_odd_inner_norms(spec: DecoderSpec) -> str | None:
    """Return what is not implemented together with such norms, or None."""
    if not _has_inner_norms(spec):
        return None
    if spec.latent is not None or spec.gated_attention or spec.gated_heads:
        return "what attention with latents or gates says is normalised"
    for layer in spec.layers:
        if layer.attends and (size := spec.sizes(layer).value_dim) % PANEL:
            return f"what heads of {size} numbers, no multiple of {PANEL}, say is normalised"
        if layer.sparsity or layer.experts:
            return "what experts, or an MLP with a bound, open is normalised"
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
    if spec.per_layer_inputs is None:
        return "layers with several hidden states have no embeddings of their own"
    return None


def _find_odd_hyper(spec: DecoderSpec) -> str | None:
    """Return what is not implemented together with hyper-connections, or None."""
    hyper, names = spec.hyper, spec.names
    if hyper is None:
        return None
    plain = all(layer.feeds and layer.attends != bool(layer.mixer) for layer in spec.layers)
    normed = names.attention_post_norm or names.mlp_post_norm or names.attention_sum_norm
    if not plain or spec.parallel or spec.streams is not None or normed:
        return "layers between several hidden states are not those of Hunyuan 4"
    if hyper.iterations:
        most = int((PANEL + 1) ** 0.5) - 1  # of whose weights there is room
        mixed = f"a token has {hyper.count} hidden states, of which no more than {most} are mixed"
        return mixed if hyper.count > most else None
    return None if names.last_streams else "several hidden states have no weights behind them"


def _find_odd_latents(spec: DecoderSpec) -> str | None:
    """Return what is not implemented together with latent attention."""
    if spec.parallel or spec.alibi:
        return "compressed keys and values have what only whole ones have here"
    if spec.gated_attention:
        return "what is read of compressed keys and values has a gate for each number"
    for layer in spec.layers:
        index, turning = spec.index_of(layer), layer.rotary
        if index is not None and (size := index.rotary.dim) % PANEL:
            return f"{size} numbers of an index's keys are rotated, which is no multiple of {PANEL}"
        if index is not None and index.pool and (index.rotary.dim or spec.names.index_log_scale):
            return "an index chooses runs of tokens by keys that are rotated or scaled"
        if turning is not None and turning.learned and turning.kind in ("dynamic", "longrope"):
            return "learned rotary frequencies depend on the length"
    if any(layer.rotary is not None and layer.rotary.sections for layer in spec.layers):
        return "compressed keys turn by places in images"
    return None
