"""The linears of a decoder that an adapter changes, found by the names of the model's modules.

A *site* is a linear as it is computed: query, key and value together, gate and up together. So a
site may have several pairs, for matrices that the checkpoint stores separately, or one pair for all
of it, if the checkpoint has fused them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.adapters.files import Adapter, Pair
from tgi_trio.model.adapters.tensor_kinds import Kind
from tgi_trio.model.matrices.decoder import layer_refs, outer_refs
from tgi_trio.model.matrices.references import LinearRef, MatrixRef
from tgi_trio.model.matrices.roles import MlpRefs
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.wrappers import text_name

Role = Literal["qkv", "output", "inner", "down", "head"]
_NAMED: Final = 8  # most modules listed in an error message


@dataclass(frozen=True, slots=True, order=True)
class Site:
    """A linear of a layer, or the head."""

    layer: int  # of the head: the number of layers
    role: Role


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """A site that an adapter changes, with the pair of each of the linear's pieces."""

    linear: LinearRef
    pairs: tuple[Pair | None, ...]  # one for each piece; None: it is unchanged


def adaptable_linears(spec: DecoderSpec) -> Iterator[tuple[Site, LinearRef]]:
    """Yield the linears of a decoder that adapters may change, in the order of computation.

    Excluded are linears of mixtures of experts, of mixers, of blocks shared by layers, of layers
    with cross-attention to images, around latent attention, and of attention to one key per token;
    and a head that is more than a linear of the hidden states.
    """
    for index in range(len(spec.layers)):
        refs = layer_refs(spec, index)
        if refs.shared is not None or refs.crossing is not None:
            continue
        attention = refs.attention
        if attention is not None and attention.latent is None and attention.shared_key is None:
            yield Site(index, "qkv"), attention.qkv
            yield Site(index, "output"), attention.output
        if isinstance(refs.mlp, MlpRefs):
            yield Site(index, "inner"), refs.mlp.inner
            yield Site(index, "down"), refs.mlp.down
    if adapts_head(spec):
        yield head_site(spec), outer_refs(spec).head


def adapts_head(spec: DecoderSpec) -> bool:
    """Return whether a decoder's head is a single linear of the hidden states."""
    return not (spec.normalised_head or spec.added_tokens or spec.embedding_width)


def head_site(spec: DecoderSpec) -> Site:
    return Site(len(spec.layers), "head")


def find_module(spec: DecoderSpec, site: Site, matrix: MatrixRef) -> str:
    """Return the module that a site's matrix belongs to; a tied head has the embedding's matrix."""
    return spec.names.head if site.role == "head" else matrix.name.removesuffix(".weight")


def map_adapter(
    adapter: Adapter, spec: DecoderSpec, max_rank: int | None = None
) -> Mapping[Site, AdaptedLinear]:
    """Return an adapter's changes of a decoder.

    Raises ModelLoadError for modules that cannot be adapted here (all are named), for matrices of
    another shape, and for a rank above `max_rank`.
    """
    if max_rank is not None and adapter.rank > max_rank:
        raise ModelLoadError(
            f"{adapter.folder} has the rank {adapter.rank}; at most {max_rank} is served "
            "(--max-lora-rank)"
        )
    named = {text_name(module): pair for module, pair in adapter.pairs.items()}
    left = dict(adapter.pairs)
    found: dict[Site, AdaptedLinear] = {}
    for site, linear in adaptable_linears(spec):
        pairs = []
        for piece in linear.pieces:
            module = find_module(spec, site, piece.matrix)
            bare = module.removeprefix(spec.names.base)  # name in an adapter of the bare model
            pair = named.get(module) or named.get(bare)
            pairs.append(pair)
            if pair is not None:
                _check_shapes(adapter, pair, piece.matrix)
                left.pop(pair.module, None)
        if any(pairs):
            found[site] = AdaptedLinear(linear, tuple(pairs))
    if left:
        raise ModelLoadError(_refuse_modules(adapter, sorted(left), spec))
    return found


def _check_shapes(adapter: Adapter, pair: Pair, matrix: MatrixRef) -> None:
    """Raise ModelLoadError for tensors that do not fit the model's matrix."""
    rows, columns = matrix.rows, matrix.columns
    outputs = f"outputs are {rows}"
    for name, shape, wanted, what in (
        ("lora_A", pair.a.shape, (pair.rank, columns), f"inputs are {columns}"),
        ("lora_B", pair.b.shape, (rows, pair.rank), outputs),
        *((name, each.shape, (rows,), outputs) for name, each in pair.vectors.values()),
        *((name, each.shape, (rows, columns), outputs) for name, each in pair.copies),
    ):
        if shape != wanted:
            raise ModelLoadError(
                f"{name} of {pair.module} in {adapter.folder} is {list(shape)}; the "
                f"model's {what}: the adapter is made for another base"
                + (f", {adapter.config.base}" if adapter.config.base else "")
            )
    if Kind.BIAS in pair.vectors and not matrix.bias:
        raise ModelLoadError(
            f"{pair.vectors[Kind.BIAS][0]} of {adapter.folder} is a bias, and the model's "
            f"{pair.module} has none: the adapter is made for another base"
        )


def _refuse_modules(adapter: Adapter, modules: list[str], spec: DecoderSpec) -> str:
    names = {
        find_module(spec, site, piece.matrix)
        for site, linear in adaptable_linears(spec)
        for piece in linear.pieces
    }
    kinds = sorted({name.rpartition(".")[2] for name in names})
    more = f" and {len(modules) - _NAMED} more" if len(modules) > _NAMED else ""
    outer = " (nor is this head)" if spec.names.head in modules else ""
    return (
        f"{adapter.folder} changes {', '.join(modules[:_NAMED])}{more}, which is not adapted "
        f"here{outer}: of {spec.family} models {', '.join(kinds) or 'nothing'} can be. "
        f"{adapter.config.advise()}"
    )
