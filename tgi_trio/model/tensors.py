"""Which tensors of a checkpoint a model is made of, by name.

A start that lacks one of them, or would leave others unread, is refused before a loader runs. The
names of a decoder are those of `decoder_matrices.py`, which its loaders read; T5's are written here
a second time. A test compares both with what the loaders ask for, for every family.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from tgi_trio.model.decoder_matrices import layer_refs, outer_refs
from tgi_trio.model.matrices import ExpertsRefs, MatrixRef, NormRef
from tgi_trio.model.spec import DecoderSpec
from tgi_trio.model.t5_spec import T5Spec


@dataclass(frozen=True, slots=True)
class TensorClaims:
    """The names a model reads, and those it knows and may leave unread."""

    needed: frozenset[str]
    known: frozenset[str] = frozenset()  # beside `needed`
    base: str = ""  # prefix that checkpoints of the bare model leave out of every name


def decoder_claims(spec: DecoderSpec) -> TensorClaims:
    """Return the names that the generic decoder reads."""
    names = spec.names
    # A copy of the embedding, where the file has one.
    known = frozenset({f"{names.head}.weight"} if spec.tied_head else ())
    return TensorClaims(frozenset(_decoder(spec)), known, names.base)


def t5_claims(spec: T5Spec) -> TensorClaims:
    """Return the names that T5 reads."""
    stacks = ("encoder", "decoder")
    known = {
        "lm_head.weight",  # read if it is there
        # Copies of `shared.weight`, and a table that the first version made and never read.
        *(f"{stack}.embed_tokens.weight" for stack in stacks),
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
        # UMT5 has one for every layer, which is read then.
        *(
            f"{stack}.block.{index}.layer.0.SelfAttention.relative_attention_bias.weight"
            for stack, count in zip(stacks, (spec.encoder_layers, spec.decoder_layers), strict=True)
            for index in range(1, count)
        ),
    }
    return TensorClaims(frozenset(_t5(spec)), frozenset(known))


def _decoder(spec: DecoderSpec) -> Iterator[str]:
    yield from _names(outer_refs(spec))
    for index in range(len(spec.layers)):
        yield from _names(layer_refs(spec, index))


def _names(part: Any) -> Iterator[str]:
    """Yield the tensors of a part of a description, however deep they lie."""
    if isinstance(part, MatrixRef):
        yield from filter(None, (part.name, part.bias))
    elif isinstance(part, NormRef):
        yield from filter(None, (part.weight, part.bias))
    elif isinstance(part, tuple):
        for each in part:
            yield from _names(each)
    elif is_dataclass(part):
        if isinstance(part, ExpertsRefs) and part.router_bias:
            yield part.router_bias
        for field in fields(part):
            yield from _names(getattr(part, field.name))


def _t5(spec: T5Spec) -> Iterator[str]:
    yield "shared.weight"
    inner = ("wi_0", "wi_1", "wo") if spec.gated else ("wi", "wo")
    stacks = (("encoder", spec.encoder_layers, 1), ("decoder", spec.decoder_layers, 2))
    for stack, count, mlp in stacks:
        yield f"{stack}.final_layer_norm.weight"
        yield f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        for index in range(count):
            place = f"{stack}.block.{index}.layer."
            yield from (f"{place}{part}.layer_norm.weight" for part in range(mlp + 1))
            yield from (f"{place}0.SelfAttention.{letter}.weight" for letter in "qkvo")
            yield from (f"{place}{mlp}.DenseReluDense.{part}.weight" for part in inner)
            if stack == "decoder":
                yield from (f"{place}1.EncDecAttention.{letter}.weight" for letter in "qkvo")
