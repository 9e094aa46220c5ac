"""Which assistants of Gemma 4 the CPU kernels can serve, beside which models. No compiler here."""

from __future__ import annotations

from typing import Final

from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.speculators.assistant import AssistantSpec
from tgi_trio.shard.cpu_backend.head_order import needs_order
from tgi_trio.shard.cpu_backend.operations.padded_heads import is_padded
from tgi_trio.shard.cpu_backend.unsupported import UnsupportedError
from tgi_trio.shard.cpu_backend.weight_layout import PANEL

ACTIVATION: Final = "gelu_pytorch_tanh"


def refuse_unfit(spec: AssistantSpec, base: DecoderSpec, *, eight_bits: bool) -> None:
    """Raise UnsupportedError for an assistant that cannot be computed beside a model.

    `eight_bits`: the model's K and V are of 8 bits. Raises what `AssistantSpec.reading` does.
    """
    decoder = spec.reading(base)
    matrices = [piece.matrix for ref in spec.linears.values() for piece in ref.pieces]
    read = [base.layers[own.reads_layer] for own in decoder.layers if own.reads_layer is not None]
    turning = [layer.rotary for layer in (*decoder.layers, *read)]
    reasons = {
        "an assistant with biases": decoder.qkv_bias or decoder.output_bias,
        f"an assistant with activation {decoder.activation!r}": decoder.activation != ACTIVATION,
        "an assistant that reads keys and values of 8 bits": eight_bits,
        f"an assistant with features in no multiples of {PANEL}": any(
            matrix.columns % PANEL for matrix in matrices
        ),
        "an assistant that reads keys in another order": any(map(needs_order, turning))
        or any(is_padded(base, layer) for layer in read),
    }
    if (reason := next((text for text, true in reasons.items() if true), None)) is not None:
        raise UnsupportedError(reason)
