"""The matrices and tensors of Mamba's mixers."""

from __future__ import annotations

from tgi_trio.model.matrices.references import (
    LinearPiece,
    LinearRef,
    MatrixRef,
    TensorRef,
    run_of,
    split_inputs,
    split_outputs,
    whole_units,
)
from tgi_trio.model.matrices.roles import Mamba1Refs, Mamba2Refs
from tgi_trio.model.specs.mixers import Mamba1, Mamba2


def mamba2_refs(mixer: Mamba2, place: str, hidden: int) -> Mamba2Refs:
    """Return the parts of a `Mamba2` at `place`, between hidden states [hidden]."""
    heads, size, state = mixer.heads, mixer.head_dim, mixer.state_dim
    width, shared = heads * size, mixer.groups * state
    inner = MatrixRef(
        f"{place}.in_proj.weight",
        2 * width + 2 * shared + heads,
        hidden,
        f"{place}.in_proj.bias" if mixer.inner_bias else "",
    )
    output = MatrixRef(
        f"{place}.out_proj.weight",
        hidden,
        width,
        f"{place}.out_proj.bias" if mixer.output_bias else "",
    )
    # Rows of x, b and c in the convolution's input; in the projection, gates come before them.
    places = [
        run_of("heads", heads, size),
        run_of("groups", mixer.groups, state, first=width),
        run_of("groups", mixer.groups, state, first=width + shared),
    ]
    rows = [
        run_of("heads", heads, size),
        run_of("heads", heads, size, first=width),
        run_of("groups", mixer.groups, state, first=2 * width),
        run_of("groups", mixer.groups, state, first=2 * width + shared),
        run_of("heads", heads, first=2 * width + 2 * shared),
    ]
    channels, one = width + 2 * shared, run_of("heads", heads)
    biases = places if mixer.convolution_bias else []
    return Mamba2Refs(
        inner=LinearRef(tuple(LinearPiece(inner, run, whole_units(hidden)) for run in rows)),
        kernels=tuple(
            TensorRef(f"{place}.conv1d.weight", (channels, 1, mixer.taps), run) for run in places
        ),
        biases=tuple(TensorRef(f"{place}.conv1d.bias", (channels,), run) for run in biases),
        rate=TensorRef(f"{place}.A_log", (heads,), one),
        step_bias=TensorRef(f"{place}.dt_bias", (heads,), one),
        skip=TensorRef(f"{place}.D", (heads,), one),
        norm=None
        if mixer.norm == "none"
        else TensorRef(f"{place}.norm.weight", (width,), run_of("heads", heads, size)),
        output=split_inputs(output, run_of("heads", heads, size)),
    )


def mamba1_refs(mixer: Mamba1, place: str, hidden: int) -> Mamba1Refs:
    """Return the parts of a `Mamba1` at `place`, between hidden states [hidden]."""
    channels, state, rank = mixer.channels, mixer.state_dim, mixer.step_rank

    def name(part: str, what: str = "weight") -> str:
        return f"{place}.{part}.{what}"

    def bias(part: str) -> str:
        return name(part, "bias") if mixer.bias else ""

    own = run_of("channels", channels)
    inner = MatrixRef(name("in_proj"), 2 * channels, hidden, bias("in_proj"))
    halves = (own, run_of("channels", channels, first=channels))
    selection = MatrixRef(name("x_proj"), rank + 2 * state, channels)
    sizes = (("dt", rank), ("b", state), ("c", state)) if mixer.norm == "weighted" else ()
    return Mamba1Refs(
        inner=LinearRef(tuple(LinearPiece(inner, half, whole_units(hidden)) for half in halves)),
        kernel=TensorRef(name("conv1d"), (channels, 1, mixer.taps), own),
        bias=TensorRef(name("conv1d", "bias"), (channels,), own)
        if mixer.convolution_bias
        else None,
        selection=split_inputs(selection, own),
        norms=tuple(
            TensorRef(name(f"{part}_layernorm"), (size,), whole_units(size)) for part, size in sizes
        ),
        step=split_outputs(MatrixRef(name("dt_proj"), channels, rank), "channels"),
        step_bias=TensorRef(name("dt_proj", "bias"), (channels,), own),
        rate=TensorRef(f"{place}.A_log", (channels, state), own),
        skip=TensorRef(f"{place}.D", (channels,), own),
        output=split_inputs(MatrixRef(name("out_proj"), hidden, channels, bias("out_proj")), own),
    )
