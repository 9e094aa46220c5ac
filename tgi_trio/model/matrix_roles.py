"""Which roles matrices have in a decoder: what attention, mixers, MLPs and layers are made of.

Every role is a `LinearRef`, a norm or a tensor of a checkpoint; `decoder_matrices.py` fills them in
from a specification.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from tgi_trio.model.matrices import LinearRef, NormRef, TensorRef, VectorRef


@dataclass(frozen=True, slots=True)
class MlpRefs:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) unless `gated`."""

    inner: LinearRef  # gated: a piece for the gate, then one for up
    down: LinearRef
    gated: bool
    paired: bool = False  # gate and up rows alternate in one piece
    # Of xIELU, one number each: alpha of what is positive, of what is negative, beta, epsilon.
    learned: tuple[VectorRef, ...] = ()


@dataclass(frozen=True, slots=True)
class ExpertsRefs:
    """A mixture of experts."""

    router: LinearRef
    choice_bias: VectorRef | None  # of experts, for the choice alone
    experts: tuple[MlpRefs, ...]
    shared: MlpRefs | None
    shared_router: LinearRef | None
    entry: LinearRef | None  # to what the others read, where that is compressed
    exit: LinearRef | None  # and back


@dataclass(frozen=True, slots=True)
class BesideRefs:
    """Experts beside a dense MLP: each reads the hidden state through a norm of its own."""

    norm: NormRef
    experts: ExpertsRefs
    router_norm: NormRef
    expert_scale: VectorRef  # of each expert's weight
    dense_post_norm: NormRef  # of what the MLP says
    post_norm: NormRef  # of what the experts say


@dataclass(frozen=True, slots=True)
class OwnInputRefs:
    """What a layer makes of its own embedding of a token."""

    gate: LinearRef
    up: LinearRef
    post_norm: NormRef


@dataclass(frozen=True, slots=True)
class OwnInputsRefs:
    """Where the layers' own embeddings come from; the layers lie one behind the other."""

    table: LinearRef
    projection: LinearRef
    norm: NormRef  # of one layer's


@dataclass(frozen=True, slots=True)
class StreamsRefs:
    """What makes several hidden states of one, and one of several; the first stays as it is."""

    into: tuple[LinearRef, ...]
    out: tuple[LinearRef, ...]


@dataclass(frozen=True, slots=True)
class LayerStreamsRefs:
    """How a layer adapts the hidden states that it does not compute."""

    router_norm: NormRef
    router: LinearRef
    prediction: LinearRef
    correction: LinearRef
    scale: VectorRef  # [hidden]
    detour_down: LinearRef
    detour_up: LinearRef
    detour_norm: NormRef


@dataclass(frozen=True, slots=True)
class LatentRefs:
    """What follows the first projection where keys and values are compressed."""

    query_up: LinearRef | None
    query_norm: NormRef | None
    latent_norm: NormRef
    up: LinearRef  # per head the rows of its key, then of its value


@dataclass(frozen=True, slots=True)
class IndexRefs:
    """What an index has, beside its key and its heads' weights, which are in `qkv`."""

    query_up: LinearRef
    key_norm: NormRef


@dataclass(frozen=True, slots=True)
class AttentionRefs:
    """The attention of a layer. Norms are None where the family has none there."""

    # Query, key and value heads; with latents what they start from, then what an index has of it.
    qkv: LinearRef
    output: LinearRef
    latent: LatentRefs | None
    index: IndexRefs | None
    query_norm: NormRef | None  # of a head, or of all heads, as `DecoderSpec.query_key_norm` says
    key_norm: NormRef | None
    sinks: VectorRef | None  # of heads, see `AttentionLayer.sinks`


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

    # Rows of queries, keys, values; then of gates, of betas and of decays, or, where these are made
    # in two steps, of what decays and gates are made of, and of betas.
    inner: LinearRef
    decay_up: LinearRef | None
    gate_up: LinearRef | None
    kernels: tuple[TensorRef, ...]  # [channels, 1, taps] of queries, keys, values
    rate: TensorRef  # [value_heads], logarithms
    decay_bias: TensorRef  # [value_heads], or [value_heads * key_dim]
    norm: TensorRef  # [value_dim]
    output: LinearRef


@dataclass(frozen=True, slots=True)
class Mamba2Refs:
    """A `Mamba2`."""

    inner: LinearRef  # rows of gates, x, b, c, steps of time
    kernels: tuple[TensorRef, ...]  # [channels, 1, taps] of x, b, c
    biases: tuple[TensorRef, ...]  # [channels] of the same, or none
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
    selection: LinearRef  # rows of what steps of time are made of, of b, of c
    norms: tuple[TensorRef, ...]  # [step_rank], [state_dim] twice: of these; or none
    step: LinearRef
    step_bias: TensorRef  # [channels]
    rate: TensorRef  # [channels, state_dim], logarithms
    skip: TensorRef  # [channels]
    output: LinearRef


@dataclass(frozen=True, slots=True)
class GateRefs:
    """A matrix for the numbers of each head, and what is added."""

    weight: TensorRef  # [heads, inputs, outputs]
    bias: TensorRef  # [heads, outputs]


@dataclass(frozen=True, slots=True)
class RecurrentGateRefs:
    """A `RecurrentGate`."""

    inner: LinearRef  # rows of what the activation is of, of what is scanned
    kernel: TensorRef  # [width, 1, taps]
    bias: TensorRef  # [width]
    entry: GateRefs  # of what enters the state
    decay: GateRefs
    rate: TensorRef  # [width], of the decay
    output: LinearRef


MixerRefs: TypeAlias = ConvolutionRefs | DeltaRuleRefs | Mamba2Refs | Mamba1Refs | RecurrentGateRefs


@dataclass(frozen=True, slots=True)
class LowRankRefs:
    """Products of low rank: what `down` says, in equal parts, goes through one of `ups` each."""

    down: LinearRef
    ups: tuple[LinearRef, ...]


@dataclass(frozen=True, slots=True)
class SharedRefs:
    """What a layer has of its own that uses a `SharedBlock`."""

    qkv: LowRankRefs | None  # added to queries, keys and values
    inner: LowRankRefs  # to gates and ups
    exit: LinearRef
    mixer_norm: NormRef


@dataclass(frozen=True, slots=True)
class CrossingRefs:
    """Attention to images, but for their keys and values: those are made where images are."""

    query: LinearRef
    query_norm: NormRef | None  # of a head
    output: LinearRef
    gate: TensorRef
    mlp_gate: TensorRef


@dataclass(frozen=True, slots=True)
class LayerRefs:
    """One layer. Norms are None where the family has none there."""

    attention: AttentionRefs | None
    mixer: MixerRefs | None
    mlp: MlpRefs | ExpertsRefs | None
    attention_norm: NormRef | None  # before attention and mixer alike
    mlp_norm: NormRef | None
    attention_post_norm: NormRef | None
    mlp_post_norm: NormRef | None
    beside: BesideRefs | None = None  # `mlp` is dense then
    own_input: OwnInputRefs | None = None
    streams: LayerStreamsRefs | None = None
    scale: VectorRef | None = None  # [1]
    shared: SharedRefs | None = None  # then `attention` and `mlp` are other layers', too
    crossing: CrossingRefs | None = None  # then there is no `attention`


@dataclass(frozen=True, slots=True)
class OuterRefs:
    """What is before and behind the layers."""

    embedding: LinearRef
    positions: LinearRef | None
    embedding_norm: NormRef | None
    final_norm: NormRef | None
    head: LinearRef  # the embedding's matrix where the head is tied
    own_inputs: OwnInputsRefs | None = None
    streams: StreamsRefs | None = None
