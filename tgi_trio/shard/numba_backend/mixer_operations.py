"""The operations of what keeps a state per sequence, up to the linear layer that ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tgi_trio.model.matrices import (
    ConvolutionRefs,
    DeltaRuleRefs,
    LinearRef,
    Mamba2Refs,
    MixerRefs,
    TensorRef,
    every_unit,
)
from tgi_trio.model.mixers import DeltaRule, Mamba2, Mixer
from tgi_trio.shard.checkpoint.lookup import read_tensor
from tgi_trio.shard.checkpoint.numbers import Floats
from tgi_trio.shard.numba_backend.mixture_operations import pad_to_panel
from tgi_trio.shard.numba_backend.operation_writer import OperationWriter
from tgi_trio.shard.numba_backend.tables import (
    GROUP_NORMS,
    MIXER,
    OPENING,
    Activation,
    Buffer,
    Code,
    GroupNorm,
)
from tgi_trio.shard.numba_backend.weight_layout import LANES

_NUMBER = 4  # bytes: all states are float32


def add_mixer(writer: OperationWriter, refs: MixerRefs, mixer: Mixer, feeder: int) -> None:
    """Add a mixer behind the norm in row `feeder`; what it says is in MIXED, for its output.

    Raises ModelLoadError as the weights do.
    """
    if isinstance(mixer, Mamba2) and mixer.multipliers:
        _project_scaled(writer, refs, mixer.multipliers, feeder)
    else:
        writer.linear(refs.inner, Buffer.NORMED, Buffer.PROJECTED, feeder=feeder)
    if isinstance(refs, DeltaRuleRefs) and isinstance(mixer, DeltaRule):
        _add_delta_rule(writer, refs, mixer)
    elif isinstance(refs, Mamba2Refs) and isinstance(mixer, Mamba2):
        _add_mamba2(writer, refs, mixer)
    elif isinstance(refs, ConvolutionRefs):
        _add_convolution(writer, refs)


def _project_scaled(
    writer: OperationWriter, refs: MixerRefs, multipliers: Sequence[float], feeder: int
) -> None:
    """Add a linear layer for each part of what is projected: whole panels, but for the last."""
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


def projected_width(refs: MixerRefs) -> int:
    """Return the features of a row of PROJECTED."""
    return pad_to_panel(
        sum(piece.outputs.size * len(piece.outputs.starts) for piece in refs.inner.pieces)
    )


def mixed_width(refs: MixerRefs) -> int:
    """Return the features of a row of MIXED."""
    return refs.output.pieces[0].matrix.columns


def add_gates(
    writer: OperationWriter, source: Buffer, *, inputs: int, width: int, **fields: Any
) -> None:
    """Add OPEN; `fields`: those of OPENING, and of its operation `offset`, `weights` and `eps`."""
    facts = np.zeros((1,), OPENING)
    names = OPENING.names or ()
    for name in fields.keys() & set(names):
        facts[name] = fields.pop(name)
    writer.add(
        Code.OPEN,
        source=source,
        target=Buffer.MIXED,
        inputs=inputs,
        width=width,
        facts=writer.keep(facts),
        **fields,
    )


def _add_convolution(writer: OperationWriter, refs: ConvolutionRefs) -> None:
    facts = _convolution_facts(writer, (refs.kernel,), (refs.bias,) if refs.bias else ())
    facts["gated"] = 1
    _convolve(writer, facts, projected_width(refs))


def _add_delta_rule(writer: OperationWriter, refs: DeltaRuleRefs, mixer: DeltaRule) -> None:
    keys, heads = mixer.key_heads * mixer.key_dim, mixer.value_heads
    width, inputs = heads * mixer.value_dim, projected_width(refs)
    gate = 2 * keys + width  # its place; betas and decays follow it
    facts = _convolution_facts(writer, refs.kernels)
    _convolve(writer, facts, inputs)
    gates, gate_width, beta = Buffer.PROJECTED, inputs, gate + width
    if refs.decay_up is not None and refs.gate_up is not None:
        rank = mixer.channel_rank
        _expand(writer, refs.decay_up, gate, rank, inputs, Buffer.DECAYS)
        _expand(writer, refs.gate_up, gate + rank, rank, inputs, Buffer.QKV)
        beta, gate = gate + 2 * rank, 0
        gates, gate_width = Buffer.QKV, width
    facts = _recurrence_facts(writer, refs.rate, refs.decay_bias)
    facts["by_channel"] = mixer.channel_rank > 0
    facts["heads"], facts["sharing"] = heads, heads // mixer.key_heads
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
    """Add what makes the numbers of all heads of `rank` ones that are projected at `place`."""
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
    facts = _convolution_facts(writer, refs.kernels, refs.biases)
    facts["first"] = width  # behind the gates
    _convolve(writer, facts, inputs)
    facts = _recurrence_facts(writer, refs.rate, refs.step_bias)
    facts["heads"], facts["sharing"] = mixer.heads, mixer.heads // mixer.groups
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


def _convolution_facts(
    writer: OperationWriter, kernels: Sequence[TensorRef], biases: Sequence[TensorRef] = ()
) -> np.ndarray[Any, np.dtype[np.void]]:
    """Return the facts of a convolution over the channels of tensors, one behind the other."""
    kernel = np.concatenate([_read(writer, ref)[:, 0] for ref in kernels])
    facts = np.zeros((1,), MIXER)
    facts["channels"], facts["taps"] = kernel.shape
    by_lanes = kernel.reshape(-1, LANES, kernel.shape[1]).swapaxes(1, 2)
    facts["kernel"] = writer.keep(by_lanes)
    if biases:
        facts["bias"] = writer.keep(np.concatenate([_read(writer, ref) for ref in biases]))
    return facts


def _recurrence_facts(
    writer: OperationWriter, rate: TensorRef, bias: TensorRef
) -> np.ndarray[Any, np.dtype[np.void]]:
    facts = np.zeros((1,), MIXER)
    facts["rate"] = writer.keep(-np.exp(_read(writer, rate).reshape(-1)))
    facts["decay_bias"] = writer.keep(_read(writer, bias))
    return facts


def _convolve(
    writer: OperationWriter, facts: np.ndarray[Any, np.dtype[np.void]], inputs: int
) -> None:
    state_bytes = (facts["taps"][0] - 1) * facts["channels"][0] * _NUMBER
    _keep(writer, Code.CONVOLVE, facts, inputs, state_bytes)


def _recur(writer: OperationWriter, facts: np.ndarray[Any, np.dtype[np.void]], inputs: int) -> None:
    state_bytes = facts["heads"][0] * facts["key_dim"][0] * facts["value_dim"][0] * _NUMBER
    _keep(writer, Code.RECUR, facts, inputs, state_bytes)


def _keep(
    writer: OperationWriter,
    code: Code,
    facts: np.ndarray[Any, np.dtype[np.void]],
    inputs: int,
    state_bytes: int,
) -> None:
    writer.add(
        code,
        source=Buffer.PROJECTED,
        target=Buffer.MIXED,
        inputs=inputs,
        facts=writer.keep(facts),
        state_bytes=state_bytes,
    )


def _read(writer: OperationWriter, ref: TensorRef) -> Floats:
    return read_tensor(writer.source, ref, every_unit)
