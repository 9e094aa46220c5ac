"""How a decoder is described: numbers, kinds and the names of its weights. Literal data only.

No torch in this file: every backend reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from tgi_trio.model.mixers import Mixer

NormKind = Literal["rms", "rms_plus_one", "layer", "layer_plus_one"]
RotaryKind = Literal[
    "default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional", "divided"
]

# Which queries and keys are normalised.
#   head:  every head by itself
#   whole: all heads of a token together
#   bare:  as "head", without weights, in layers that turn them
QueryKeyNorm = Literal["none", "head", "whole", "bare"]

# How a checkpoint stores the three projections.
#   separate: three tensors
#   stacked:  one tensor, all queries, then all keys, then all values
#   grouped:  one tensor, per KV head its queries, its key, its value
QkvLayout = Literal["separate", "stacked", "grouped"]

# How one tensor holds gates and ups of all experts, of each expert a part of the first axis.
#   turns:  [inputs, outputs], of the outputs gate, up, gate, up, ...
#   halves: [inputs, outputs], all gates, then all ups
#   rows:   [outputs, inputs], all gates, then all ups
GateUpLayout = Literal["turns", "halves", "rows"]

# What becomes of a token with no image before it, in a layer that attends to images.
#   reads all: it attends to all images of its prompt, and the MLP adds nothing; where the prompt
#              has none, the layer adds nothing at all
#   feeds:     it attends to nothing, and the MLP adds what it does for all tokens
Blind = Literal["reads all", "feeds"]

# How a token chooses its experts, see `torch_backend/layers/routing.py`.
Routing = Literal[
    "softmax", "biased-softmax", "sparse-mixer", "grouped-softmax", "grouped-sigmoid", "sigmoid"
]


@dataclass(frozen=True, slots=True)
class Names:
    """Where a family's checkpoint keeps each weight, without ".weight"; "" = the family has none.

    Names of layer parts follow `layer`, in which "{}" stands for the layer's number.
    """

    base: str  # prefix that checkpoints of the bare model, without its head, leave out
    embedding: str
    layer: str
    final_norm: str
    attention_norm: str
    output: str
    down: str
    head_gate: str = ""  # a row for each head, see `DecoderSpec.gated_heads`
    qkv: str = ""  # unless `query`, `key`, `value`
    query: str = ""
    key: str = ""
    value: str = ""
    up: str = ""
    gate: str = ""
    activation: str = ""  # what has the numbers of an activation that is learned
    gate_up: str = ""  # gate rows, then up rows, in one tensor
    mlp_norm: str = ""
    attention_post_norm: str = ""
    mlp_post_norm: str = ""
    query_norm: str = ""
    key_norm: str = ""
    sinks: str = ""  # the whole name of a tensor [heads]
    positions: str = ""
    embedding_norm: str = ""
    head: str = "lm_head"
    added_embedding: str = ""  # of the last tokens of the vocabulary
    added_head: str = ""
    router: str = ""
    choice_bias: str = ""  # of experts, for the choice alone; the whole name
    # Of what a layer adds that attends to images; whole names.
    attention_gate: str = ""
    mlp_gate: str = ""
    experts: str = ""  # "{}" = number of the expert; gate, up and down follow it
    expert_gate: str = ""
    expert_up: str = ""
    expert_gate_up: str = ""  # in their place; the whole name, see `stacked_experts.py`
    expert_down: str = ""
    shared_expert: str = ""
    expert_entry: str = ""  # compresses tokens for experts, see `ExpertsSpec.latent_width`
    expert_exit: str = ""  # and what undoes it
    shared_router: str = ""
    query_down: str = ""  # of a compressed query, whose norm is `query_norm`
    query_up: str = ""
    latent_down: str = ""  # the latent's rows, then those of the key that is rotated
    latent_norm: str = ""
    latent_up: str = ""  # per head the rows of its key, then of its value
    layer_scale: str = ""  # a number that what leaves a layer is multiplied by; the whole name
    # Experts beside an MLP, see `LayerSpec.beside`: norms, and whole names of vectors.
    beside_norm: str = ""  # before the experts
    dense_post_norm: str = ""  # of what the MLP says
    beside_post_norm: str = ""  # of what the experts say
    router_gain: str = ""  # of the norm before the router
    expert_scale: str = ""  # of each expert's weight
    # See `OwnInputsSpec`.
    own_table: str = ""
    own_projection: str = ""
    own_norm: str = ""
    own_gate: str = ""
    own_up: str = ""
    own_post_norm: str = ""
    index_query: str = ""  # of an index, made of what queries are compressed to
    index_key: str = ""
    index_norm: str = ""  # of its key
    index_weights: str = ""  # of its heads
    # See `StreamsSpec`; "{}" = number of a stream, the first but one on being 0.
    streams_in: str = ""
    streams_out: str = ""
    streams: str = ""  # of a layer
    detour: str = ""
    mixer: str = ""  # of a layer; its kind says what follows, see `mixer_matrices.py`
    # See `SharedBlock`; "{}" = number of the use.
    block: str = ""  # of the layer where its weights lie, which the other names follow
    block_exit: str = ""  # of the layer that uses it, as the next
    mixer_norm: str = ""
    query_change: str = ""
    key_change: str = ""
    value_change: str = ""
    gate_up_change: str = ""


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Queries far behind are read more sharply.

    They are multiplied with 1 + beta * log(1 + floor((position + offset) / step)). Source: Llama 4
    (Meta 2025), which counts positions from 1 there; Ministral 3, from 0.
    """

    beta: float
    step: int  # positions
    offset: int = 0


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """One way of rotating. `parameters`: the scaling's own numbers, named as in config.json."""

    dim: int  # leading dimensions of a head that are rotated; 0: queries are scaled at most
    theta: float = 10000.0
    kind: RotaryKind = "default"
    interleaved: bool = False  # pairs are neighbours (GPT-J) rather than half a head apart
    max_positions: int = 0
    # Pairs of dimensions that turn with a token's time, row and column, where images give tokens
    # three positions: so many of each one after the other, the axes in turns. (): all with one.
    sections: tuple[int, ...] = ()
    sections_alternate: bool = False  # the axes take turns pair by pair, as far as each goes
    parameters: dict[str, Any] = field(default_factory=dict, hash=False)
    query_scale: QueryScale | None = None  # of all dimensions of a query


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts in place of a dense MLP."""

    count: int
    per_token: int
    width: int
    normalise: bool  # the chosen experts' weights are made to sum to one
    shared_width: int = 0  # 0 = no shared expert
    latent_width: int = 0  # of what tokens are compressed to for all but the shared one; 0: not
    routing: Routing = "softmax"
    jitter: float = 0.0  # sparse-mixer: how far behind the best an expert still shares its weight
    groups: int = 1  # grouped: experts come in so many groups
    groups_used: int = 1  # of which a token may use so many
    scale: float = 1.0  # grouped: of the chosen experts' weights
    stacked: bool = (
        False  # one matrix for all experts' gates, one for all ups, all downs transposed
    )
    gate_up: GateUpLayout = "turns"  # of `Names.expert_gate_up`, and how downs lie
    biased: bool = False  # router and experts have biases
    weighs_inputs: bool = False  # weights multiply what goes into experts, not what comes out
    limit: float = 0.0  # of what the gate is and is for, see `layers/gating.py`; 0: none

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that no mixture can have."""
        if not 0 < self.per_token <= self.count:
            raise ValueError(
                f"a token goes to {self.per_token} experts, and there are {self.count}"
            )
        if not self.routing.startswith("grouped"):
            return
        least = 2 if self.routing == "grouped-sigmoid" else 1  # a group is as good as its best two
        divides = self.groups > 0 and self.count % self.groups == 0
        if not divides or self.count // self.groups < least:
            raise ValueError(f"{self.count} experts cannot be {self.groups} groups")
        if not 0 < self.groups_used <= self.groups:
            raise ValueError(f"a token uses {self.groups_used} groups of experts of {self.groups}")


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Keys and values of all heads are made from one small vector per token (DeepSeek-V2)."""

    rank: int  # of that vector, the latent
    query_rank: int  # of the compressed query; 0 = queries are not compressed
    plain_dim: int  # of a query or key, dimensions that come from the latent
    rotary_dim: int  # and those that are rotated; their key is one for all heads
    value_dim: int
    bias: bool = False  # of the linears that compress


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """The heads of a layer, where they are not as `DecoderSpec` has them."""

    kv_heads: int
    dim: int  # of a query and of a key
    value_dim: int


@dataclass(frozen=True, slots=True)
class OwnInputsSpec:
    """Every layer is told of each token by an embedding of its own (Gemma 3n, Google 2025).

    It is a row of a table, added to what is projected from the embedding that the first layer gets.
    """

    width: int
    rows: int  # of the table; tokens beyond it have the first row
    image_token: int  # whose row an image's tokens have


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """Of the tokens before it, a token attends to those that an index scores best.

    Source: DeepSeek-V3.2 (2025), section 2.1: the lightning indexer. A score is the weighted sum
    over heads of what is positive of query . key; a token has one index key for all heads.
    """

    heads: int
    dim: int  # of a query and of the key
    most: int  # tokens that are attended to
    rotary: RotarySpec  # of their leading dimensions


@dataclass(frozen=True, slots=True)
class StreamsSpec:
    """Several hidden states of a token, of which layers compute one and adapt the others.

    Source: Alternating Updates (Baykal, others 2023), as Gemma 3n has it; beside its attention a
    layer has a detour of low rank.
    """

    count: int
    active: int  # which one layers compute
    scaled: bool  # what layers' own embeddings get to see of it
    detour_rank: int


@dataclass(frozen=True, slots=True)
class SharedBlock:
    """A block of attention and MLP that several layers use (Zamba2, Zyphra 2024).

    It reads the hidden state and, behind it, what the first layer got. What it says joins, through
    a linear of the layer, what the layer's mixer reads. Every use adds products of low rank to it.
    """

    layer: int  # where its weights lie
    use: int  # its number among the uses of all blocks
    rank: int  # of what is added to gates and ups
    attention_rank: int  # the same of queries, keys and values; 0: nothing


@dataclass(frozen=True, slots=True)
class Crossing:
    """A layer attends to a prompt's images, whose features have no places among the tokens.

    What attention and MLP add is multiplied by tanh of a gate. Sources: Flamingo (Alayrac, others
    2022), section 2.2; Llama 3.2 Vision (Meta 2024); IDEFICS (Laurençon, others 2023).
    """

    blind: Blind
    together: bool  # a token sees all images whose tokens are neighbours; else the one before it
    gate_shape: tuple[int, ...]
    query_norm: bool  # of each head, whose keys have one as well


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What may differ from layer to layer."""

    scale: float  # of the attention scores
    window: int = 0
    chunk: int = 0  # a token sees those of its own chunk of so many positions alone; 0: all
    ahead: bool = True  # tokens of images see those behind them, where the family's do
    rotary: RotarySpec | None = None
    experts: ExpertsSpec | None = None
    mixer: Mixer | None = None  # what keeps a state per sequence
    chooses: bool = True  # has an index of its own, if there is one; else the choice before goes on
    attends: bool = True  # has attention, beside a mixer if there is one
    crosses: Crossing | None = None  # has attention to images, and no other
    feeds: bool = True  # has an MLP, or experts
    sizes: HeadSizes | None = None  # None: the model's
    keys_as_values: bool = False  # values are what keys are before they are normalised and turned
    reads_layer: int | None = None  # whose K and V are read; None: the layer's own
    sinks: bool = True  # where `Names.sinks` has some
    mlp_width: int = 0  # 0: the model's
    sparsity: float = 0.0  # what part of an MLP's gates is cut, were they normally distributed
    beside: bool = False  # experts are beside an MLP, not in its place
    names: Names | None = None  # of its weights, where they are not those of the others
    shared: SharedBlock | None = None  # what its attention and its MLP are


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Everything the generic decoder needs to know of a model.

    A layer is x + post(attention(pre(x))), then x + post(mlp(pre(x))), each norm present if `names`
    has it; with `parallel` both read the same x, the MLP through the attention's norm if it has
    none of its own.
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
    norm: NormKind = "rms"
    norm_eps: float = 1e-6
    norm_bias: bool = False
    norm_weight: bool = True
    parallel: bool = False
    query_key_norm: QueryKeyNorm = "none"
    query_key_norm_bias: bool = False
    # What heads attended to is multiplied with the sigmoid of as many numbers, which are projected
    # beside the queries: per head its query, then its gate.
    gated_attention: bool = False
    norm_after_rotary: bool = False  # of query and key heads
    gated_heads: bool = False  # what a head says is multiplied by a sigmoid, of a matrix beside qkv
    qkv_layout: QkvLayout = "separate"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    transposed: bool = False  # matrices are stored [in, out]
    gated: bool = True
    activation: str = "silu"
    tied_head: bool = False
    added_tokens: int = 0  # last ones of the vocabulary, whose rows are in tables of their own
    extra_tokens: int = 0  # last ones of the vocabulary, which are read and never chosen
    normalised_head: bool = False  # each row of the head is divided by its length
    position_rows: int = 0  # rows of the table of learned positions; 0 = none
    position_offset: int = 0
    alibi: bool = False
    alibi_scale: float = 1.0  # multiplies the slopes
    attention_soft_cap: float = 0.0
    final_soft_cap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    attention_scale: float = 1.0  # of what attention adds, beside a mixer or alone
    gate_scale: float = 1.0  # of what an MLP's gate is made of
    mlp_scale: float = 1.0  # of what an MLP adds
    logit_scale: float = 1.0
    qkv_clip: float = 0.0  # q, k and v are clamped to +-this; 0 = not
    # Then kv_heads is 1, and head_dim the latent's, the key's and the index key's, one after other.
    latent: LatentSpec | None = None
    index: IndexSpec | None = None  # of a latent's tokens
    value_norm: bool = False  # of each value by itself, without weights
    value_scale: float = 1.0
    own_inputs: OwnInputsSpec | None = None
    streams: StreamsSpec | None = None

    def sizes(self, layer: LayerSpec) -> HeadSizes:
        """Return the sizes of a layer's heads."""
        return layer.sizes or HeadSizes(self.kv_heads, self.head_dim, self.head_dim)
