"""What attention of a layer must read of its cache, and multiply, for a token at least."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tgi_trio.model.specs.decoder import DecoderSpec, LayerSpec


@dataclass(frozen=True, slots=True)
class Kept:
    """Something of which the cache keeps one for every so many tokens."""

    numbers: int  # of one
    multiplied: int  # by a token that reads it
    tokens: int = 1  # for which there is one
    most: int = 0  # that a token reads; 0: all

    def read(self, context: float) -> float:
        """Return how many a token reads that sees `context` tokens."""
        there = context / self.tokens
        return min(there, self.most) if self.most else there

    @property
    def written(self) -> float:
        """Return the numbers that each new token adds."""
        return self.numbers / self.tokens


def list_kept(spec: DecoderSpec, layer: LayerSpec) -> Iterator[Kept]:
    """Yield what a layer keeps: what is attended to, and an index that chooses from it.

    Nothing for layers without attention: states are read whatever the context is.
    """
    sizes, index = spec.sizes(layer), spec.index
    if not layer.attends:
        return
    if spec.shared_key is not None:
        yield from _list_entries(spec, layer)
    elif spec.latent is not None:
        rank, width = spec.latent.rank, spec.latent.rank + spec.latent.rotary_dim
        most = index.most if index else layer.window
        yield Kept(width, sizes.heads * (width + rank), most=most)
        if index is not None and layer.chooses:
            yield Kept(index.kept, index.heads * index.dim)
    else:
        width, most = sizes.dim + sizes.value_dim, layer.window
        if layer.blocks is not None:
            most = layer.blocks.most * layer.blocks.size
            yield Kept(layer.blocks.dim, sizes.kv_heads * layer.blocks.dim)
        if layer.pooled is not None:
            pooled = layer.pooled
            most = pooled.most * pooled.size
            yield Kept(pooled.dim, pooled.heads * pooled.dim, tokens=pooled.size)
        yield Kept(sizes.kv_heads * width, sizes.heads * width, most=most)


def _list_entries(spec: DecoderSpec, layer: LayerSpec) -> Iterator[Kept]:
    """Yield a window's keys, which are values as well, entries, and the index that selects them."""
    dim, made = spec.head_dim, layer.compression
    yield Kept(dim, spec.heads * 2 * dim, most=layer.window)
    if made is not None:
        index = made.index
        most = index.most if index else 0
        yield Kept(dim, spec.heads * 2 * dim, tokens=made.rate, most=most)
        if index is not None:
            yield Kept(index.dim, index.heads * index.dim, tokens=made.rate)
