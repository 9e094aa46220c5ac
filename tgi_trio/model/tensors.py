"""Which tensors of a checkpoint a model is made of: their names and shapes.

A start that lacks one of them, has one of another shape, or would leave others unread, is refused
before a loader runs. The
names of a decoder are those of `decoder_matrices.py`, which its loaders read; T5's are written here
a second time. A test compares both with what the loaders ask for, for every family.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Final, TypeAlias, cast

from tgi_trio.model.decoder_matrices import layer_refs, outer_refs
from tgi_trio.model.matrices import MatrixRef, NormRef, TensorRef, VectorRef
from tgi_trio.model.spec import DecoderSpec
from tgi_trio.model.t5_spec import T5Spec

Shape = tuple[int, ...]
Part: TypeAlias = MatrixRef | NormRef | VectorRef | TensorRef
_PARTS: Final = (MatrixRef, NormRef, VectorRef, TensorRef)


@dataclass(frozen=True, slots=True)
class TensorClaims:
    """The tensors a model reads, and those it knows and may leave unread."""

    needed: Mapping[str, Shape]
    known: Mapping[str, Shape | None]  # None: never read
    base: str = ""  # prefix that checkpoints of the bare model leave out of every name


def decoder_claims(spec: DecoderSpec) -> TensorClaims:
    """Return the names that the generic decoder reads."""
    names = spec.names
    # A copy of the embedding, where the file has one.
    known = {f"{names.head}.weight": None} if spec.tied_head else {}
    known |= dict.fromkeys(_unread_heads(spec))
    scales = (name for i in range(len(spec.layers)) for part in kv_scales(spec, i) for name in part)
    return TensorClaims(dict(_decoder(spec)), known | dict.fromkeys(scales), names.base)


def _unread_heads(spec: DecoderSpec) -> Iterator[str]:
    """Yield the keys and values that published files have of layers that read another's, and of
    layers that attend to images, which a tower reads.
    """
    for index, layer in enumerate(spec.layers):
        names = layer.names or spec.names
        if layer.reads_layer is not None or layer.crosses is not None:
            for part in (names.key, names.value, names.key_norm):
                yield f"{names.layer.format(index)}{part}.weight"


def kv_scales(spec: DecoderSpec, index: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what tensors may hold the scale of 8-bit keys of a layer, and of its values.

    The first that is there counts. vLLM's names, ModelOpt's, and an older one for both.
    """
    names, reads = spec.layers[index].names or spec.names, spec.layers[index].reads_layer
    layer = names.layer.format(index if reads is None else reads)
    key, value = names.key or names.qkv, names.value or names.qkv
    attention = layer + key.rpartition(".")[0]
    return (
        (f"{attention}.k_scale", f"{layer}{key}.k_scale", f"{attention}.kv_scale"),
        (f"{attention}.v_scale", f"{layer}{value}.v_scale", f"{attention}.kv_scale"),
    )


def t5_claims(spec: T5Spec) -> TensorClaims:
    """Return the names that T5 reads."""
    stacks = ("encoder", "decoder")
    known: dict[str, Shape | None] = {
        "lm_head.weight": (spec.vocab_size, spec.hidden_size),  # read if it is there
        # Copies of `shared.weight`, and a table that the first version made and never read.
        **{f"{stack}.embed_tokens.weight": None for stack in stacks},
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": None,
        # UMT5 has one for every layer, which is read then.
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
    found = {part.name: part for part in _parts(spec) if isinstance(part, MatrixRef)}
    return list(found.values())


def _decoder(spec: DecoderSpec) -> Iterator[tuple[str, Shape]]:
    for part in _parts(spec):
        if isinstance(part, MatrixRef):
            shape = (part.rows, part.columns)
            yield part.name, shape[::-1] if part.transposed else shape
            if part.bias:
                yield part.bias, (part.rows,)
        elif isinstance(part, NormRef):
            yield from ((name, (part.size,)) for name in (part.weight, part.bias) if name)
        elif isinstance(part, TensorRef):
            yield part.name, part.shape
        else:
            yield part.name, (part.size,)


def _parts(spec: DecoderSpec) -> Iterator[Part]:
    """Yield what has tensors of its own, however deep it lies in a decoder's description."""
    yield from _inside(outer_refs(spec))
    for index in range(len(spec.layers)):
        yield from _inside(layer_refs(spec, index))


def _inside(part: Any) -> Iterator[Part]:
    """Yield what has tensors of its own in a part of a description."""
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
    """Return the fields of a dataclass, () for what is none; asked for thousands of parts."""
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
