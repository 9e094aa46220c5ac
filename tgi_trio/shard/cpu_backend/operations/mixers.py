"""The operations of mixers with a recurrent state, up to their last linear layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tgi_trio.model.matrices.references import LinearRef, TensorRef, every_unit
from tgi_trio.model.matrices.roles import (
    ConvolutionRefs,
    DeltaRuleRefs,
    Mamba1Refs,
    Mamba2Refs,
    MixerRefs,
    RecurrentGateRefs,
)
from tgi_trio.model.specs.mixers import DeltaRule, Mamba1, Mamba2, Mixer, RecurrentGate
from tgi_trio.shard.checkpoint.lookup import read_tensor
from tgi_trio.shard.cpu_backend.operations.channels import add_mamba1, add_recurrent_gate
from tgi_trio.shard.cpu_backend.operations.gates import add_gates
from tgi_trio.shard.cpu_backend.operations.states import (
    NUMBER,
    convolution_facts,
    convolve,
    keep_state,
    projected_width,
    read_numbers,
)
from tgi_trio.shard.cpu_backend.operations.writer import OperationWriter
from tgi_trio.shard.cpu_backend.tables import (
    GROUP_NORMS,
    MIXER,
    Activation,
    Buffer,
    Code,
    GroupNorm,
)


def add_mixer(writer: OperationWriter, refs: MixerRefs, mixer: Mixer, feeder: int) -> None:
    """Add a mixer after the norm in row `feeder`; the output is in MIXED, for its last layer.

    Raises ModelLoadError as the weights do.
    """
    if isinstance(mixer, Mamba2) and mixer.multipliers:
        _project_scaled(writer, refs, mixer.multipliers, feeder)
    elif isinstance(mixer, DeltaRule) and mixer.layout == "full rank":
        _project_decays(writer, refs, feeder)
    else:
        writer.linear(refs.inner, Buffer.NORMED, Buffer.PROJECTED, feeder=feeder)
    if isinstance(refs, DeltaRuleRefs) and isinstance(mixer, DeltaRule):
        _add_delta_rule(writer, refs, mixer)
    elif isinstance(refs, Mamba2Refs) and isinstance(mixer, Mamba2):
        _add_mamba2(writer, refs, mixer)
    elif isinstance(refs, Mamba1Refs) and isinstance(mixer, Mamba1):
        add_mamba1(writer, refs, mixer)
    elif isinstance(refs, RecurrentGateRefs) and isinstance(mixer, RecurrentGate):
        add_recurrent_gate(writer, refs, mixer)
    elif isinstance(refs, ConvolutionRefs):
        _add_convolution(writer, refs)


def _project_scaled(
    writer: OperationWriter, refs: MixerRefs, multipliers: Sequence[float], feeder: int
) -> None:
    """Add a linear layer for each part of the projection, each with its own scale."""
    place, width = 0, projected_width(refs)
    for piece, scale in zip(refs.inner.pieces, multipliers, strict=True):
        writer.linear(
            LinearRef((piece,)),
            Buffer.NORMED,
            Buffer.PROJECTED,
            feeder=feeder,
            place=place,
            width=width,
            scale=scale,
        )
        place += piece.outputs.size * len(piece.outputs.starts)


def _project_decays(writer: OperationWriter, refs: MixerRefs, feeder: int) -> None:
    """Add the projection in two parts: the inputs of decays by channel, which are last, are in
    DECAYS.
    """
    *others, decays = refs.inner.pieces
    writer.linear(
        LinearRef(tuple(others)),
        Buffer.NORMED,
        Buffer.PROJECTED,
        feeder=feeder,
        width=projected_width(refs),
    )
    writer.linear(LinearRef((decays,)), Buffer.NORMED, Buffer.DECAYS, feeder=feeder)


def _add_convolution(writer: OperationWriter, refs: ConvolutionRefs) -> None:
    facts = convolution_facts(writer, (refs.kernel,), (refs.bias,) if refs.bias else ())
    facts["gated"] = 1
    convolve(writer, facts, projected_width(refs))


def _add_delta_rule(writer: OperationWriter, refs: DeltaRuleRefs, mixer: DeltaRule) -> None:
    keys, heads = mixer.key_heads * mixer.key_dim, mixer.value_heads
    width, inputs = heads * mixer.value_dim, projected_width(refs)
    gate = 2 * keys + width  # the offset of the gate; betas and decays follow it
    facts = convolution_facts(writer, refs.kernels)
    convolve(writer, facts, inputs)
    gates, gate_width, beta = Buffer.PROJECTED, inputs, gate + width
    if refs.decay_up is not None and refs.gate_up is not None:
        rank = mixer.channel_rank
        _expand(writer, refs.decay_up, gate, rank, inputs, Buffer.DECAYS)
        _expand(writer, refs.gate_up, gate + rank, rank, inputs, Buffer.QKV)
        beta, gate = gate + 2 * rank, 0
        gates, gate_width = Buffer.QKV, width
    facts = _recurrence_facts(writer, refs.rate, refs.decay_bias)
    facts["by_channel"], facts["least_decay"] = mixer.by_channel, mixer.least_decay
    facts["heads"], facts["key_heads"] = heads, mixer.key_heads
    facts["sharing"] = 1 if mixer.tiled else heads // mixer.key_heads
    facts["key_dim"], facts["value_dim"] = mixer.key_dim, mixer.value_dim
    facts["query"], facts["key"], facts["value"] = 0, keys, 2 * keys
    facts["beta"], facts["decay"] = beta, beta + heads
    facts["corrects"], facts["beta_scale"] = 1, mixer.beta_scale
    facts["most_step"] = np.inf
    _recur(writer, facts, inputs)
    norm = read_tensor(writer.source, refs.norm, every_unit)
    add_gates(
        writer,
        Buffer.PROJECTED,
        inputs=inputs,
        width=width,
        offset=2 * keys,
        weights=writer.keep(np.tile(norm, heads)),
        eps=mixer.norm_eps,
        gates=gates,
        gate_width=gate_width,
        gate_place=gate,
        gate_size=1,
        group=mixer.value_dim,
        norm=GroupNorm.BEFORE,
        activation=Activation.SILU if mixer.gate == "silu" else Activation.SIGMOID,
    )


def _expand(
    writer: OperationWriter, up: LinearRef, place: int, rank: int, inputs: int, target: Buffer
) -> None:
    """Add the second, low-rank matrix: from `rank` features at `place` to those of all heads."""
    writer.add(
        Code.PASS_ON,
        source=Buffer.PROJECTED,
        target=Buffer.MIXED,
        inputs=rank,
        span=inputs,
        offset=place,
    )
    writer.linear(up, Buffer.MIXED, target)


def _add_mamba2(writer: OperationWriter, refs: Mamba2Refs, mixer: Mamba2) -> None:
    width, shared = mixer.heads * mixer.head_dim, mixer.groups * mixer.state_dim
    inputs = projected_width(refs)
    facts = convolution_facts(writer, refs.kernels, refs.biases)
    facts["first"] = width  # after the gates
    convolve(writer, facts, inputs)
    facts = _recurrence_facts(writer, refs.rate, refs.step_bias)
    facts["heads"], facts["key_heads"] = mixer.heads, mixer.groups
    facts["sharing"] = mixer.heads // mixer.groups
    facts["key_dim"], facts["value_dim"] = mixer.state_dim, mixer.head_dim
    facts["value"], facts["key"], facts["query"] = width, 2 * width, 2 * width + shared
    facts["decay"] = 2 * width + 2 * shared
    facts["skip"] = writer.keep(read_tensor(writer.source, refs.skip, every_unit))
    facts["least_step"], facts["most_step"] = mixer.least_step, mixer.most_step
    _recur(writer, facts, inputs)
    norm = None if refs.norm is None else read_tensor(writer.source, refs.norm, every_unit)
    add_gates(
        writer,
        Buffer.PROJECTED,
        inputs=inputs,
        width=width,
        offset=width,
        weights=writer.keep(norm),
        eps=mixer.norm_eps,
        gates=Buffer.PROJECTED,
        gate_width=inputs,
        gate_size=1,
        group=width // mixer.groups,
        norm=GROUP_NORMS[mixer.norm],
        activation=Activation.SILU,
    )


def _recurrence_facts(
    writer: OperationWriter, rate: TensorRef, bias: TensorRef
) -> np.ndarray[Any, np.dtype[np.void]]:
    facts = np.zeros((1,), MIXER)
    facts["rate"] = writer.keep(-np.exp(read_numbers(writer, rate).reshape(-1)))
    facts["decay_bias"] = writer.keep(read_numbers(writer, bias))
    return facts


def _recur(writer: OperationWriter, facts: np.ndarray[Any, np.dtype[np.void]], inputs: int) -> None:
    state_bytes = facts["heads"][0] * facts["key_dim"][0] * facts["value_dim"][0] * NUMBER
    keep_state(writer, Code.RECUR, facts, inputs, state_bytes)
