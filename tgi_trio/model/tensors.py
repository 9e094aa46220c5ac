"""The tensors that a model needs from a checkpoint: their names and shapes.

A start is refused before a loader runs if one of them is missing or has another shape, or if others
would not be read. A decoder's names are those of `matrices/decoder.py`, which its loaders use; T5's
are written here a second time. A test compares both with what the loaders request, for every
family.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any, Final, TypeAlias, cast

from tgi_trio.model.matrices.decoder import layer_refs, outer_refs
from tgi_trio.model.matrices.references import MatrixRef, NormRef, TensorRef, VectorRef
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.specs.t5 import T5Spec

Shape = tuple[int, ...]
Part: TypeAlias = MatrixRef | NormRef | VectorRef | TensorRef
_PARTS: Final = (MatrixRef, NormRef, VectorRef, TensorRef)


@dataclass(frozen=True, slots=True)
class TensorClaims:
    """The tensors that a model reads, and known ones that it need not read."""

    needed: Mapping[str, Shape]
    known: Mapping[str, Shape | None]  # None: never read
    base: str = ""  # prefix that is missing in all names in checkpoints of the bare model
    integers: frozenset[str] = frozenset()  # those of `needed` that hold whole numbers


def decoder_claims(spec: DecoderSpec) -> TensorClaims:
    """Return the tensors of the generic decoder."""
    names = spec.names
    # A copy of the embedding, if the file has one.
    known = {f"{names.head}.weight": None} if spec.tied_head else {}
    known |= dict.fromkeys((*_unread_heads(spec), *_unread_norms(spec), *_unread_experts(spec)))
    scales = (name for i in range(len(spec.layers)) for part in kv_scales(spec, i) for name in part)
    tables = (part.name for part in _parts(spec) if isinstance(part, TensorRef) and part.integers)
    shapes = dict(_shapes(_parts(spec)))
    return TensorClaims(shapes, known | dict.fromkeys(scales), names.base, frozenset(tables))


def _unread_heads(spec: DecoderSpec) -> Iterator[str]:
    """Yield unused keys and values in published files: of layers that read another's K and V, and
    of cross-attention layers, where a tower reads them.
    """
    for index, layer in enumerate(spec.layers):
        names = layer.names or spec.names
        if layer.reads_layer is not None or layer.cross_attention is not None:
            for part in (names.key, names.value, names.key_norm):
                yield f"{names.layer.format(index)}{part}.weight"


def _unread_norms(spec: DecoderSpec) -> Iterator[str]:
    """Yield norms of MLPs that A.X-K1's published files have in layers which do not use them."""
    for index, layer in enumerate(spec.layers):
        if layer.names is not None and not layer.names.mlp_post_norm and spec.names.mlp_post_norm:
            yield f"{spec.names.layer.format(index)}{spec.names.mlp_post_norm}.weight"


def _unread_experts(spec: DecoderSpec) -> Iterator[str]:
    """Yield the gates and ups that transformers writes for experts that return their input."""
    for index, layer in enumerate(spec.layers):
        names, experts = layer.names or spec.names, layer.experts
        for expert in range(experts.count, experts.count + experts.idle) if experts else ():
            place = names.layer.format(index) + names.experts.format(expert)
            yield from (f"{place}{part}.weight" for part in (names.expert_gate, names.expert_up))


def kv_scales(spec: DecoderSpec, index: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the possible names of the scales of a layer's 8-bit keys and values.

    The first that exists counts: vLLM's name, ModelOpt's, Quark's, or an older one for both.
    """
    names, reads = spec.layers[index].names or spec.names, spec.layers[index].reads_layer
    layer = names.layer.format(index if reads is None else reads)
    key, value = names.key or names.qkv, names.value or names.qkv
    attention = layer + key.rpartition(".")[0]
    return (
        (
            *(f"{attention}.k_scale", f"{layer}{key}.k_scale"),
            *(f"{layer}{key}.output_scale", f"{attention}.kv_scale"),
        ),
        (
            *(f"{attention}.v_scale", f"{layer}{value}.v_scale"),
            *(f"{layer}{value}.output_scale", f"{attention}.kv_scale"),
        ),
    )


def t5_claims(spec: T5Spec) -> TensorClaims:
    """Return the tensors of T5."""
    stacks = ("encoder", "decoder")
    known: dict[str, Shape | None] = {
        "lm_head.weight": (spec.vocab_size, spec.hidden_size),  # read if it exists
        # Copies of `shared.weight`, and a table that the first version has but never uses.
        **{f"{stack}.embed_tokens.weight": None for stack in stacks},
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": None,
        # UMT5 has one for every layer, and reads them.
        **{
            f"{stack}.block.{index}.layer.0.SelfAttention.relative_attention_bias.weight": (
                spec.buckets,
                spec.heads,
            )
            for stack, count in zip(stacks, (spec.encoder_layers, spec.decoder_layers), strict=True)
            for index in range(1, count)
        },
    }
    return TensorClaims(dict(_t5(spec)), known)


def decoder_matrices(spec: DecoderSpec) -> list[MatrixRef]:
    """Return the matrices that the generic decoder reads, each once."""
    return list_matrices(_parts(spec))


def decoder_copies(spec: DecoderSpec) -> dict[str, MatrixRef]:
    """Return what files of tied models may hold as the head, by the embedding's name."""
    if not spec.tied_head:
        return {}
    table = outer_refs(spec).embedding.pieces[0].matrix
    return {table.name: replace(table, name=f"{spec.names.head}.weight")}


def list_matrices(parts: Iterable[Any]) -> list[MatrixRef]:
    """Return the matrices in parts of a spec, at any depth, each once."""
    inner = (each for part in parts for each in _inside(part))
    return list({part.name: part for part in inner if isinstance(part, MatrixRef)}.values())


def list_shapes(parts: Iterable[Any]) -> dict[str, Shape]:
    """Return the tensors of parts of a spec, at any depth, with their shapes."""
    return dict(_shapes(each for part in parts for each in _inside(part)))


def _shapes(parts: Iterable[Part]) -> Iterator[tuple[str, Shape]]:
    for part in parts:
        if isinstance(part, MatrixRef):
            shape = (part.rows, part.columns)
            yield part.name, shape[::-1] if part.transposed else shape
            if part.bias:
                yield part.bias, (part.rows,)
        elif isinstance(part, NormRef):
            yield from part.tensors()
        elif isinstance(part, TensorRef):
            yield part.name, part.shape
        else:
            yield part.name, (part.size,)


def _parts(spec: DecoderSpec) -> Iterator[Part]:
    """Yield everything with tensors in a decoder's spec, at any depth."""
    yield from _inside(outer_refs(spec))
    for index in range(len(spec.layers)):
        yield from _inside(layer_refs(spec, index))


def _inside(part: Any) -> Iterator[Part]:
    """Yield everything with tensors in a part of a spec."""
    if isinstance(part, _PARTS):
        yield part
    elif isinstance(part, tuple):
        for each in part:
            yield from _inside(each)
    else:
        for name in _field_names(cast(Hashable, type(part))):
            yield from _inside(getattr(part, name))


@cache
def _field_names(kind: Any) -> tuple[str, ...]:
    """Return the fields of a dataclass, () for other types; called for thousands of parts."""
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()


def _t5(spec: T5Spec) -> Iterator[tuple[str, Shape]]:
    hidden, heads = spec.hidden_size, spec.heads * spec.head_dim
    projections = {"q": (heads, hidden), "k": (heads, hidden), "v": (heads, hidden)}
    projections["o"] = (hidden, heads)
    inner = dict.fromkeys(("wi_0", "wi_1") if spec.gated else ("wi",), (spec.mlp_width, hidden))
    inner["wo"] = (hidden, spec.mlp_width)
    yield "shared.weight", (spec.vocab_size, hidden)
    stacks = (("encoder", spec.encoder_layers, 1), ("decoder", spec.decoder_layers, 2))
    for stack, count, mlp in stacks:
        distances = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield f"{stack}.final_layer_norm.weight", (hidden,)
        yield distances, (spec.buckets, spec.heads)
        for index in range(count):
            place = f"{stack}.block.{index}.layer."
            for part in range(mlp + 1):
                yield f"{place}{part}.layer_norm.weight", (hidden,)
            for name, shape in inner.items():
                yield f"{place}{mlp}.DenseReluDense.{name}.weight", shape
            for letter, shape in projections.items():
                yield f"{place}0.SelfAttention.{letter}.weight", shape
                if stack == "decoder":
                    yield f"{place}1.EncDecAttention.{letter}.weight", shape
