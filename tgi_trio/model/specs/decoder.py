"""The spec of a decoder: numbers, kinds and the names of its weights. Literal data only.

No torch in this file, since every backend reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from tgi_trio.model.specs.attention import Blind as Blind
from tgi_trio.model.specs.attention import CompressionSpec as CompressionSpec
from tgi_trio.model.specs.attention import CrossAttentionSpec as CrossAttentionSpec
from tgi_trio.model.specs.attention import HeadSizes as HeadSizes
from tgi_trio.model.specs.attention import IndexSpec as IndexSpec
from tgi_trio.model.specs.attention import LatentSpec as LatentSpec
from tgi_trio.model.specs.attention import QueryScale as QueryScale
from tgi_trio.model.specs.attention import RotaryKind as RotaryKind
from tgi_trio.model.specs.attention import RotarySpec as RotarySpec
from tgi_trio.model.specs.attention import SharedKeySpec as SharedKeySpec
from tgi_trio.model.specs.block_index import BlockIndexSpec
from tgi_trio.model.specs.gated_streams import GatedStreamsSpec
from tgi_trio.model.specs.mixers import Mixer
from tgi_trio.model.specs.ngrams import NgramsSpec
from tgi_trio.model.specs.pooled_index import PooledIndexSpec
from tgi_trio.model.specs.streams import HyperSpec as HyperSpec
from tgi_trio.model.specs.streams import PerLayerInputsSpec as PerLayerInputsSpec
from tgi_trio.model.specs.streams import StreamsSpec as StreamsSpec

NormKind = Literal["rms", "rms_plus_one", "layer", "layer_plus_one"]
# Norms of queries and keys.
#   head:  every head separately
#   each:  as "head", each with weights of its own
#   whole: all heads of a token together
#   bare:  as "head", without weights, in layers with rotation
#   plain: the same in all layers
QueryKeyNorm = Literal["none", "head", "each", "whole", "bare", "plain"]

# How a checkpoint stores the three projections.
#   separate: three tensors
#   stacked:  one tensor, all queries, then all keys, then all values
#   grouped:  one tensor, per KV head its queries, its key, its value
QkvLayout = Literal["separate", "stacked", "grouped"]

# How one tensor stores gate and up of all experts; the first axis is the experts'.
#   turns:  [inputs, outputs], with outputs gate, up, gate, up, ...
#   halves: [inputs, outputs], all gates, then all ups
#   rows:   [outputs, inputs], all gates, then all ups
GateUpLayout = Literal["turns", "halves", "rows"]

# How a token chooses its experts, see `torch_backend/layers/experts/routing.py`.
Routing = Literal[
    "softmax",
    "biased-softmax",
    "sparse-mixer",
    "grouped-softmax",
    "grouped-sigmoid",
    "sigmoid",
    "sqrt-softplus",
]


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a family's weights, without ".weight"; "": the family has none.

    Names of a layer's parts follow `layer`, in which "{}" is replaced by the layer's number.
    """

    base: str  # prefix that is missing in checkpoints of the bare model, without its head
    embedding: str
    layer: str
    final_norm: str
    attention_norm: str
    output: str
    down: str
    head_gate: str = ""  # a row for each head, see `DecoderSpec.gated_heads`
    output_gate: str = ""  # a row for each row of queries, see `DecoderSpec.gated_attention`
    qkv: str = ""  # instead of `query`, `key`, `value`
    query: str = ""
    key: str = ""
    value: str = ""
    up: str = ""
    gate: str = ""
    activation: str = ""  # the parent of a learned activation's parameters
    gate_up: str = ""  # gate rows, then up rows, in one tensor
    mlp_norm: str = ""
    attention_post_norm: str = ""
    mlp_post_norm: str = ""
    # Of what the last linear of attention, or of a dense MLP, reads.
    attention_inner_norm: str = ""
    mlp_inner_norm: str = ""
    # Of a part's sum with what it is added to; the result takes the sum's place (post-norm).
    attention_sum_norm: str = ""
    mlp_sum_norm: str = ""
    # Beginnings of the matrices of gates behind these norms, see `DecoderSpec.norm_gate_rank`.
    attention_norm_gate: str = ""
    mlp_norm_gate: str = ""
    query_norm: str = ""
    key_norm: str = ""
    sinks: str = ""  # the complete name of a tensor [heads]
    positions: str = ""
    embedding_norm: str = ""
    embedding_in: str = ""  # see `DecoderSpec.embedding_width`
    embedding_out: str = ""
    head: str = "lm_head"
    added_embedding: str = ""  # for the last tokens of the vocabulary
    added_head: str = ""
    router: str = ""
    choice_bias: str = ""  # added to experts' scores only for the choice; the complete name
    # Gates of a cross-attention layer; complete names.
    attention_gate: str = ""
    mlp_gate: str = ""
    experts: str = ""  # "{}": number of the expert; followed by gate, up and down
    expert_gate: str = ""
    expert_up: str = ""
    expert_gate_up: str = ""  # instead of both; the complete name, see `stacked_experts.py`
    expert_down: str = ""
    shared_expert: str = ""
    shared_gate_up: str = ""  # in it, gate rows, then up rows, in one tensor
    expert_entry: str = ""  # compresses tokens for experts, see `ExpertsSpec.latent_width`
    expert_exit: str = ""  # and expands their results
    shared_router: str = ""
    query_down: str = ""  # for compressed queries, whose norm is `query_norm`
    query_up: str = ""
    latent_down: str = ""  # rows of the latent, then of the rotated key
    latent_norm: str = ""
    latent_up: str = ""  # per head, rows of its key, then of its value
    layer_scale: str = ""  # a factor of the layer's output; the complete name
    # Experts beside an MLP, see `LayerSpec.beside`: norms, and complete names of vectors.
    beside_norm: str = ""  # before the experts
    dense_post_norm: str = ""  # of the MLP's result
    beside_post_norm: str = ""  # of the experts' result
    router_gain: str = ""  # weights of the norm before the router
    expert_scale: str = ""  # factors of each expert's weight
    # See `PerLayerInputsSpec`.
    own_table: str = ""
    own_projection: str = ""
    own_norm: str = ""
    own_gate: str = ""
    own_up: str = ""
    own_post_norm: str = ""
    # Complete names of vectors: a head's query is multiplied by the first's number times the
    # logarithm of its position, counted from 1, plus the second's number (Scalable-Softmax,
    # Nakanishi 2025); those of an index likewise.
    query_log_scale: str = ""
    query_log_bias: str = ""
    index_log_scale: str = ""
    index_log_bias: str = ""
    # The complete name of logarithms of frequencies' factors, for all rotary embeddings.
    rotary_factors: str = ""
    index_query: str = ""  # of an index, from compressed queries if there are such
    index_query_norm: str = ""
    index_key: str = ""
    index_norm: str = ""  # of its key
    index_weights: str = ""  # of its heads
    index_pool_gate: str = ""  # weights in the mean of a run; complete names
    index_pool_bias: str = ""
    value_gate: str = ""  # see `DecoderSpec.gated_values`
    # See `SharedKeySpec`; the key's names are `key` and `key_norm`, the last linear's is `output`.
    output_down: str = ""
    compressor: str = ""  # see `CompressionSpec`; the prefix of its parts, like the next
    index_compressor: str = ""
    expert_table: str = ""  # see `ExpertsSpec.by_token`; the complete name
    # See `HyperSpec` and `GatedStreamsSpec`; prefixes.
    attention_streams: str = ""
    mlp_streams: str = ""
    last_streams: str = ""
    ngrams: str = ""  # of a layer, see `NgramsSpec`
    # See `StreamsSpec`; "{}": number of a stream, where the second stream is 0.
    streams_in: str = ""
    streams_out: str = ""
    streams: str = ""  # of a layer
    detour: str = ""
    mixer: str = ""  # of a layer; names in it depend on its kind, see `matrices/mixers.py`
    # See `SharedBlock`; "{}": number of the use.
    block: str = ""  # in the layer that stores its weights; prefix of the other names
    block_exit: str = ""  # of the layer that uses it, like the next
    mixer_norm: str = ""
    query_change: str = ""
    key_change: str = ""
    value_change: str = ""
    gate_up_change: str = ""


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts in place of a dense MLP."""

    count: int
    per_token: int
    width: int
    normalise: bool  # the chosen experts' weights sum to one
    shared_width: int = 0  # 0: no shared expert
    # to which tokens are compressed for all but the shared expert; 0: not compressed
    latent_width: int = 0
    routing: Routing = "softmax"
    # sparse-mixer: limit of an expert's distance from the best to share its weight
    jitter: float = 0.0
    groups: int = 1  # grouped: number of groups of experts
    groups_used: int = 1  # number of groups that a token may use
    scale: float = 1.0  # grouped, sigmoid and biased: factor of the chosen experts' weights
    result_scale: float = 1.0  # of the result, the shared expert's included, before it is added
    stacked: bool = (
        False  # one matrix for all experts' gates, one for all ups, all downs transposed
    )
    gate_up: GateUpLayout = "turns"  # layout of `Names.expert_gate_up`, and of downs
    biased: bool = False  # router and experts have biases
    weighs_inputs: bool = False  # weights multiply the experts' inputs, not their results
    limit: float = 0.0  # bounds of gate and up, see `layers/gating.py`; 0: none
    raised: bool = True  # with a limit, 1 is added to ups
    bounds_opened: bool = False  # the limit is that of activated gates
    shared_limit: float | None = None  # the same for the shared expert; None: as for the others
    by_token: bool = False  # a table has each token's experts; the router weights them alone
    logit_cap: float = 0.0  # soft cap of the router's logits; 0: none
    # further experts, after the others, that return their input (LongCat-Flash, Meituan 2025)
    idle: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for impossible numbers."""
        every = self.count + self.idle
        if not 0 < self.per_token <= every:
            raise ValueError(f"a token goes to {self.per_token} experts, and there are {every}")
        if not self.routing.startswith("grouped"):
            return
        # a group's score is the sum of its two best
        least = 2 if self.routing == "grouped-sigmoid" else 1
        divides = self.groups > 0 and self.count % self.groups == 0
        if not divides or self.count // self.groups < least:
            raise ValueError(f"{self.count} experts cannot be {self.groups} groups")
        if not 0 < self.groups_used <= self.groups:
            raise ValueError(f"a token uses {self.groups_used} groups of experts of {self.groups}")


@dataclass(frozen=True, slots=True)
class SharedBlock:
    """A block of attention and MLP that several layers use (Zamba2, Zyphra 2024).

    It reads the hidden state and the first layer's input, concatenated. A linear of the layer adds
    its result to the input of the layer's mixer. Every use adds low-rank products to its weights.
    """

    layer: int  # the layer that stores its weights
    use: int  # the number of this use, among those of all blocks
    rank: int  # of what is added to gates and ups
    attention_rank: int  # the same for queries, keys and values; 0: none


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What may differ from layer to layer."""

    scale: float  # of the attention scores
    window: int = 0
    chunk: int = 0  # tokens attend only within their chunk of this many positions; 0: no chunks
    # image tokens attend to later ones of their image, in families where they do
    ahead: bool = True
    rotary: RotarySpec | None = None
    experts: ExpertsSpec | None = None
    mixer: Mixer | None = None  # with a state per sequence
    ngrams: NgramsSpec | None = None  # added to its hidden states; they keep a state as well
    # has its own index, if the model has one; else it reuses the preceding choice
    chooses: bool = True
    blocks: BlockIndexSpec | None = None  # chooses what is attended to; None: everything is
    pooled: PooledIndexSpec | None = None  # likewise
    attends: bool = True  # has self-attention, beside a mixer if there is one
    # has cross-attention to images, and no other attention
    cross_attention: CrossAttentionSpec | None = None
    feeds: bool = True  # has an MLP, or experts
    sizes: HeadSizes | None = None  # None: the model's
    keys_as_values: bool = False  # values are keys before their norm and rotation
    reads_layer: int | None = None  # the layer whose K and V are read; None: its own
    latent: LatentSpec | None = None  # None: the model's
    index: IndexSpec | None = None  # likewise
    # With an index: which of the index keys is its own that lie behind a latent. Layers that read
    # the latents of another keep theirs there.
    index_place: int = 0
    sinks: bool = True  # has the sinks of `Names.sinks`, if any
    mlp_width: int = 0  # 0: the model's
    sparsity: float = 0.0  # the part of an MLP's gates to cut, assuming a normal distribution
    beside: bool = False  # experts are beside an MLP, not in place of it
    # So they are, reading the same norm; their result is added after the next layer's MLP.
    later: bool = False
    names: Names | None = None  # of its weights, if they differ from those of other layers
    shared: SharedBlock | None = None  # its attention and MLP
    compression: CompressionSpec | None = None


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Everything the generic decoder needs to know of a model.

    A layer is x + post(attention(pre(x))), then x + post(mlp(pre(x))); each norm is present if
    `names` has it, like one of each sum. With `parallel` both read the same x, the MLP through the
    attention's norm if it has no norm of its own.
    """

    family: str
    vocab_size: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    layers: tuple[LayerSpec, ...]
    names: Names
    # Further layers, which draft tokens ahead, where the config says what each of them is like.
    mtp: tuple[LayerSpec, ...] = ()
    norm: NormKind = "rms"
    norm_eps: float = 1e-6
    post_norm_eps: float = 0.0  # of the norms after attention and MLP; 0: that of the others
    outer_norm: NormKind | None = None  # before and after all layers; None: as in them
    norm_bias: bool = False
    norm_weight: bool = True
    parallel: bool = False
    query_key_norm: QueryKeyNorm = "none"
    query_key_norm_bias: bool = False
    # Attention's output is multiplied by as many activated gates, which are projected together with
    # the queries (per head its query, then its gate) unless `Names.output_gate` has their matrix.
    gated_attention: bool = False
    norm_after_rotary: bool = False  # of query and key heads
    # a head's output is multiplied by one activated gate, from a separate matrix
    gated_heads: bool = False
    gate_activation: Literal["sigmoid", "softplus"] = "sigmoid"  # of both
    # with latents: each number of a head's output is multiplied by a sigmoid gate of its own
    gated_values: bool = False
    # of the gates that open what norms before attention or MLP say, by themselves; 0: none
    norm_gate_rank: int = 0
    qkv_layout: QkvLayout = "separate"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    transposed: bool = False  # matrices are stored [in, out]
    gated: bool = True
    activation: str = "silu"
    tied_head: bool = False
    added_tokens: int = 0  # last tokens of the vocabulary, whose rows are in separate tables
    extra_tokens: int = 0  # last tokens of the vocabulary, which are read but never chosen
    normalised_embedding: bool = False  # each row is normalised, without weights
    # Features of a token's row of embedding and head, which a linear widens for the first layer and
    # another narrows for the head; 0: the hidden size.
    embedding_width: int = 0
    normalised_head: bool = False  # each row of the head is divided by its length
    position_rows: int = 0  # rows of the table of learned positions; 0: none
    position_offset: int = 0
    sine_positions: bool = False  # that table is computed, not learned; see `positions/sines.py`
    alibi: bool = False
    alibi_scale: float = 1.0  # multiplies the slopes
    attention_soft_cap: float = 0.0
    final_soft_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    attention_scale: float = 1.0  # of attention's result, before it is added
    gate_scale: float = 1.0  # of the input of the gate's activation
    mlp_limit: float = 0.0  # of dense MLPs, as `ExpertsSpec.limit`
    mlp_raised: bool = True
    mlp_scale: float = 1.0  # of the MLP's result, before it is added
    logit_scale: float = 1.0
    # Factors of inputs that were left to what follows linears without biases: of attention's, and
    # of the head. What an adapter adds as a bias is divided by them.
    attention_input_scale: float = 1.0
    head_input_scale: float = 1.0
    qkv_clip: float = 0.0  # q, k and v are clipped to +-this; 0: not
    # Then kv_heads is 1, and head_dim that of latent, key and index key, concatenated.
    latent: LatentSpec | None = None
    index: IndexSpec | None = None  # over latents
    value_norm: bool = False  # of each value separately, without weights
    value_scale: float = 1.0
    per_layer_inputs: PerLayerInputsSpec | None = None
    streams: StreamsSpec | None = None
    # Then kv_heads is 1, and sizes of layers include what they keep of tokens for entries.
    shared_key: SharedKeySpec | None = None
    hyper: HyperSpec | None = None
    gated_streams: GatedStreamsSpec | None = None

    @property
    def keeps_values(self) -> bool:
        """Whether values are kept beside keys, not as parts of them."""
        return self.latent is None and self.shared_key is None

    def __post_init__(self) -> None:
        """Raise ValueError for parts that cannot be together."""
        if not self.names.attention_sum_norm:
            return
        if self.parallel or self.streams or any(layer.shared for layer in self.layers):
            raise ValueError("norms of sums need layers whose two parts follow each other")

    def latent_of(self, layer: LayerSpec) -> LatentSpec | None:
        """Return a layer's latents, None if it attends to whole keys."""
        return layer.latent or self.latent

    def index_of(self, layer: LayerSpec) -> IndexSpec | None:
        """Return a layer's index of tokens, None if the model has none."""
        return layer.index or self.index

    def sizes(self, layer: LayerSpec) -> HeadSizes:
        """Return the sizes of a layer's heads."""
        own = layer.sizes or HeadSizes(self.kv_heads, self.head_dim, self.head_dim)
        return own if own.heads else replace(own, heads=self.heads)
