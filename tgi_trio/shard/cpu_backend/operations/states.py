"""The common part of all mixers' operations: widths of rows, convolutions, slots of states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tgi_trio.model.matrices.references import TensorRef, every_unit
from tgi_trio.model.matrices.roles import MixerRefs
from tgi_trio.shard.checkpoint.lookup import read_tensor
from tgi_trio.shard.checkpoint.numbers import Floats
from tgi_trio.shard.cpu_backend.operations.mixtures import pad_to_panel
from tgi_trio.shard.cpu_backend.operations.writer import OperationWriter
from tgi_trio.shard.cpu_backend.tables import MIXER, Buffer, Code
from tgi_trio.shard.cpu_backend.weight_layout import LANES

NUMBER = 4  # bytes: all states are float32
Facts = np.ndarray[Any, np.dtype[np.void]]  # a MIXER record


def projected_width(refs: MixerRefs) -> int:
    """Return the features of a row of PROJECTED."""
    return pad_to_panel(
        sum(piece.outputs.size * len(piece.outputs.starts) for piece in refs.inner.pieces)
    )


def mixed_width(refs: MixerRefs) -> int:
    """Return the features of a row of MIXED."""
    return refs.output.pieces[0].matrix.columns


def convolution_facts(
    writer: OperationWriter, kernels: Sequence[TensorRef], biases: Sequence[TensorRef] = ()
) -> Facts:
    """Return the record of a convolution over the channels of several tensors, in their order."""
    kernel = np.concatenate([read_numbers(writer, ref)[:, 0] for ref in kernels])
    facts = np.zeros((1,), MIXER)
    facts["channels"], facts["taps"] = kernel.shape
    facts["kernel"] = writer.keep(by_lanes(kernel))
    if biases:
        facts["bias"] = writer.keep(np.concatenate([read_numbers(writer, ref) for ref in biases]))
    return facts


def by_lanes(numbers: Floats) -> Floats:
    """Return numbers by channel, [channels, n], as [channels / 16, n, 16]."""
    return numbers.reshape(-1, LANES, numbers.shape[1]).swapaxes(1, 2)


def convolve(writer: OperationWriter, facts: Facts, inputs: int) -> None:
    """Add a convolution of rows of `inputs` features, in place."""
    state_bytes = (facts["taps"][0] - 1) * facts["channels"][0] * NUMBER
    keep_state(writer, Code.CONVOLVE, facts, inputs, state_bytes)


def keep_state(
    writer: OperationWriter,
    code: Code,
    facts: Facts,
    inputs: int,
    state_bytes: int,
) -> None:
    """Add an operation with a state of so many bytes per sequence, on rows of `inputs` features."""
    writer.add(
        code,
        source=Buffer.PROJECTED,
        target=Buffer.MIXED,
        inputs=inputs,
        facts=writer.keep(facts),
        state_bytes=state_bytes,
    )


def read_numbers(writer: OperationWriter, ref: TensorRef) -> Floats:
    """Return a small tensor as a whole."""
    return read_tensor(writer.source, ref, every_unit)
