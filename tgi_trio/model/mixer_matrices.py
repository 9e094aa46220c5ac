"""Which matrices and tensors the mixers of a layer are made of, for every backend.

A mixer lies at one place of a layer, `Names.mixer`; what its parts are called there is the same for
all families that have its kind.
"""

from __future__ import annotations

from typing import Final

from tgi_trio.model.claims import ANY, Claims
from tgi_trio.model.matrices import (
    ConvolutionRefs,
    LinearPiece,
    LinearRef,
    MatrixRef,
    MixerRefs,
    TensorRef,
    run_of,
    split_inputs,
    whole_units,
)
from tgi_trio.model.mixers import Mixer, ShortConvolution

# The fields that are read below: what backends that have the kind need not look at.
FIELDS: Final[Claims] = {
    "ShortConvolution.channels": ANY,
    "ShortConvolution.taps": ANY,
    "ShortConvolution.bias": ANY,
}


def mixer_refs(mixer: Mixer, place: str, hidden: int) -> MixerRefs:
    """Return what a mixer at `place`, between hidden states [hidden], is made of."""
    return _convolution(mixer, place, hidden)


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
