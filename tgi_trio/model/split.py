"""How ranks of a tensor-parallel group split a model, and whether it can be split."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.matrices.mixers import mixer_units
from tgi_trio.model.matrices.references import Units, every_unit, run_of
from tgi_trio.model.specs.decoder import DecoderSpec, HeadSizes
from tgi_trio.model.specs.t5 import T5Spec


@dataclass(frozen=True, slots=True)
class Portion:
    """A rank's portion of every layer; with one rank, all of it."""

    rank: int = 0
    ranks: int = 1

    def share(self, units: Units) -> slice:
        """Return this rank's share of some units; raises ModelLoadError as `unit_share` does."""
        return unit_share(units, self.rank, self.ranks) if self.ranks > 1 else every_unit(units)

    def sizes_of(self, spec: DecoderSpec) -> DecoderSpec:
        """Return a spec with as many heads and MLP columns as this rank has."""
        if self.ranks == 1:
            return spec

        def own(sizes: HeadSizes) -> HeadSizes:
            kv_heads = max(1, sizes.kv_heads // self.ranks)
            return replace(sizes, kv_heads=kv_heads, heads=sizes.heads // self.ranks)

        layers = (
            replace(
                layer,
                sizes=own(layer.sizes) if layer.sizes else None,
                mlp_width=layer.mlp_width // self.ranks,
            )
            for layer in spec.layers
        )
        return replace(
            spec,
            heads=spec.heads // self.ranks,
            kv_heads=max(1, spec.kv_heads // self.ranks),
            mlp_width=spec.mlp_width // self.ranks,
            layers=tuple(layers),
        )


def unit_share(units: Units, rank: int, ranks: int) -> slice:
    """Return a rank's share of some units; raises ModelLoadError if they cannot be split."""
    count = len(units.starts)
    match units.split:
        case "whole":
            return every_unit(units)
        case "heads":
            return even_share(count, "attention heads", rank, ranks)
        case "kv_heads":
            return _shared_heads(count, "key-value heads", rank, ranks)
        case "mlp":
            return even_share(count, "MLP columns", rank, ranks)
        case "channels":
            return even_share(count, "channels", rank, ranks)
        case "groups":
            return _shared_heads(count, "groups of heads", rank, ranks)
        case "outputs":
            return even_share(count, "groups of heads", rank, ranks)
        case "vocabulary":
            before, whole = units.within or (0, count)
            share = block_share(whole, rank, ranks)
            return slice(*(min(max(0, at - before), count) for at in (share.start, share.stop)))


def even_share(count: int, what: str, rank: int, ranks: int) -> slice:
    """Return a rank's share of `count` equal things; raises ModelLoadError unless even."""
    if count % ranks:
        raise ModelLoadError(
            f"{count} {what} cannot be split over {ranks} shards; choose a "
            f"--num-shard that divides {count}."
        )
    each = count // ranks
    return slice(rank * each, (rank + 1) * each)


def block_share(count: int, rank: int, ranks: int) -> slice:
    """Return a rank's share of `count` rows; the last rank's may be smaller than the others'.

    Raises ModelLoadError if a rank would get none.
    """
    each = -(-count // ranks)
    if each * (ranks - 1) >= count:
        raise ModelLoadError(
            f"{count} rows cannot be split over {ranks} shards; choose a smaller --num-shard."
        )
    return slice(rank * each, min(count, (rank + 1) * each))


def kv_head_share(spec: DecoderSpec, count: int, rank: int, ranks: int) -> slice:
    """Return a rank's KV heads, of a layer with `count`.

    It has its share, or, if there are fewer than ranks, a single one: all of its query heads then
    belong to the KV head that it shares with neighbouring ranks. Raises ModelLoadError if neither
    is possible.
    """
    if spec.query_key_norm == "whole" and count < ranks and ranks % count == 0:
        raise ModelLoadError(
            f"Model type {spec.family!r} normalises all key heads together and has "
            f"{count} of them; choose a --num-shard that divides {count}."
        )
    return _shared_heads(count, "key-value heads", rank, ranks)


def check_split(spec: DecoderSpec | T5Spec, ranks: int) -> None:
    """Raise ModelLoadError if a model cannot be split over this many ranks."""
    heads, widths = {spec.heads}, {spec.mlp_width}
    if isinstance(spec, DecoderSpec):
        heads = {spec.sizes(layer).heads for layer in spec.layers}
    for count in sorted(heads):
        even_share(count, "attention heads", 0, ranks)
    if isinstance(spec, DecoderSpec):
        for count in {spec.sizes(layer).kv_heads for layer in spec.layers}:
            kv_head_share(spec, count, 0, ranks)
        widths = {layer.experts.width for layer in spec.layers if layer.experts}
        widths |= {layer.experts.shared_width for layer in spec.layers if layer.experts}
        dense = (la for la in spec.layers if la.feeds and (la.beside or la.later or not la.experts))
        widths |= {layer.mlp_width or spec.mlp_width for layer in dense}
        for mixer in {layer.mixer for layer in spec.layers if layer.mixer}:
            for units in mixer_units(mixer):
                unit_share(units, 0, ranks)
        for ngrams in {layer.ngrams for layer in spec.layers if layer.ngrams}:
            unit_share(run_of("channels", ngrams.width // ngrams.heads), 0, ranks)
        if spec.shared_key is not None:
            even_share(spec.shared_key.groups, "groups of heads", 0, ranks)
        check_gates(spec, ranks)
    for width in sorted(widths):
        even_share(width, "MLP columns", 0, ranks)
    block_share(spec.vocab_size, 0, ranks)


def check_gates(spec: DecoderSpec, ranks: int) -> None:
    """Raise ModelLoadError if a rank would need the gates of the others."""
    if ranks > 1 and any(layer.sparsity for layer in spec.layers):
        raise ModelLoadError(
            f"Model type {spec.family!r} cuts the gates of an MLP at a bound that all of them "
            "set together, which is not split over shards here; use --num-shard 1."
        )


def _shared_heads(count: int, what: str, rank: int, ranks: int) -> slice:
    """Return a rank's share of what heads share; if there are fewer than ranks, ranks share one."""
    if count >= ranks or not count or ranks % count:
        return even_share(count, what, rank, ranks)
    index = rank * count // ranks
    return slice(index, index + 1)
