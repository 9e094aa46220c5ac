"""Loads mixers and n-grams: the parts of layers that keep a state per sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from tgi_trio.model.matrices.references import TensorRef
from tgi_trio.model.matrices.roles import (
    ConvolutionRefs,
    DeltaRuleRefs,
    GateRefs,
    Mamba1Refs,
    Mamba2Refs,
    MixerRefs,
    NgramsRefs,
    RecurrentGateRefs,
)
from tgi_trio.model.specs.mixers import DeltaRule, Mamba1, Mamba2, Mixer, RecurrentGate
from tgi_trio.model.specs.ngrams import NgramsSpec
from tgi_trio.shard.torch_backend.layers.activation import activation
from tgi_trio.shard.torch_backend.layers.vocabulary import Gathering
from tgi_trio.shard.torch_backend.models.weight_loader import WeightLoader
from tgi_trio.shard.torch_backend.states.convolution import CausalConvolution
from tgi_trio.shard.torch_backend.states.delta_rule_layer import DeltaRuleLayer
from tgi_trio.shard.torch_backend.states.mamba1_layer import Mamba1Layer
from tgi_trio.shard.torch_backend.states.mamba2_layer import Mamba2Layer
from tgi_trio.shard.torch_backend.states.ngrams_layer import NgramsLayer
from tgi_trio.shard.torch_backend.states.recurrent_gate_layer import HeadGate, RecurrentGateLayer
from tgi_trio.shard.torch_backend.states.short_convolution import ShortConvolutionLayer
from tgi_trio.shard.torch_backend.states.steps import MixerLayer


def load_mixer(
    loader: WeightLoader, refs: MixerRefs, mixer: Mixer, ranks: Gathering | None
) -> MixerLayer:
    """Return this rank's part of a mixer; `ranks` None: there are no others."""
    if isinstance(refs, DeltaRuleRefs) and isinstance(mixer, DeltaRule):
        return _delta_rule(loader, refs, mixer)
    if isinstance(refs, Mamba2Refs) and isinstance(mixer, Mamba2):
        return _mamba2(loader, refs, mixer, ranks)
    if isinstance(refs, Mamba1Refs) and isinstance(mixer, Mamba1):
        return _mamba1(loader, refs, mixer, ranks)
    if isinstance(refs, RecurrentGateRefs) and isinstance(mixer, RecurrentGate):
        return _recurrent_gate(loader, refs, mixer)
    assert isinstance(refs, ConvolutionRefs)  # `layer_refs` reads the same spec
    return ShortConvolutionLayer(
        inner=loader.linear(refs.inner),
        convolution=_convolution(loader, (refs.kernel,), (refs.bias,) if refs.bias else ()),
        output=loader.linear(refs.output),
    )


def mixer_scale(mixer: Mixer | None) -> float:
    """Return by what a mixer's result is multiplied before it is added."""
    return mixer.output_multiplier if isinstance(mixer, Mamba2) else 1.0


def _convolution(
    loader: WeightLoader, kernels: Sequence[TensorRef], biases: Sequence[TensorRef] = ()
) -> CausalConvolution:
    """Return a convolution over the concatenated channels of several tensors."""
    kernel = torch.cat([loader.tensor(ref).squeeze(1) for ref in kernels])
    bias = torch.cat([loader.tensor(ref) for ref in biases]) if biases else None
    return CausalConvolution(kernel, bias)


def _delta_rule(loader: WeightLoader, refs: DeltaRuleRefs, mixer: DeltaRule) -> DeltaRuleLayer:
    rate = loader.tensor(refs.rate, torch.float32).flatten().exp()
    bias = loader.tensor(refs.decay_bias, torch.float32)
    return DeltaRuleLayer(
        mixer,
        inner=loader.linear(refs.inner),
        decay_up=loader.linear(refs.decay_up) if refs.decay_up else None,
        gate_up=loader.linear(refs.gate_up) if refs.gate_up else None,
        convolution=_convolution(loader, refs.kernels),
        rate=rate[:, None],
        decay_bias=bias.view(len(rate), -1),
        norm=loader.tensor(refs.norm, torch.float32),
        output=loader.linear(refs.output),
        invariant=loader.source.invariant,
    )


def _mamba2(
    loader: WeightLoader, refs: Mamba2Refs, mixer: Mamba2, ranks: Gathering | None
) -> Mamba2Layer:
    return Mamba2Layer(
        mixer,
        inner=loader.linear(refs.inner),
        convolution=_convolution(loader, refs.kernels, refs.biases),
        rate=-loader.tensor(refs.rate, torch.float32).exp(),
        step_bias=loader.tensor(refs.step_bias, torch.float32),
        skip=loader.tensor(refs.skip, torch.float32),
        norm=loader.tensor(refs.norm, torch.float32) if refs.norm else None,
        output=loader.linear(refs.output),
        invariant=loader.source.invariant,
        ranks=ranks,
    )


def _mamba1(
    loader: WeightLoader, refs: Mamba1Refs, mixer: Mamba1, ranks: Gathering | None
) -> Mamba1Layer:
    return Mamba1Layer(
        mixer,
        inner=loader.linear(refs.inner),
        convolution=_convolution(loader, (refs.kernel,), (refs.bias,) if refs.bias else ()),
        selection=loader.linear(refs.selection),
        norms=[loader.tensor(ref) for ref in refs.norms],
        step=loader.linear(refs.step),
        step_bias=loader.tensor(refs.step_bias, torch.float32),
        rate=-loader.tensor(refs.rate, torch.float32).exp().t().contiguous(),
        skip=loader.tensor(refs.skip, torch.float32),
        output=loader.linear(refs.output),
        invariant=loader.source.invariant,
        ranks=ranks,
    )


def _recurrent_gate(
    loader: WeightLoader, refs: RecurrentGateRefs, mixer: RecurrentGate
) -> RecurrentGateLayer:
    return RecurrentGateLayer(
        inner=loader.linear(refs.inner),
        activation=activation(mixer.activation),
        convolution=_convolution(loader, (refs.kernel,), (refs.bias,)),
        entry=_head_gate(loader, refs.entry),
        decay=_head_gate(loader, refs.decay),
        rate=functional.softplus(loader.tensor(refs.rate, torch.float32)),
        output=loader.linear(refs.output),
        invariant=loader.source.invariant,
    )


def load_ngrams(
    loader: WeightLoader, refs: NgramsRefs, ngrams: NgramsSpec, count: int, ranks: Gathering | None
) -> NgramsLayer:
    """Return a layer's n-grams for `count` hidden states of a token; `ranks` as for mixers."""
    return NgramsLayer(
        ngrams,
        table=loader.weight(refs.table),
        inner=loader.linear(refs.inner),
        query_norm=loader.stream_norm(refs.query_norm, count),
        key_norm=loader.stream_norm(refs.key_norm, count),
        kernel_norm=loader.stream_norm(refs.kernel_norm, count),
        kernel=loader.tensor(refs.kernel).squeeze(1),
        ranks=ranks,
        invariant=loader.source.invariant,
    )


def _head_gate(loader: WeightLoader, refs: GateRefs) -> HeadGate:
    return HeadGate(
        loader.tensor(refs.weight, torch.float32), loader.tensor(refs.bias, torch.float32)
    )
