"""The matrices and tensors of mixers, for every backend.

A mixer is at `Names.mixer` in a layer; the names of its parts there are the same for all families
with its kind and layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Final

from tgi_trio.model.claims import ANY, Claims
from tgi_trio.model.matrices.delta_rule import delta_rule_refs
from tgi_trio.model.matrices.mamba import mamba1_refs, mamba2_refs
from tgi_trio.model.matrices.references import (
    LinearPiece,
    LinearRef,
    MatrixRef,
    TensorRef,
    Units,
    run_of,
    split_inputs,
    stack_matrices,
    whole_units,
)
from tgi_trio.model.matrices.roles import ConvolutionRefs, GateRefs, MixerRefs, RecurrentGateRefs
from tgi_trio.model.specs.mixers import (
    DeltaRule,
    Mamba1,
    Mamba2,
    Mixer,
    RecurrentGate,
    ShortConvolution,
)

# The fields that are read below; backends that compute the kinds need not claim them.
FIELDS: Final[Claims] = {
    f"{kind.__name__}.{field.name}": ANY
    for kind in (ShortConvolution, DeltaRule, Mamba2, Mamba1, RecurrentGate)
    for field in fields(kind)
}


def mixer_refs(mixer: Mixer, place: str, hidden: int) -> MixerRefs:
    """Return the parts of a mixer at `place`, between hidden states [hidden]."""
    if isinstance(mixer, DeltaRule):
        return delta_rule_refs(mixer, place, hidden)
    if isinstance(mixer, Mamba2):
        return mamba2_refs(mixer, place, hidden)
    if isinstance(mixer, Mamba1):
        return mamba1_refs(mixer, place, hidden)
    if isinstance(mixer, RecurrentGate):
        return _recurrent_gate(mixer, place, hidden)
    return _convolution(mixer, place, hidden)


def mixer_units(mixer: Mixer) -> Iterator[Units]:
    """Yield the units of a mixer that ranks split."""
    refs = mixer_refs(mixer, "", 1)
    for piece in refs.inner.pieces:
        yield piece.outputs


def _convolution(mixer: ShortConvolution, place: str, hidden: int) -> ConvolutionRefs:
    count, biased = mixer.channels, mixer.bias

    def name(part: str, what: str = "weight") -> str:
        return f"{place}.{part}.{what}"

    def bias(part: str) -> str:
        return name(part, "bias") if biased else ""

    inner = MatrixRef(name("in_proj"), 3 * count, hidden, bias("in_proj"))
    runs = (run_of("channels", count, first=part * count) for part in range(3))
    own = run_of("channels", count)
    return ConvolutionRefs(
        inner=LinearRef(tuple(LinearPiece(inner, run, whole_units(hidden)) for run in runs)),
        kernel=TensorRef(name("conv"), (count, 1, mixer.taps), own),
        bias=TensorRef(bias("conv"), (count,), own) if biased else None,
        output=split_inputs(MatrixRef(name("out_proj"), hidden, count, bias("out_proj")), own),
    )


def _recurrent_gate(mixer: RecurrentGate, place: str, hidden: int) -> RecurrentGateRefs:
    heads, size = mixer.heads, mixer.head_dim
    width, own, one = heads * size, run_of("heads", heads, size), run_of("heads", heads)

    def matrix(part: str, rows: int, columns: int) -> MatrixRef:
        return MatrixRef(f"{place}.{part}.weight", rows, columns, f"{place}.{part}.bias")

    def gate(name: str) -> GateRefs:
        return GateRefs(
            TensorRef(f"{place}.rg_lru.{name}_weight", (heads, size, size), one),
            TensorRef(f"{place}.rg_lru.{name}_bias", (heads, size), one),
        )

    branches = [matrix(part, width, hidden) for part in ("linear_y", "linear_x")]
    return RecurrentGateRefs(
        inner=stack_matrices(branches, own),
        kernel=TensorRef(f"{place}.conv_1d.weight", (width, 1, mixer.taps), own),
        bias=TensorRef(f"{place}.conv_1d.bias", (width,), own),
        entry=gate("input_gate"),
        decay=gate("recurrent_gate"),
        rate=TensorRef(f"{place}.rg_lru.recurrent_param", (width,), own),
        output=split_inputs(matrix("linear_out", hidden, width), own),
    )
