"""The encoding for each value of `--quantize` that rounds weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import numpy as np

from tgi_trio.model.gguf.block_types import BY_NAME
from tgi_trio.shard.checkpoint.formats.gguf import FUNCTIONS
from tgi_trio.shard.checkpoint.numbers import Floats
from tgi_trio.shard.checkpoint.rounding.encoding import Encoding, Planes
from tgi_trio.shard.checkpoint.rounding.gguf_types import ENCODERS
from tgi_trio.shard.checkpoint.rounding.numbers import (
    FP4_BOTH,
    NF4,
    affine,
    float8,
    four_bits,
    of_float8,
    round_to_table,
    whole_rows,
)


def _all_inputs(inputs: int) -> int:
    return inputs


def _groups_of(*sizes: int) -> Callable[[int], int]:
    """Return a function that finds the first of some sizes that divides the inputs."""
    return lambda inputs: next((size for size in sizes if inputs % size == 0), 0)


def _gguf(name: str, instead: Encoding | None = None) -> Encoding:
    """Return the encoding of a GGUF type, whose only plane is "blocks" as in `GgufMatrix`."""
    kind = BY_NAME[name]

    def encode(values: Floats, group: int) -> Planes:
        blocks = ENCODERS[name](values.reshape(-1, group))
        return {"blocks": blocks.reshape(len(values), -1, kind.bytes)}

    def decode(planes: Mapping[str, np.ndarray]) -> Floats:
        blocks = planes["blocks"]
        return FUNCTIONS[name](blocks.reshape(-1, kind.bytes)).reshape(len(blocks), -1)

    bits = int(name[1])
    return Encoding(name, bits, _groups_of(kind.weights), encode, decode, instead=instead)


def _table(table: Floats) -> Encoding:
    encode = partial(round_to_table, table)
    return Encoding("table", 4, _groups_of(64, 32), encode, affine, {"table": table})


_WHOLE: Final = Encoding("int8", 8, _all_inputs, whole_rows, affine)

# By the values in `model/quantised/recognise.py`.
ENCODINGS: Final[Mapping[str, Encoding]] = {
    "eetq": _WHOLE,
    "bitsandbytes": _WHOLE,
    "bitsandbytes-nf4": _table(NF4),
    "bitsandbytes-fp4": _table(FP4_BOTH),
    "fp8": Encoding("e4m3", 8, _all_inputs, float8, of_float8),
    "int4": Encoding("affine", 4, _groups_of(128, 64, 32), four_bits, affine),
    "q4_0": _gguf("Q4_0"),
    "q4_1": _gguf("Q4_1"),
    "q5_0": _gguf("Q5_0"),
    "q5_1": _gguf("Q5_1"),
    "q8_0": _gguf("Q8_0"),
    "q4_k": _gguf("Q4_K", instead=_gguf("Q5_0")),  # llama.cpp's fallback
}
