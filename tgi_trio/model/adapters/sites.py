"""The linears of a decoder that an adapter changes, found by the names of the model's matrices.

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

Role = Literal["qkv", "output", "inner", "down"]
_NAMED: Final = 8  # most modules listed in an error message


@dataclass(frozen=True, slots=True, order=True)
class Site:
    """A linear of a layer."""

    layer: int
    role: Role


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """A site that an adapter changes, with the pair of each of the linear's pieces."""

    linear: LinearRef
    pairs: tuple[Pair | None, ...]  # one for each piece; None: it is unchanged


def adaptable_linears(spec: DecoderSpec) -> Iterator[tuple[Site, LinearRef]]:
    """Yield the linears of a decoder that adapters may change, in the order of computation.

    Excluded are linears of mixtures of experts, of mixers, of blocks shared by layers, of layers
    with cross-attention to images, around latent attention, and of attention to one key per token.
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
            module = piece.matrix.name.removesuffix(".weight")
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
    names = {piece.matrix.name for _, linear in adaptable_linears(spec) for piece in linear.pieces}
    kinds = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in names})
    more = f" and {len(modules) - _NAMED} more" if len(modules) > _NAMED else ""
    head = outer_refs(spec).head.pieces[0].matrix.name.removesuffix(".weight")
    outer = " (nor are embeddings and the head)" if head in modules else ""
    return (
        f"{adapter.folder} changes {', '.join(modules[:_NAMED])}{more}, which is not adapted "
        f"here{outer}: of {spec.family} models {', '.join(kinds) or 'nothing'} of the layers can "
        f"be. {adapter.config.advise()}"
    )
