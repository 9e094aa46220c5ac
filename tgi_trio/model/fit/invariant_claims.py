"""The models that our kernels for devices compute alike whatever else is in a step.

No torch in this file. Every field that is held to it is named, as for other backends: a field that
is added to a spec is refused until it is, whatever the generic decoder computes of it.
"""

from __future__ import annotations

from typing import Final

from tgi_trio.errors import ConfigurationError
from tgi_trio.model.claims import Claims, every_field, find_unclaimed, only
from tgi_trio.model.fit.decoder import CLAIMS as COMPUTED
from tgi_trio.model.fit.name_claims import NAMES
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.specs.ngrams import NgramsSpec

# By record, with the values that the generic decoder computes.
_HELD: Final[dict[str, str]] = {
    "DecoderSpec": (
        "family vocab_size hidden_size heads kv_heads head_dim mlp_width layers mtp names "
        "norm norm_eps post_norm_eps outer_norm norm_bias norm_weight parallel query_key_norm "
        "query_key_norm_bias gated_attention gated_heads gate_activation qkv_layout qkv_bias "
        "output_bias mlp_bias head_bias transposed gated activation tied_head extra_tokens "
        "added_tokens embedding_width normalised_head normalised_embedding position_rows "
        "position_offset sine_positions alibi alibi_scale attention_soft_cap final_soft_cap "
        "embedding_scale residual_scale attention_scale gate_scale mlp_limit mlp_raised mlp_scale "
        "logit_scale qkv_clip latent value_norm value_scale per_layer_inputs index hyper "
        "gated_values norm_gate_rank gated_streams shared_key streams "
        "norm_after_rotary attention_input_scale head_input_scale"
    ),
    "LayerSpec": (
        "scale window chunk ahead rotary experts mixer attends feeds sizes keys_as_values "
        "reads_layer latent sinks mlp_width beside later names shared blocks chooses index "
        "index_place pooled ngrams compression sparsity"
    ),
    "HeadSizes": "kv_heads dim value_dim heads",
    "LatentSpec": "rank query_rank plain_dim rotary_dim value_dim bias scale norm_eps doubled",
    "HyperSpec": "count iterations eps added added_eps",
    "IndexSpec": "heads dim most pool rotary last norm_eps reads_input",
    "PooledIndexSpec": "heads dim size most",
    "SharedKeySpec": "query_rank groups group_rank",
    "CompressionSpec": "rate overlaps index",
    "GatedStreamsSpec": "count rank",
    "StreamsSpec": "count active scaled detour_rank",
    "BlockIndexSpec": "dim size most local",
    "PerLayerInputsSpec": "width rows image_token",
    "RotarySpec": (
        "kind dim theta interleaved backwards max_positions sections sections_alternate parameters "
        "query_scale learned log_positions"
    ),
    "QueryScale": "beta step offset",
    "ExpertsSpec": (
        "count per_token width normalise shared_width latent_width routing jitter groups "
        "groups_used scale result_scale stacked gate_up biased weighs_inputs limit raised "
        "bounds_opened shared_limit by_token logit_cap idle"
    ),
    "ShortConvolution": "channels taps bias",
    "DeltaRule": (
        "key_heads value_heads key_dim value_dim taps layout norm_eps tiled by_channel "
        "channel_rank gate least_decay beta_scale activation"
    ),
    "Mamba2": (
        "heads head_dim groups state_dim taps norm_eps norm convolution_bias inner_bias "
        "output_bias least_step most_step multipliers output_multiplier activation"
    ),
    "Mamba1": ("channels state_dim step_rank taps norm norm_eps convolution_bias bias activation"),
    "RecurrentGate": "heads head_dim taps activation",
    "SharedBlock": "layer use rank attention_rank",
}

CLAIMS: Final[Claims] = {
    **NAMES,
    **every_field(NgramsSpec),
    **{
        key: COMPUTED[key]
        for record, names in _HELD.items()
        for key in (f"{record}.{name}" for name in names.split())
    },
    "LayerSpec.cross_attention": only(None, refusal="torch attends to images"),
}


def find_variant(spec: DecoderSpec) -> str | None:
    """Return why a device cannot compute a model's tokens alike in every step, or None."""
    return find_unclaimed(spec, CLAIMS)


def refuse_batch_invariance(reason: str) -> ConfigurationError:
    """Return the error for `--batch-invariant` where it cannot be kept for `reason`."""
    return ConfigurationError(
        f"--batch-invariant cannot be kept: {reason}. Leave it out, or serve with the CPU kernels "
        "where they fit the model: their answers are the same at any load."
    )
