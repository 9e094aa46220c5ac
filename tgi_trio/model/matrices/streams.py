"""The matrices around a layer: per-layer embeddings, several hidden states."""

from __future__ import annotations

from tgi_trio.model.matrices.references import (
    LinearPiece,
    LinearRef,
    MatrixRef,
    NormRef,
    TensorRef,
    VectorRef,
    split_outputs,
    whole_linear,
    whole_units,
)
from tgi_trio.model.matrices.roles import (
    GatesRefs,
    HyperRefs,
    LayerGatesRefs,
    LayerHyperRefs,
    LayerStreamsRefs,
    PerLayerInputRefs,
    PerLayerInputsRefs,
    StreamsRefs,
)
from tgi_trio.model.specs.decoder import DecoderSpec, HyperSpec, PerLayerInputsSpec, StreamsSpec
from tgi_trio.model.specs.gated_streams import GatedStreamsSpec


def per_layer_inputs_refs(spec: DecoderSpec, own: PerLayerInputsSpec) -> PerLayerInputsRefs:
    """Return where per-layer embeddings come from."""
    names, every = spec.names, len(spec.layers) * own.width
    table = MatrixRef(f"{names.own_table}.weight", own.rows, every)
    return PerLayerInputsRefs(
        table=split_outputs(table, "vocabulary"),
        projection=_whole(names.own_projection, every, spec.hidden_size),
        norm=_norm(spec, names.own_norm, own.width),
    )


def per_layer_input_refs(
    spec: DecoderSpec, prefix: str, own: PerLayerInputsSpec
) -> PerLayerInputRefs:
    """Return how the layer at `prefix` uses its own embedding."""
    names, hidden = spec.names, spec.hidden_size
    return PerLayerInputRefs(
        gate=_whole(prefix + names.own_gate, own.width, hidden),
        up=_whole(prefix + names.own_up, hidden, own.width),
        post_norm=_norm(spec, prefix + names.own_post_norm, hidden),
    )


def streams_refs(spec: DecoderSpec, streams: StreamsSpec) -> StreamsRefs:
    """Return the projections from one hidden state to several, and back to one."""

    def every(name: str) -> tuple[LinearRef, ...]:
        hidden, others = spec.hidden_size, range(streams.count - 1)
        return tuple(_whole(name.format(index), hidden, hidden) for index in others)

    return StreamsRefs(every(spec.names.streams_in), every(spec.names.streams_out))


def layer_streams_refs(spec: DecoderSpec, prefix: str, streams: StreamsSpec) -> LayerStreamsRefs:
    """Return how the layer at `prefix` adapts the hidden states that it does not compute."""
    hidden, count, rank = spec.hidden_size, streams.count, streams.detour_rank
    place, detour = prefix + spec.names.streams, prefix + spec.names.detour
    return LayerStreamsRefs(
        router_norm=_norm(spec, f"{place}router_norm", hidden),
        router=_whole(f"{place}modality_router", count, hidden),
        prediction=_whole(f"{place}prediction_coefs", count * count, count),
        correction=_whole(f"{place}correction_coefs", count, count),
        scale=VectorRef(f"{place}correct_output_scale", hidden),
        detour_down=_whole(f"{detour}linear_left", rank, hidden),
        detour_up=_whole(f"{detour}linear_right", hidden, rank),
        detour_norm=_norm(spec, f"{detour}post_laurel_norm", hidden),
    )


def layer_hyper_refs(spec: DecoderSpec, prefix: str, hyper: HyperSpec) -> LayerHyperRefs:
    """Return the hyper-connections of the layer at `prefix`."""
    names, weights, kinds = spec.names, 2 * hyper.count, 2
    if hyper.iterations:
        weights, kinds = weights + hyper.count * hyper.count, kinds + 1
    return LayerHyperRefs(
        attention=_hyper(spec, prefix + names.attention_streams, hyper, weights, kinds),
        mlp=_hyper(spec, prefix + names.mlp_streams, hyper, weights, kinds),
    )


def last_hyper_refs(spec: DecoderSpec, hyper: HyperSpec) -> HyperRefs:
    """Return the weights of the sum of the hidden states after the last layer."""
    return _hyper(spec, spec.names.last_streams, hyper, hyper.count, 1)


def _hyper(spec: DecoderSpec, place: str, hyper: HyperSpec, weights: int, kinds: int) -> HyperRefs:
    shape = (weights, hyper.count * spec.hidden_size)
    return HyperRefs(
        mix=TensorRef(f"{place}fn", shape, whole_units(weights)),
        base=TensorRef(f"{place}base", (weights,), whole_units(weights)),
        scale=TensorRef(f"{place}scale", (kinds,), whole_units(kinds)),
    )


def layer_gates_refs(spec: DecoderSpec, prefix: str, streams: GatedStreamsSpec) -> LayerGatesRefs:
    """Return the gates between hidden states and the layer at `prefix`."""
    names = spec.names
    return LayerGatesRefs(
        attention=_gates(spec, prefix + names.attention_streams, streams, adds=True),
        mlp=_gates(spec, prefix + names.mlp_streams, streams, adds=True),
    )


def last_gates_refs(spec: DecoderSpec, streams: GatedStreamsSpec) -> GatesRefs:
    """Return the gates between hidden states and the head."""
    return _gates(spec, spec.names.last_streams, streams, adds=False)


def _gates(spec: DecoderSpec, place: str, streams: GatedStreamsSpec, *, adds: bool) -> GatesRefs:
    """Return the gates at `place`; `adds`: what they are for adds to the hidden states."""
    wide = streams.count * spec.hidden_size
    matrices = [MatrixRef(f"{place}input_mix_weight_down.weight", streams.rank, wide)]
    if adds:
        matrices.append(MatrixRef(f"{place}block_inject_weight.weight", streams.count, wide))
    pieces = (LinearPiece(m, whole_units(m.rows), whole_units(wide)) for m in matrices)
    return GatesRefs(
        norm=_norm(spec, f"{place}hc_norm", wide),
        inner=LinearRef(tuple(pieces)),
        gates=_whole(f"{place}input_mix_weight_up", wide, streams.rank),
    )


def _whole(path: str, rows: int, columns: int) -> LinearRef:
    """Return a linear that every rank has."""
    return whole_linear(MatrixRef(f"{path}.weight", rows, columns))


def _norm(spec: DecoderSpec, path: str, size: int) -> NormRef:
    return NormRef(f"{path}.weight", "", size, spec.norm_eps)
