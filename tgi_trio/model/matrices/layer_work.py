"""The number of weights by which a token is multiplied in each layer, which determines its time.

Pipeline stages are cut by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from tgi_trio.model.matrices.decoder import layer_refs, outer_refs
from tgi_trio.model.matrices.references import MatrixRef
from tgi_trio.model.matrices.roles import ExpertsRefs
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.stages import Run, Stage


def find_run(spec: DecoderSpec, stage: Stage | None) -> Run:
    """Return what one pipeline stage computes of a model; `stage` None: everything."""
    if stage is None:
        return Run(range(len(spec.layers)))
    layers = stage.layers(layer_work(spec), head_work(spec))
    return Run(layers, is_first=stage.is_first, is_last=stage.is_last)


def layer_work(spec: DecoderSpec) -> list[int]:
    """Return the work of each layer; of experts, that of those chosen for a token."""
    return [_work(spec, index) for index in range(len(spec.layers))]


def head_work(spec: DecoderSpec) -> int:
    """Return the work of the head."""
    return _count(_matrices(outer_refs(spec).head))


def _work(spec: DecoderSpec, index: int) -> int:
    layer, experts = layer_refs(spec, index), spec.layers[index].experts
    work = _count(_matrices(layer))
    if experts is None:
        return work
    beside = None if layer.beside is None else layer.beside.experts
    mixtures = (layer.mlp, beside, layer.later)
    routed = [part.experts for part in mixtures if isinstance(part, ExpertsRefs)]
    each = _count(_matrices(tuple(routed)))
    return work - each + each * experts.per_token // experts.count


def _count(matrices: Iterator[MatrixRef]) -> int:
    """Return the number of weights in matrices; matrices that several parts share count once."""
    return sum({each.name: each.rows * each.columns for each in matrices}.values())


def _matrices(part: Any) -> Iterator[MatrixRef]:
    """Yield the matrices in a part of a spec, at any depth."""
    if isinstance(part, MatrixRef):
        yield part
    elif isinstance(part, tuple):
        for each in part:
            yield from _matrices(each)
    elif is_dataclass(part):
        for field in fields(part):
            yield from _matrices(getattr(part, field.name))
