"""The specs of a layer's attention: rotation, latents, an index, images. Literal data only.

No torch in this file, since every backend reads it; others import it from `specs/decoder.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

RotaryKind = Literal[
    "default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional", "divided"
]

# What cross-attention layers do for a token without an image before it.
#   reads all: it attends to all images of its prompt, and the MLP adds 0; if the prompt has
#              no images, the layer adds nothing at all
#   feeds:     it attends to nothing, and the MLP adds its result as for all tokens
Blind = Literal["reads all", "feeds"]


@dataclass(frozen=True, slots=True)
class QueryScale:
    """Scaling of queries by their position.

    They are multiplied by 1 + beta * log(1 + floor((position + offset) / step)). Source: Llama 4
    (Meta 2025), which counts positions from 1 there; Ministral 3, from 0.
    """

    beta: float
    step: int  # positions
    offset: int = 0


@dataclass(frozen=True, slots=True)
class RotarySpec:
    """A rotary embedding. `parameters`: those of the scaling, named as in config.json."""

    dim: int  # leading dimensions of a head that are rotated; 0: only `query_scale` may apply
    theta: float = 10000.0
    kind: RotaryKind = "default"
    interleaved: bool = False  # pairs are neighbours (GPT-J) rather than half a head apart
    backwards: bool = False  # pairs are rotated by the negative angles
    max_positions: int = 0
    # For images, whose tokens have positions of several parts: pairs of dimensions rotated by each
    # part (time, row and column), in runs of these lengths. (): all by one position.
    sections: tuple[int, ...] = ()
    sections_alternate: bool = False  # axes alternate pair by pair instead, up to their lengths
    parameters: dict[str, Any] = field(default_factory=dict, hash=False)
    query_scale: QueryScale | None = None  # for all dimensions of a query
    # Tables have the logarithms of positions, counted from 1, for `Names.query_log_scale`.
    log_positions: bool = False
    learned: bool = False  # frequencies have factors, see `Names.rotary_factors`

    def __post_init__(self) -> None:
        """Raise ValueError for dimensions that are no pairs."""
        if self.dim % 2:
            raise ValueError(f"{self.dim} dimensions of a head cannot turn in pairs")


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Latent attention: all heads' keys and values come from one small vector (DeepSeek-V2)."""

    rank: int  # of that vector, the latent
    query_rank: int  # of the compressed query; 0 = queries are not compressed
    plain_dim: int  # dimensions of a query or key that come from the latent
    rotary_dim: int  # and those that are rotated; all heads share their key
    value_dim: int
    bias: bool = False  # of the compressing linears
    scale: float = 1.0  # of the normalised latent
    # Queries are expanded from compressed ones with and without their norm, side by side; the same
    # matrix has gates of values, a head's behind its query (A.X-K2).
    doubled: bool = False
    norm_eps: float = 1e-6  # of compressed queries and latents, whatever that of the layers is


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """The heads of a layer, if they differ from those in `DecoderSpec`."""

    kv_heads: int
    dim: int  # of a query and of a key
    value_dim: int
    heads: int = 0  # of queries; 0: the model's


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """Sparse attention: a token attends to the preceding tokens that an index scores best.

    Source: DeepSeek-V3.2 (2025), section 2.1: the lightning indexer. A score is the weighted sum
    over heads of the positive part of query . key; all heads share a token's index key. With a
    `pool` (GLM 5.3, 2026), runs of so many tokens are scored and chosen as a whole, by a mean of
    their keys with learned weights; the tokens behind the last whole run are always attended to.
    """

    heads: int
    dim: int  # of a query and of the key
    most: int  # tokens that are attended to; with a pool, those of whole runs
    rotary: RotarySpec  # of their leading dimensions
    pool: int = 0  # 0: tokens are scored one by one
    last: bool = False  # the trailing dimensions are rotated instead
    norm_eps: float = 1e-6  # of the key's norm; entries have another
    # Queries come from the layer's input, behind a norm of its own, not from compressed queries.
    reads_input: bool = False

    @property
    def kept(self) -> int:
        """The numbers that are kept of a token: its key, and its weights in the mean of a run."""
        return 2 * self.dim if self.pool else self.dim


@dataclass(frozen=True, slots=True)
class SharedKeySpec:
    """Attention of all heads to one key per token, which is its value as well.

    Source: DeepSeek-V4 (2026), section 2.3. Queries come from a compressed one; each head is
    normalised without weights. The trailing dimensions of a head are rotated, and those of its
    result back. The heads' results are projected group by group, then all together.
    """

    query_rank: int  # of the compressed query
    groups: int  # of heads
    group_rank: int  # of a group's projected results


@dataclass(frozen=True, slots=True)
class CompressionSpec:
    """Keys of whole runs of tokens, to which a layer attends beside those in its window.

    Source: DeepSeek-V4 (2026), sections 2.3.1 and 2.3.2. Such a key, an *entry*, is a mean of a
    run's projected tokens, with weights for each dimension. A token attends to the entries of the
    runs that end with it or before it.
    """

    rate: int  # tokens of a run
    # An entry is a mean over the preceding run as well, of other projections of its tokens.
    overlaps: bool
    index: IndexSpec | None  # selects entries, by entries of its own; None: all are attended to

    def width(self, dim: int) -> int:
        """Return the numbers of a token's projection for entries of `dim`."""
        return 2 * dim if self.overlaps else dim

    def kept(self, dim: int) -> int:
        """Return the numbers that are kept of a token, beside its key of `dim`."""
        own = self.width(dim) + (self.width(self.index.dim) if self.index else 0)
        return 2 * own  # what is averaged, and weights


@dataclass(frozen=True, slots=True)
class CrossAttentionSpec:
    """Cross-attention to a prompt's images, which have no positions among the tokens.

    Results of attention and MLP are multiplied by tanh of a gate. Sources: Flamingo (Alayrac,
    others 2022), section 2.2; Llama 3.2 Vision (Meta 2024); IDEFICS (Laurençon, others 2023).
    """

    blind: Blind
    together: bool  # a token attends to all adjacent images before it; else to the last one
    gate_shape: tuple[int, ...]
    query_norm: bool  # for each head; keys have one as well
