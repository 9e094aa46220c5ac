"""Loads what a layer has that keeps a state per sequence."""

from __future__ import annotations

from tgi_trio.model.matrices import MixerRefs
from tgi_trio.model.mixers import Mixer
from tgi_trio.shard.torch_backend.models.weight_loader import WeightLoader
from tgi_trio.shard.torch_backend.states.convolution import CausalConvolution
from tgi_trio.shard.torch_backend.states.short_convolution import ShortConvolutionLayer
from tgi_trio.shard.torch_backend.states.steps import MixerLayer


def load_mixer(loader: WeightLoader, refs: MixerRefs, mixer: Mixer) -> MixerLayer:
    """Return this rank's part of a mixer."""
    return ShortConvolutionLayer(
        inner=loader.linear(refs.inner),
        convolution=CausalConvolution(
            loader.tensor(refs.kernel).squeeze(1), loader.tensor(refs.bias) if refs.bias else None
        ),
        output=loader.linear(refs.output),
    )
