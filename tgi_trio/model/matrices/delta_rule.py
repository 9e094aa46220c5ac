"""The matrices and tensors of a delta rule, in each layout that checkpoints have."""

from __future__ import annotations

from collections.abc import Iterator

from tgi_trio.model.matrices.references import (
    LinearPiece,
    LinearRef,
    MatrixRef,
    TensorRef,
    Units,
    run_of,
    split_inputs,
    split_outputs,
    whole_units,
)
from tgi_trio.model.matrices.roles import DeltaRuleRefs
from tgi_trio.model.specs.mixers import DeltaRule

_COMPRESSED = ("compressed", "low rank")
_APART = (*_COMPRESSED, "separate", "full rank")  # queries, keys and values in three matrices


def delta_rule_refs(mixer: DeltaRule, place: str, hidden: int) -> DeltaRuleRefs:
    """Return the parts of a delta rule at `place`, between hidden states [hidden]."""
    values = mixer.value_heads
    one = _value_units(mixer, 1)
    compressed = mixer.layout in _COMPRESSED
    separate = mixer.layout in _APART
    width = values * mixer.value_dim
    output = MatrixRef(f"{place}.{_output_name(mixer)}.weight", hidden, width)
    shape, axis = ((1, 1, values, 1), 2) if mixer.layout == "compressed" else ((values,), 0)
    each = mixer.key_dim if mixer.by_channel else 1
    return DeltaRuleRefs(
        inner=LinearRef(
            tuple(
                LinearPiece(matrix, units, whole_units(hidden))
                for matrix, units in _inner(mixer, place, hidden)
            )
        ),
        decay_up=_up(mixer, f"{place}.f_b_proj", mixer.key_dim) if compressed else None,
        gate_up=_up(mixer, f"{place}.g_b_proj", mixer.value_dim) if compressed else None,
        kernels=tuple(_kernels(mixer, place, separate)),
        rate=TensorRef(f"{place}.A_log", shape, one, axis),
        decay_bias=TensorRef(f"{place}.dt_bias", (values * each,), _value_units(mixer, each)),
        norm=TensorRef(
            f"{place}.{'o_norm' if separate else 'norm'}.weight",
            (mixer.value_dim,),
            whole_units(mixer.value_dim),
        ),
        output=split_inputs(output, _value_units(mixer, mixer.value_dim)),
    )


def _output_name(mixer: DeltaRule) -> str:
    if mixer.layout == "full rank":
        return "dense"
    return "o_proj" if mixer.layout in _APART else "out_proj"


def _inner(mixer: DeltaRule, place: str, hidden: int) -> Iterator[tuple[MatrixRef, Units]]:
    """Yield the rows of queries, keys, values and all other projections."""

    def matrix(part: str, rows: int) -> MatrixRef:
        return MatrixRef(f"{place}.{part}.weight", rows, hidden)

    keys, values, rank = mixer.key_heads, mixer.value_heads, mixer.channel_rank
    key, value, one = keys * mixer.key_dim, values * mixer.value_dim, _value_units(mixer, 1)
    if mixer.layout == "grouped":
        yield from _grouped(mixer, place, hidden)
        return
    units = _stacked(mixer)
    if mixer.layout in ("stacked", "mixed"):
        for each in units:
            yield matrix("in_proj_qkv", 2 * key + value), each
        yield matrix("in_proj_z", value), _value_units(mixer, mixer.value_dim)
        if mixer.layout == "mixed":
            yield from _grouped_steps(mixer, place, hidden)
            return
        yield matrix("in_proj_b", values), one
        yield matrix("in_proj_a", values), one
        return
    yield matrix("q_proj", key), units[0]
    yield matrix("k_proj", key), units[0]
    yield matrix("v_proj", value), run_of("heads", values, mixer.value_dim)
    if mixer.layout in _COMPRESSED:
        yield matrix("f_a_proj", rank), whole_units(rank)
        yield matrix("g_a_proj", rank), whole_units(rank)
        yield matrix("b_proj", values), one
        return
    yield matrix("g_proj", value), run_of("heads", values, mixer.value_dim)
    yield matrix("b_proj", values), one
    if mixer.layout == "full rank":
        decays = values * mixer.key_dim
        yield matrix("f_proj", decays), run_of("heads", values, mixer.key_dim)
    else:
        yield matrix("a_proj", values), one


def _stacked(mixer: DeltaRule) -> list[Units]:
    """Return the units of one tensor with all queries, then all keys, then all values."""
    keys, key = mixer.key_heads, mixer.key_dim
    return [
        run_of("kv_heads", keys, key),
        run_of("kv_heads", keys, key, first=keys * key),
        _value_units(mixer, mixer.value_dim, first=2 * keys * key),
    ]


def _value_units(mixer: DeltaRule, size: int, *, first: int = 0) -> Units:
    """Return `size` rows for each value head, in the order of the key heads they belong to."""
    keys, values = mixer.key_heads, mixer.value_heads
    if not mixer.tiled:
        return run_of("heads", values, size, first=first)
    order = [key + i * keys for key in range(keys) for i in range(values // keys)]
    return Units("heads", [first + head * size for head in order], size, as_they_lie=True)


def _grouped(mixer: DeltaRule, place: str, hidden: int) -> Iterator[tuple[MatrixRef, Units]]:
    """Yield the rows of matrices that are grouped by key head: see `DeltaLayout`."""
    keys, key, value = mixer.key_heads, mixer.key_dim, mixer.value_dim
    each = mixer.value_heads // keys
    group = 2 * key + 2 * each * value
    end = keys * group
    both = MatrixRef(f"{place}.in_proj_qkvz.weight", end, hidden)
    yield both, Units("kv_heads", range(0, end, group), key)
    yield both, Units("kv_heads", range(key, end, group), key)
    yield both, _grouped_values(mixer, 2 * key, value, group)
    yield both, _grouped_values(mixer, 2 * key + each * value, value, group)
    yield from _grouped_steps(mixer, place, hidden)


def _grouped_steps(mixer: DeltaRule, place: str, hidden: int) -> Iterator[tuple[MatrixRef, Units]]:
    """Yield the rows of betas and decays, which one matrix has grouped by key head."""
    each = mixer.value_heads // mixer.key_heads
    steps = MatrixRef(f"{place}.in_proj_ba.weight", 2 * mixer.value_heads, hidden)
    yield steps, _grouped_values(mixer, 0, 1, 2 * each)
    yield steps, _grouped_values(mixer, each, 1, 2 * each)


def _grouped_values(mixer: DeltaRule, first: int, size: int, group: int) -> Units:
    """Return `size` rows of each value head, from offset `first` in each group of `group` rows."""
    each = mixer.value_heads // mixer.key_heads
    starts = [g * group + first + i * size for g in range(mixer.key_heads) for i in range(each)]
    return Units("heads", starts, size)


def _up(mixer: DeltaRule, path: str, size: int) -> LinearRef:
    """Return the second, low-rank matrix, with `size` outputs per head."""
    matrix = MatrixRef(f"{path}.weight", mixer.value_heads * size, mixer.channel_rank)
    return split_outputs(matrix, "heads", size)


def _kernels(mixer: DeltaRule, place: str, separate: bool) -> Iterator[TensorRef]:
    """Yield the convolution's weights of queries, keys and values."""
    key, value = mixer.key_heads * mixer.key_dim, mixer.value_heads * mixer.value_dim
    query_units, key_units, value_units = _stacked(mixer)
    if not separate:
        for units in (query_units, key_units, value_units):
            yield TensorRef(f"{place}.conv1d.weight", (2 * key + value, 1, mixer.taps), units)
        return
    for letter in "qk":
        yield TensorRef(f"{place}.{letter}_conv1d.weight", (key, 1, mixer.taps), query_units)
    yield TensorRef(
        f"{place}.v_conv1d.weight",
        (value, 1, mixer.taps),
        run_of("heads", mixer.value_heads, mixer.value_dim),
    )
