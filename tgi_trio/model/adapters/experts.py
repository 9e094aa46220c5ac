"""Adapters of experts whose tensors are of all experts of a layer, as PEFT's `ParamWrapper` writes.

transformers 5 has one parameter with three axes for the gates and ups of all experts of a layer,
and one for their downs, whatever the checkpoint has. PEFT adapts them by `target_parameters`: the
wrapper of one parameter is `...experts`, and if both are adapted, that of the first is
`...experts.base_layer`. Which parameter it is, is not in a tensor's name; its shape says it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.adapters.config import CONFIG
from tgi_trio.model.adapters.files import Adapter, ExpertShare, ExpertsPair, Pair
from tgi_trio.model.matrices.references import LinearRef
from tgi_trio.model.specs.decoder import DecoderSpec, LayerSpec
from tgi_trio.model.wrappers import text_name

_INNER: Final = "inner"
_DOWN: Final = "down"
_FIRST: Final = ".base_layer"
# Releases of PEFT that tell parameters stored [out, in] from those stored [in, out].
_UNSURE: Final = (0, 19)
_SWAPS_FROM: Final = (0, 19, 1)
# Families whose experts transformers stores [in, out]: those of which PEFT knows it, and others.
_KNOWN_BACK: Final = ("gpt_oss",)
_UNKNOWN_BACK: Final = ("llama4_text",)


@dataclass(frozen=True, slots=True)
class WholePair:
    """An `ExpertsPair`, and what it is in its layer."""

    pair: ExpertsPair
    count: int  # of experts
    rank: int
    scale: float
    swapped: bool

    def of_expert(self, index: int, linear: LinearRef) -> tuple[Pair, ...]:
        """Return the pair of each piece of an expert's linear."""
        pair, share = self.pair, ExpertShare(index, self.count, self.swapped)
        found, first, before = [], 0, None
        for piece in linear.pieces:
            if before is not None and piece.matrix is not before:
                first += before.rows
            before = piece.matrix
            found.append(
                Pair(pair.module, pair.a, pair.b, pair.names, self.scale, share=share, first=first)
            )
        return tuple(found)


def has_own_experts(layer: LayerSpec) -> bool:
    """Return whether a layer has a mixture in place of an MLP or beside it, with matrices for each
    expert.
    """
    experts = layer.experts
    return experts is not None and not (experts.stacked or layer.later)


def place_experts(adapter: Adapter, spec: DecoderSpec) -> Mapping[tuple[int, str], WholePair]:
    """Return an adapter's pairs of all experts by layer, "inner" or "down".

    Those of layers without such experts are left out. Raises ModelLoadError for shapes that fit no
    matrix of the layer.
    """
    found: dict[tuple[int, str], WholePair] = {}
    for pair in adapter.experts.values():
        index = _find_layer(pair, spec)
        if index is None:
            continue
        kind, whole = _recognise(adapter, pair, spec, spec.layers[index])
        if (index, kind) in found:
            raise ModelLoadError(
                f"{adapter.folder} has two changes of the same matrices of experts, "
                f"{found[index, kind].pair.module} and {pair.module}"
            )
        found[index, kind] = whole
    return found


def _find_layer(pair: ExpertsPair, spec: DecoderSpec) -> int | None:
    """Return the layer that a module of all experts belongs to, if it has its own experts."""
    module = text_name(pair.module)
    for index, layer in enumerate(spec.layers):
        place = (layer.names or spec.names).layer.format(index)
        bare = place.removeprefix(spec.names.base)
        if has_own_experts(layer) and module.startswith((place, bare)):
            return index
    return None


def _recognise(
    adapter: Adapter, pair: ExpertsPair, spec: DecoderSpec, layer: LayerSpec
) -> tuple[str, WholePair]:
    """Return what a pair changes, by its shapes."""
    experts = layer.experts
    assert experts is not None  # `has_own_experts`
    hidden, width = experts.latent_width or spec.hidden_size, experts.width
    first = (2 if spec.gated else 1) * width
    kinds = {_INNER: (hidden, first), _DOWN: (width, hidden)}
    shape = pair.a.shape[1], pair.b.shape[0]
    fits = [
        (kind, swapped)
        for swapped in (False, True)
        for kind, (inputs, outputs) in kinds.items()
        if shape == ((outputs, inputs) if swapped else (inputs, outputs))
    ]
    if not fits:
        raise ModelLoadError(
            f"{pair.names[0]} and {pair.names[1]} of {adapter.folder} are {list(pair.a.shape)} and "
            f"{list(pair.b.shape)}; the model's experts map {hidden} to {first} numbers and "
            f"{width} to {hidden}"
            + (f": it is made for {base}" if (base := adapter.config.base) else "")
        )
    kind, swapped = fits[0] if len(fits) == 1 else _choose(adapter, pair, spec, fits)
    name = pair.module.removesuffix(_FIRST)
    part = "down_proj" if kind == _DOWN else "gate_up_proj" if spec.gated else "up_proj"
    rank = adapter.config.rank(f"{name}.{part}")
    if pair.a.shape[0] != rank * experts.count:
        raise ModelLoadError(
            f"{pair.names[0]} of {adapter.folder} is {list(pair.a.shape)}; {experts.count} experts "
            f"of the rank {rank} have {rank * experts.count} rows"
        )
    scale = adapter.config.scale(f"{name}.{part}")
    return kind, WholePair(pair, experts.count, rank, scale, swapped)


def _choose(
    adapter: Adapter, pair: ExpertsPair, spec: DecoderSpec, fits: Sequence[tuple[str, bool]]
) -> tuple[str, bool]:
    """Return which of several meanings a pair has whose shapes fit all of them."""
    swapped = False
    if spec.family not in _KNOWN_BACK:
        version = adapter.config.peft_version
        if not version or _UNSURE <= version < _SWAPS_FROM:
            raise ModelLoadError(
                f"{pair.names[0]} of {adapter.folder} is of a square matrix, which PEFT before "
                f"0.19.1 wrote the other way round, and {CONFIG} names no release before or after "
                "as its `peft_version`"
            )
        swapped = (version < _SWAPS_FROM) != (spec.family in _UNKNOWN_BACK)
    kinds = [kind for kind, other in fits if other == swapped]
    is_first = pair.module.endswith(_FIRST)
    return (kinds[0] if is_first else kinds[-1]), swapped
