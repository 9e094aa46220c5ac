"""The roles of matrices in a decoder: the parts of attention, mixers, MLPs and layers.

Every role is a `LinearRef`, a norm or a tensor of a checkpoint; `matrices/decoder.py` derives them
from a spec.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from tgi_trio.model.matrices.references import LinearRef, NormRef, TensorRef, VectorRef


@dataclass(frozen=True, slots=True)
class MlpRefs:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) unless `gated`."""

    inner: LinearRef  # gated: a piece for the gate, then one for up
    down: LinearRef
    gated: bool
    paired: bool = False  # gate and up rows alternate in one piece
    # xIELU's parameters, one number each: alpha_p, alpha_n, beta, epsilon.
    learned: tuple[VectorRef, ...] = ()
    inner_norm: NormRef | None = None  # of what `down` reads


@dataclass(frozen=True, slots=True)
class ExpertsRefs:
    """A mixture of experts."""

    router: LinearRef
    choice_bias: VectorRef | None  # added to the experts' scores only for the choice
    table: TensorRef | None  # [vocabulary, per_token], see `ExpertsSpec.by_token`
    experts: tuple[MlpRefs, ...]
    shared: MlpRefs | None
    shared_router: LinearRef | None
    entry: LinearRef | None  # compresses tokens for all but the shared expert
    exit: LinearRef | None  # and expands their results


@dataclass(frozen=True, slots=True)
class BesideRefs:
    """Experts beside a dense MLP; each reads the hidden state through its own norm."""

    norm: NormRef
    experts: ExpertsRefs
    router_norm: NormRef
    expert_scale: VectorRef  # factors of each expert's weight
    dense_post_norm: NormRef  # of the MLP's result
    post_norm: NormRef  # of the experts' result


@dataclass(frozen=True, slots=True)
class PerLayerInputRefs:
    """How a layer uses its own embedding of a token."""

    gate: LinearRef
    up: LinearRef
    post_norm: NormRef


@dataclass(frozen=True, slots=True)
class PerLayerInputsRefs:
    """Where per-layer embeddings come from; the layers' features are side by side."""

    table: LinearRef
    projection: LinearRef
    norm: NormRef  # of one layer's features


@dataclass(frozen=True, slots=True)
class StreamsRefs:
    """Projections from one hidden state to several, and back to one; the first stays unchanged."""

    into: tuple[LinearRef, ...]
    out: tuple[LinearRef, ...]


@dataclass(frozen=True, slots=True)
class LayerStreamsRefs:
    """How a layer predicts and corrects the hidden states that it does not compute."""

    router_norm: NormRef
    router: LinearRef
    prediction: LinearRef
    correction: LinearRef
    scale: VectorRef  # [hidden]
    detour_down: LinearRef
    detour_up: LinearRef
    detour_norm: NormRef


@dataclass(frozen=True, slots=True)
class HyperRefs:
    """The weights of a hyper-connection, or of the sum after the last layer."""

    mix: TensorRef  # [weights, count * hidden]
    base: TensorRef  # [weights]
    scale: TensorRef  # of each kind of weights


@dataclass(frozen=True, slots=True)
class LayerHyperRefs:
    """The hyper-connections of a layer."""

    attention: HyperRefs
    mlp: HyperRefs


@dataclass(frozen=True, slots=True)
class GatesRefs:
    """The gates of a `GatedStreamsSpec` before one part of a layer, or before the head."""

    norm: NormRef  # of all hidden states, each normalised by itself
    inner: LinearRef  # rows of the gates' low-rank input, then of each hidden state's factor
    gates: LinearRef


@dataclass(frozen=True, slots=True)
class LayerGatesRefs:
    """The gates of a layer."""

    attention: GatesRefs
    mlp: GatesRefs


@dataclass(frozen=True, slots=True)
class NgramsRefs:
    """The parts of a `NgramsSpec`."""

    table: LinearRef  # columns are split over ranks
    inner: LinearRef  # rows of the keys, then of the value
    query_norm: NormRef  # of all hidden states, each normalised by itself, like the next ones
    key_norm: NormRef
    kernel_norm: NormRef
    kernel: TensorRef  # [channels, 1, taps]


@dataclass(frozen=True, slots=True)
class LogScaleRefs:
    """How a head's queries are scaled by the logarithm of their position."""

    scale: TensorRef  # [heads]
    bias: TensorRef  # [heads]


@dataclass(frozen=True, slots=True)
class LatentRefs:
    """What follows the first projection in latent attention."""

    query_up: LinearRef | None
    query_norm: NormRef | None
    latent_norm: NormRef | None  # None: the latents are another layer's
    up: LinearRef  # per head, rows of its key, then of its value
    gate_up: LinearRef | None = None  # gates of values, see `LatentSpec.doubled`


@dataclass(frozen=True, slots=True)
class NormGateRefs:
    """The matrices of a gate behind a norm."""

    down: LinearRef
    up: LinearRef


@dataclass(frozen=True, slots=True)
class IndexRefs:
    """The parts of an index, except for its key and its heads' weights, which are in `qkv`."""

    query_up: LinearRef
    key_norm: NormRef
    pool_bias: TensorRef | None  # [pool, dim], added to tokens' weights in the mean of a run
    query_norm: NormRef | None  # of the layer's input, if queries come from it
    query_scale: LogScaleRefs | None


@dataclass(frozen=True, slots=True)
class BlockIndexRefs:
    """The norms of an index of blocks, whose queries and key are in `qkv`."""

    query_norm: NormRef
    key_norm: NormRef


@dataclass(frozen=True, slots=True)
class CompressorRefs:
    """How entries are made of projected tokens."""

    bias: TensorRef  # [rate, width], added to the projected weights of a run
    norm: NormRef


@dataclass(frozen=True, slots=True)
class SharedKeyRefs:
    """What follows the first projection in attention to one key per token."""

    query_norm: NormRef
    query_up: LinearRef
    key_norm: NormRef
    output_down: LinearRef  # rows of each group, which read the group's heads alone
    compressor: CompressorRefs | None
    index_compressor: CompressorRefs | None
    index_query: LinearRef | None


@dataclass(frozen=True, slots=True)
class AttentionRefs:
    """The attention of a layer. Norms are None if the family has none there."""

    # Query, key and value heads; with latents, the compressed forms, then those of an index; with
    # one key per token, a compressed query, the key, then what compressors and an index read.
    qkv: LinearRef
    output: LinearRef
    latent: LatentRefs | None
    index: IndexRefs | None
    # of a head, or of all heads together, see `DecoderSpec.query_key_norm`
    query_norm: NormRef | None
    key_norm: NormRef | None
    sinks: VectorRef | None  # of heads, see `AttentionLayer.sinks`
    query_scale: LogScaleRefs | None = None
    shared_key: SharedKeyRefs | None = None
    blocks: BlockIndexRefs | None = None
    inner_norm: NormRef | None = None  # of what `output` reads, all heads together


@dataclass(frozen=True, slots=True)
class ConvolutionRefs:
    """A `ShortConvolution`."""

    inner: LinearRef  # rows of b, of c, of x
    kernel: TensorRef  # [channels, 1, taps]
    bias: TensorRef | None  # [channels]
    output: LinearRef


@dataclass(frozen=True, slots=True)
class DeltaRuleRefs:
    """A `DeltaRule`."""

    # Rows of queries, keys, values; then of gates, betas and decays; or, if these are of low rank,
    # of the first matrices of decays and gates, and of betas.
    inner: LinearRef
    decay_up: LinearRef | None
    gate_up: LinearRef | None
    kernels: tuple[TensorRef, ...]  # [channels, 1, taps] of queries, keys, values
    rate: TensorRef  # [value_heads], logarithms
    decay_bias: TensorRef  # [value_heads], or by channel [value_heads * key_dim]
    norm: TensorRef  # [value_dim]
    output: LinearRef


@dataclass(frozen=True, slots=True)
class Mamba2Refs:
    """A `Mamba2`."""

    inner: LinearRef  # rows of gates, x, b, c, time steps
    kernels: tuple[TensorRef, ...]  # [channels, 1, taps] of x, b, c
    biases: tuple[TensorRef, ...]  # [channels] of the same, or empty
    rate: TensorRef  # [heads], logarithms
    step_bias: TensorRef  # [heads]
    skip: TensorRef  # [heads]
    norm: TensorRef | None  # [heads * head_dim]
    output: LinearRef


@dataclass(frozen=True, slots=True)
class Mamba1Refs:
    """A `Mamba1`."""

    inner: LinearRef  # rows of x, of gates
    kernel: TensorRef  # [channels, 1, taps]
    bias: TensorRef | None  # [channels]
    selection: LinearRef  # rows of the time steps' low-rank input, of b, of c
    norms: tuple[TensorRef, ...]  # [step_rank], [state_dim], [state_dim]: for these; or empty
    step: LinearRef
    step_bias: TensorRef  # [channels]
    rate: TensorRef  # [channels, state_dim], logarithms
    skip: TensorRef  # [channels]
    output: LinearRef


@dataclass(frozen=True, slots=True)
class GateRefs:
    """A matrix for each head, with biases."""

    weight: TensorRef  # [heads, inputs, outputs]
    bias: TensorRef  # [heads, outputs]


@dataclass(frozen=True, slots=True)
class RecurrentGateRefs:
    """A `RecurrentGate`."""

    inner: LinearRef  # rows of the activation's input, then of the recurrence's input
    kernel: TensorRef  # [width, 1, taps]
    bias: TensorRef  # [width]
    entry: GateRefs  # the input gate
    decay: GateRefs
    rate: TensorRef  # [width], of the decay
    output: LinearRef


MixerRefs: TypeAlias = ConvolutionRefs | DeltaRuleRefs | Mamba2Refs | Mamba1Refs | RecurrentGateRefs


@dataclass(frozen=True, slots=True)
class LowRankRefs:
    """Low-rank products: `down`'s result, in equal parts, goes through one of `ups` each."""

    down: LinearRef
    ups: tuple[LinearRef, ...]


@dataclass(frozen=True, slots=True)
class SharedRefs:
    """The own parts of a layer that uses a `SharedBlock`."""

    qkv: LowRankRefs | None  # added to queries, keys and values
    inner: LowRankRefs  # added to gates and ups
    exit: LinearRef
    mixer_norm: NormRef


@dataclass(frozen=True, slots=True)
class CrossAttentionRefs:
    """Cross-attention to images, without keys and values, which are computed with the images."""

    query: LinearRef
    query_norm: NormRef | None  # of a head
    output: LinearRef
    gate: TensorRef
    mlp_gate: TensorRef


@dataclass(frozen=True, slots=True)
class LayerRefs:
    """One layer. Norms are None if the family has none there."""

    attention: AttentionRefs | None
    mixer: MixerRefs | None
    mlp: MlpRefs | ExpertsRefs | None
    attention_norm: NormRef | None  # before both attention and mixer
    mlp_norm: NormRef | None
    attention_post_norm: NormRef | None
    mlp_post_norm: NormRef | None
    attention_sum_norm: NormRef | None = None
    mlp_sum_norm: NormRef | None = None
    beside: BesideRefs | None = None  # then `mlp` is dense
    later: ExpertsRefs | None = None  # likewise
    per_layer_input: PerLayerInputRefs | None = None
    streams: LayerStreamsRefs | None = None
    scale: VectorRef | None = None  # [1]
    shared: SharedRefs | None = None  # then `attention` and `mlp` belong to several layers
    cross_attention: CrossAttentionRefs | None = None  # then there is no `attention`
    hyper: LayerHyperRefs | None = None
    gates: LayerGatesRefs | None = None
    ngrams: NgramsRefs | None = None
    attention_norm_gate: NormGateRefs | None = None
    mlp_norm_gate: NormGateRefs | None = None


@dataclass(frozen=True, slots=True)
class OuterRefs:
    """The parts before and after the layers."""

    embedding: LinearRef
    positions: LinearRef | None
    embedding_norm: NormRef | None
    final_norm: NormRef | None
    head: LinearRef  # the embedding's matrix if the head is tied
    embedding_in: LinearRef | None = None  # from the embedding's width to the hidden size
    embedding_out: LinearRef | None = None  # and back, after the final norm
    rotary_factors: TensorRef | None = None  # [pairs], logarithms
    per_layer_inputs: PerLayerInputsRefs | None = None
    streams: StreamsRefs | None = None
    hyper: HyperRefs | None = None
    gates: GatesRefs | None = None
