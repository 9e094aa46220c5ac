"""The operations of recurrent states with independent channels: Mamba and RG-LRU."""

from __future__ import annotations

from typing import Final

import numpy as np

from tgi_trio.model.matrices.references import every_unit
from tgi_trio.model.matrices.roles import Mamba1Refs, MixerRefs, RecurrentGateRefs
from tgi_trio.model.specs.mixers import Mamba1, RecurrentGate
from tgi_trio.shard.checkpoint.formats.plain import PlainMatrix
from tgi_trio.shard.checkpoint.lookup import read_linear
from tgi_trio.shard.checkpoint.numbers import to_float32
from tgi_trio.shard.checkpoint.stored_matrix import Stack
from tgi_trio.shard.cpu_backend.operations.gates import gate_second_half
from tgi_trio.shard.cpu_backend.operations.mixtures import pad_to_panel
from tgi_trio.shard.cpu_backend.operations.states import (
    NUMBER,
    by_lanes,
    convolution_facts,
    convolve,
    keep_state,
    mixed_width,
    projected_width,
    read_numbers,
)
from tgi_trio.shard.cpu_backend.operations.writer import OperationWriter
from tgi_trio.shard.cpu_backend.tables import ACTIVATIONS, MIXER, Buffer, Code

_SHARPNESS: Final = 8.0  # of the decay; Griffin's constant c


def decays_width(refs: MixerRefs, mixer: object) -> int:
    """Return the features of a mixer's row of DECAYS; 0: it has none."""
    if isinstance(mixer, Mamba1):
        selected = pad_to_panel(mixer.step_rank) + 2 * mixer.state_dim
        return mixer.channels + pad_to_panel(selected)
    if isinstance(mixer, RecurrentGate):
        return 2 * mixed_width(refs)
    return 0


def add_mamba1(writer: OperationWriter, refs: Mamba1Refs, mixer: Mamba1) -> None:
    """Add a `Mamba1` after its first linear layer; the output is in MIXED, for its last.

    Raises ModelLoadError as the weights do.
    """
    channels, state = mixer.channels, mixer.state_dim
    inputs, told = projected_width(refs), decays_width(refs, mixer)
    facts = convolution_facts(writer, (refs.kernel,), (refs.bias,) if refs.bias else ())
    convolve(writer, facts, inputs)
    _pass_on(writer, Buffer.PROJECTED, channels, inputs)
    _select(writer, refs, mixer, told)
    facts = np.zeros((1,), MIXER)
    facts["channels"], facts["key_dim"] = channels, state
    facts["gate"], facts["decays_width"] = channels, told
    facts["key"] = channels + pad_to_panel(mixer.step_rank)
    facts["query"] = facts["key"] + state
    facts["rate"] = writer.keep(by_lanes(-np.exp(read_numbers(writer, refs.rate))))
    facts["decay_bias"] = writer.keep(read_numbers(writer, refs.step_bias))
    facts["skip"] = writer.keep(read_numbers(writer, refs.skip))
    keep_state(writer, Code.SCAN, facts, inputs, channels * state * NUMBER)


def _select(writer: OperationWriter, refs: Mamba1Refs, mixer: Mamba1, told: int) -> None:
    """Add what computes time steps, b and c from MIXED.

    The low-rank input of the time steps is padded with zeros to whole panels if needed. That does
    not change its norm, whose weights and epsilon are scaled for it, nor the time steps.
    """
    rank, state = mixer.step_rank, mixer.state_dim
    padded = pad_to_panel(rank)
    weights, up = (
        read_linear(writer.source, ref, every_unit) for ref in (refs.selection, refs.step)
    )
    if padded > rank:
        rows = to_float32(weights.dequantised())
        zeros = np.zeros((padded - rank, rows.shape[1]), np.float32)
        weights = Stack([PlainMatrix(np.concatenate((rows[:rank], zeros, rows[rank:])))])
        up = Stack(
            [PlainMatrix(np.pad(to_float32(up.dequantised()), ((0, 0), (0, padded - rank))))]
        )
    writer.feeder = len(writer.rows) - 1
    writer.product(weights, None, Buffer.MIXED, Buffer.DECAYS, width=told, place=mixer.channels)
    if mixer.norm != "none":
        gains = [read_numbers(writer, ref) for ref in refs.norms]
        gains = gains or [np.ones(size, np.float32) for size in (rank, state, state)]
        gains[0] = np.pad(gains[0] * np.float32((rank / padded) ** 0.5), (0, padded - rank))
        place = mixer.channels
        for gain, share in zip(gains, (rank / padded, 1.0, 1.0), strict=True):
            writer.add(
                Code.NORM_ROWS,
                target=Buffer.DECAYS,
                inputs=len(gain),
                width=told,
                offset=place,
                weights=writer.keep(gain),
                eps=mixer.norm_eps * share,
            )
            place += len(gain)
    _pass_on(writer, Buffer.DECAYS, padded, told, mixer.channels)
    writer.feeder = len(writer.rows) - 1
    writer.product(up, None, Buffer.MIXED, Buffer.DECAYS, width=told)


def add_recurrent_gate(
    writer: OperationWriter, refs: RecurrentGateRefs, mixer: RecurrentGate
) -> None:
    """Add a `RecurrentGate`, as `add_mamba1` does."""
    heads, size = mixer.heads, mixer.head_dim
    width, inputs, told = heads * size, projected_width(refs), decays_width(refs, mixer)
    facts = convolution_facts(writer, (refs.kernel,), (refs.bias,))
    facts["first"], facts["bare"] = width, 1  # after the input of the activation
    convolve(writer, facts, inputs)
    _pass_on(writer, Buffer.PROJECTED, width, inputs, width)
    feeder = len(writer.rows) - 1
    gates = (refs.entry, refs.decay)
    matrices = [read_numbers(writer, gate.weight) for gate in gates]
    biases = [read_numbers(writer, gate.bias) for gate in gates]
    for head in range(heads):
        writer.feeder = feeder
        writer.product(
            Stack([PlainMatrix(np.ascontiguousarray(matrix[head].T)) for matrix in matrices]),
            np.concatenate([bias[head] for bias in biases]),
            Buffer.MIXED,
            Buffer.DECAYS,
            width=told,
            place=2 * head * size,
            begin=head * size,
            span=width,
        )
    facts = np.zeros((1,), MIXER)
    facts["channels"], facts["first"], facts["head_dim"] = width, width, size
    facts["decays_width"] = told
    rate = np.logaddexp(np.float32(0.0), read_numbers(writer, refs.rate))
    facts["rate"] = writer.keep(np.float32(-_SHARPNESS) * rate)
    keep_state(writer, Code.BLEND, facts, inputs, width * NUMBER)
    gate_second_half(writer, inputs, width, ACTIVATIONS[mixer.activation])


def _pass_on(
    writer: OperationWriter, source: Buffer, inputs: int, span: int, offset: int = 0
) -> None:
    """Convert `inputs` of the `span` features of a row to the forms that products read."""
    writer.add(
        Code.PASS_ON, source=source, target=Buffer.MIXED, inputs=inputs, span=span, offset=offset
    )
