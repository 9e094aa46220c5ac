"""Compile-time choices of a step: storage of numbers, instructions of products, sizes of tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tgi_trio.shard.cpu_backend.weight_layout import Storage


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to compile the kernels."""

    weights: Storage  # of linear layers
    kv: Storage  # embeddings, and K and V: the model's dtype, float32 or bfloat16
    cache: Storage  # K and V: as `kv`, or 8-bit floats
    heads: int  # query heads of one KV head that attend together
    value_vectors: int  # vectors of a head's values that are summed at once
    rows: int  # most rows of a tile of a matrix product: 8 with 32 registers, else 6
    tokens: int = 1  # tokens of a sequence that attend together

    @property
    def instructions(self) -> str:
        """A description for operators."""
        weights = "int8 weights, " if self.weights.int8 else ""
        dot = " AMX" if self.kv.amx else " dot product" if self.dot else ""
        cache = f", K and V in {self.cache.numbers}" if self.cache.eight else ""
        return f"{weights}{self.kv.numbers}{dot}{cache}, tiles of {self.product_rows}"

    @property
    def dot(self) -> bool:
        """Whether activations of products are bfloat16, too; otherwise they are float32."""
        return self.kv.dot

    @property
    def active_bytes(self) -> int:
        """Bytes of one activation of a product."""
        return 2 if self.dot else 4

    @property
    def query_bytes(self) -> int:
        """Bytes of one number of a query."""
        return 2 if self.cache.dot else 4

    @property
    def tile_rows(self) -> int:
        """Rows of a tile of attention: query heads of all its tokens."""
        return self.tokens * self.heads

    @property
    def paired_rows(self) -> int:
        """Most rows of such a tile that two blocks of scores at once, or two vectors of values,
        leave registers for. With 16 registers others take turns, four at a time.
        """
        return self.tile_rows if self.rows >= 8 else 2

    @property
    def index_rows(self) -> int:
        """Heads of an index whose scores are a tile: two blocks fill half of the registers."""
        return 8 if self.rows >= 8 else 2

    @property
    def block_rows(self) -> int:
        """The same of an index of blocks, which has few heads."""
        return 4 if self.rows >= 8 else 2

    @property
    def tile_vectors(self) -> int:
        """As `value_vectors`, for such tiles."""
        return 2 if self.tokens > 1 else self.value_vectors

    @property
    def product_rows(self) -> int:
        """Most rows that are multiplied with a panel at once."""
        return 32 if self.weights.amx else self.rows

    @property
    def columns(self) -> int:
        """Vectors of a panel in a full tile: all, or half of the panel."""
        return 2 if self.rows >= 8 else 1

    @property
    def least_alone(self) -> int:
        """Rows from which a full tile is faster than smaller ones, if there are no other rows."""
        if self.rows < 8:
            return self.rows
        return 7 if self.weights.int8 else 2  # with int8, arithmetic takes longer than reading

    @property
    def least_behind(self) -> int:
        """The same for rows after full tiles, whose panel is in the cache."""
        if self.rows < 8:
            return self.rows
        return 7 if self.weights.int8 else 5

    @property
    def cheap_rows(self) -> int:
        """Rows up to which a step is filled with drafts: 8 rows cost as much as 1.1 steps of one
        row, a tile of six 1.2; with int8 weights four cost 2, and eight 3.4.
        """
        return 4 if self.weights.int8 else self.rows

    @property
    def adapter_unroll(self) -> int:
        """Unrolled steps of a product with an adapter; see `adapters.half_product`."""
        return 4 if self.rows >= 8 else 2


def narrowed(variant: Variant) -> Variant:
    """Return the variant without attention's choices, so that there are fewer variants."""
    return replace(variant, cache=variant.kv, heads=1, value_vectors=2, tokens=1)
