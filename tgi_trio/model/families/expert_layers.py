"""Mixtures of experts in the place of MLPs: in all layers, or in some."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tgi_trio.model.specs.decoder import DecoderSpec, ExpertsSpec


def set_experts(
    spec: DecoderSpec, experts: ExpertsSpec, sparse: Iterable[bool] | None = None
) -> DecoderSpec:
    """Return `spec` with experts in its layers. `sparse`: which have them; None: all.

    Raises ValueError if `sparse` is not of as many layers.
    """
    which = [True] * len(spec.layers) if sparse is None else sparse
    layers = (
        replace(layer, experts=experts) if own else layer
        for layer, own in zip(spec.layers, which, strict=True)
    )
    return replace(spec, layers=tuple(layers))
