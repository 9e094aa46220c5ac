"""The matrices of a layer's feed-forward part: a dense MLP, or experts."""

from __future__ import annotations

from dataclasses import replace

from tgi_trio.model.matrices.references import (
    LinearPiece,
    LinearRef,
    MatrixRef,
    NormRef,
    TensorRef,
    VectorRef,
    run_of,
    split_inputs,
    split_outputs,
    stack_matrices,
    whole_linear,
    whole_units,
)
from tgi_trio.model.matrices.roles import BesideRefs, ExpertsRefs, MlpRefs
from tgi_trio.model.specs.decoder import DecoderSpec, ExpertsSpec, NormKind

_SHARED_EXPERT = ("gate_proj", "up_proj", "down_proj")  # in every family that has one
_XIELU = ("alpha_p", "alpha_n", "beta", "eps")


def layer_matrix(
    spec: DecoderSpec, path: str, rows: int, columns: int, *, bias: bool = False
) -> MatrixRef:
    """Return a matrix of a layer, stored as in the family."""
    name = f"{path}.bias" if bias else ""
    return MatrixRef(f"{path}.weight", rows, columns, name, spec.transposed)


def norm_ref(
    spec: DecoderSpec,
    prefix: str,
    name: str,
    size: int,
    eps: float = 0.0,
    kind: NormKind | None = None,
) -> NormRef | None:
    """Return a norm; `eps` 0, `kind` None: the family's."""
    if not name:
        return None
    weight = f"{prefix}{name}.weight" if spec.norm_weight else ""
    bias = f"{prefix}{name}.bias" if spec.norm_bias else ""
    return NormRef(weight, bias, size, eps or spec.norm_eps, kind)


def dense_mlp_refs(spec: DecoderSpec, prefix: str, width: int) -> MlpRefs:
    """Return the dense MLP of the layer at `prefix`, with `width` inner features."""
    names, hidden, biased = spec.names, spec.hidden_size, spec.mlp_bias
    columns = run_of("mlp", width)
    if names.gate_up:
        both = layer_matrix(spec, prefix + names.gate_up, 2 * width, hidden, bias=biased)
        inner = _halves(both, width)
    else:
        parts = [names.gate, names.up] if spec.gated else [names.up]
        matrices = [layer_matrix(spec, prefix + part, width, hidden, bias=biased) for part in parts]
        inner = stack_matrices(matrices, columns)
    down = layer_matrix(spec, prefix + names.down, hidden, width, bias=biased)
    learned: tuple[VectorRef, ...] = ()
    if names.activation:
        place = prefix + names.activation
        learned = tuple(VectorRef(f"{place}.{name}", 1) for name in _XIELU)
    return MlpRefs(
        inner,
        split_inputs(down, columns),
        spec.gated,
        learned=learned,
        inner_norm=norm_ref(spec, prefix, names.mlp_inner_norm, width),
    )


def experts_refs(spec: DecoderSpec, prefix: str, experts: ExpertsSpec) -> ExpertsRefs:
    """Return the mixture of experts of the layer at `prefix`."""
    names, hidden, latent = spec.names, spec.hidden_size, experts.latent_width
    shared = shared_router = None
    if experts.shared_width:
        shared = _shared_expert(spec, prefix, experts.shared_width)
        if names.shared_router:
            matrix = MatrixRef(f"{prefix}{names.shared_router}.weight", 1, hidden)
            shared_router = whole_linear(matrix)
    choice_bias = "" if experts.by_token else names.choice_bias
    table = None
    if experts.by_token:
        shape = (spec.vocab_size, experts.per_token)
        whole = whole_units(spec.vocab_size)
        table = TensorRef(prefix + names.expert_table, shape, whole, integers=True)
    every = experts.count + experts.idle
    router = layer_matrix(spec, prefix + names.router, every, hidden, bias=experts.biased)
    return ExpertsRefs(
        router=whole_linear(router),
        choice_bias=VectorRef(prefix + choice_bias, every) if choice_bias else None,
        table=table,
        experts=tuple(
            _routed_expert(spec, prefix + names.experts, experts, index)
            for index in range(experts.count)
        ),
        shared=shared,
        shared_router=shared_router,
        entry=_whole(spec, prefix + names.expert_entry, latent, hidden) if latent else None,
        exit=_whole(spec, prefix + names.expert_exit, hidden, latent) if latent else None,
    )


def _whole(spec: DecoderSpec, path: str, rows: int, columns: int) -> LinearRef:
    return whole_linear(layer_matrix(spec, path, rows, columns))


def _routed_expert(spec: DecoderSpec, place: str, experts: ExpertsSpec, index: int) -> MlpRefs:
    """Return expert number `index` at `place`, in which "{}" may replace the number."""
    names = spec.names
    own = (names.expert_gate, names.expert_up, names.expert_down)
    if experts.stacked:
        return _stacked_expert(spec, place, own, experts, index)
    if names.expert_gate_up:
        return _fused_expert(spec, place.format(index), experts)
    if experts.latent_width:
        spec = replace(spec, hidden_size=experts.latent_width)
    return _expert(spec, place.format(index), own, experts.width, biased=experts.biased)


def _shared_expert(spec: DecoderSpec, prefix: str, width: int) -> MlpRefs:
    """Return the shared expert, which is in place of a dense MLP or has its own place."""
    if not spec.names.shared_expert:
        return dense_mlp_refs(spec, prefix, spec.mlp_width)
    gate, up, down = _SHARED_EXPERT
    place = prefix + spec.names.shared_expert
    if whole := spec.names.shared_gate_up:
        both = layer_matrix(spec, place + whole, 2 * width, spec.hidden_size)
        outer = layer_matrix(spec, place + down, spec.hidden_size, width)
        return MlpRefs(_halves(both, width), split_inputs(outer, run_of("mlp", width)), gated=True)
    own = (gate if spec.gated else "", up, down)
    return _expert(spec, place, own, width)


def _expert(
    spec: DecoderSpec, place: str, names: tuple[str, str, str], width: int, *, biased: bool = False
) -> MlpRefs:
    """Return the expert at `place` with gate (if it has one), up and down, by their `names`."""
    hidden, columns = spec.hidden_size, run_of("mlp", width)
    inner = [
        layer_matrix(spec, place + name, width, hidden, bias=biased) for name in names[:2] if name
    ]
    down = layer_matrix(spec, place + names[2], hidden, width, bias=biased)
    gated = len(inner) == 2
    return MlpRefs(stack_matrices(inner, columns), split_inputs(down, columns), gated)


def _fused_expert(spec: DecoderSpec, place: str, experts: ExpertsSpec) -> MlpRefs:
    """Return the expert at `place`, whose gate and up are one matrix, see `GateUpLayout`."""
    names, hidden, width, lies = spec.names, spec.hidden_size, experts.width, experts.gate_up
    gate_up, down = place + names.expert_gate_up, place + names.expert_down
    biases = (f"{gate_up}_bias", f"{down}_bias") if experts.biased else ("", "")
    inner = MatrixRef(gate_up, 2 * width, hidden, biases[0], transposed=lies != "rows")
    outer = MatrixRef(down, hidden, width, biases[1], transposed=lies != "rows")
    columns = run_of("mlp", width)
    rows = split_outputs(inner, "mlp", 2) if lies == "turns" else _halves(inner, width)
    return MlpRefs(rows, split_inputs(outer, columns), gated=True, paired=lies == "turns")


def _halves(both: MatrixRef, width: int) -> LinearRef:
    """Return the rows of a matrix that has `width` gates, then as many ups."""
    halves = (run_of("mlp", width), run_of("mlp", width, first=width))
    inputs = whole_units(both.columns)
    return LinearRef(tuple(LinearPiece(both, half, inputs) for half in halves))


def _stacked_expert(
    spec: DecoderSpec, place: str, names: tuple[str, str, str], experts: ExpertsSpec, index: int
) -> MlpRefs:
    """Return one expert from three tensors [experts * width, hidden] that contain all of them."""
    rows, hidden = experts.count * experts.width, spec.hidden_size
    columns = run_of("mlp", experts.width, first=index * experts.width)
    inner = [MatrixRef(place + name, rows, hidden) for name in names[:2]]
    down = MatrixRef(place + names[2], hidden, rows, transposed=True)
    return MlpRefs(stack_matrices(inner, columns), split_inputs(down, columns), gated=True)


def beside_refs(spec: DecoderSpec, prefix: str, experts: ExpertsSpec) -> BesideRefs:
    """Return the mixture of experts beside the dense MLP of the layer at `prefix`."""
    names, hidden = spec.names, spec.hidden_size

    def norm(name: str) -> NormRef:
        return NormRef(f"{prefix}{name}.weight", "", hidden, spec.norm_eps)

    return BesideRefs(
        norm=norm(names.beside_norm),
        experts=experts_refs(spec, prefix, experts),
        router_norm=NormRef(prefix + names.router_gain, "", hidden, spec.norm_eps),
        expert_scale=VectorRef(prefix + names.expert_scale, experts.count),
        dense_post_norm=norm(names.dense_post_norm),
        post_norm=norm(names.beside_post_norm),
    )
