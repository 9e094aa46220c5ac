"""bitsandbytes: 8 bits with a scale per output (LLM.int8), or 4 bits with a table (NF4, FP4)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.matrices.references import MatrixRef
from tgi_trio.model.quantised.layout import Headers, Part, read_count, split_name
from tgi_trio.whole_files import parse_json

Kind = Literal["int8", "nf4", "fp4"]

_WORDS: Final[Mapping[Kind, str]] = {
    "int8": "bitsandbytes",
    "nf4": "bitsandbytes-nf4",
    "fp4": "bitsandbytes-fp4",
}
_LARGEST_STATE = 1 << 12  # bytes of JSON


@dataclass(frozen=True, slots=True)
class BlockState:
    """How a 4-bit matrix is divided, row after row, into blocks with a scale each."""

    size: int  # weights of a block: an even number
    nested_size: int  # scales that share a nested scale; 0: scales are not quantised
    offset: float  # added to quantised scales

    def block_count(self, weights: int) -> int:
        """Return the number of blocks."""
        return math.ceil(weights / self.size)


@dataclass(frozen=True, slots=True)
class BitsandbytesLayout:
    """weight = scale * code / 127, or scale * table[code]."""

    kind: Kind

    @property
    def name(self) -> str:
        return _WORDS[self.kind]

    def parts(self, matrix: MatrixRef, tensors: Headers) -> Sequence[Part]:
        weight = tensors.get(matrix.name)
        module, state = split_name(matrix.name), state_name(matrix.name, self.kind)
        is_int8 = self.kind == "int8" and weight is not None and weight.dtype == "I8"
        if module is None or not (is_int8 or state in tensors):
            return ()
        if matrix.transposed:
            raise ModelLoadError(
                f"{matrix.name!r} is stored [inputs, outputs], as bitsandbytes is not known to do."
            )
        if is_int8:
            return (
                Part("codes", matrix.name, ("I8",), ((matrix.rows, matrix.columns),)),
                Part("scales", f"{module}.SCB", ("F32",), ((matrix.rows,),)),
                Part("format", f"{module}.weight_format", ("U8",), ((), (1,)), needed=False),
            )
        return _in_blocks(matrix, state, tensors)


def _in_blocks(matrix: MatrixRef, state: str, tensors: Headers) -> tuple[Part, ...]:
    count = matrix.rows * matrix.columns
    stored = tensors[state]
    with stored.file.open("rb") as file:
        file.seek(stored.first)
        quant_config = file.read(min(stored.end - stored.first, _LARGEST_STATE))
    described = parse_state(quant_config, state, stored.file, (matrix.rows, matrix.columns))
    blocks = described.block_count(count)
    parts = (
        Part("codes", matrix.name, ("U8",), ((math.ceil(count / 2), 1),)),
        Part("table", f"{matrix.name}.quant_map", ("F32",), ((16,),)),
        Part("state", state, ("U8",), (stored.shape,)),
    )
    if not described.nested_size:
        return (*parts, Part("scales", f"{matrix.name}.absmax", ("F32",), ((blocks,),)))
    nested = math.ceil(blocks / described.nested_size)
    return (
        *parts,
        Part("scales", f"{matrix.name}.absmax", ("U8",), ((blocks,),)),
        Part("nested scales", f"{matrix.name}.nested_absmax", ("F32",), ((nested,),)),
        Part("nested table", f"{matrix.name}.nested_quant_map", ("F32",), ((256,),)),
    )


def state_name(matrix: str, kind: Kind) -> str:
    """Return the name of the tensor that describes a 4-bit matrix."""
    return f"{matrix}.quant_state.bitsandbytes__{kind}"


def parse_state(content: bytes, name: str, file: Path, shape: tuple[int, int]) -> BlockState:
    """Return the state in a JSON tensor, for a matrix of this shape; raises ModelLoadError."""
    where = f"Tensor {name!r} in {file}"
    try:
        state = parse_json(content)
    except ValueError as error:
        raise ModelLoadError(f"{where} cannot be read as JSON: {error}") from error
    if not isinstance(state, dict):
        raise ModelLoadError(f"{where} holds no JSON object.")
    if state.get("shape") != list(shape):
        raise ModelLoadError(
            f"{where} says that its matrix has shape {state.get('shape')}, but config.json asks "
            f"for {list(shape)}."
        )
    size = read_count(where, state, "blocksize")
    nested, offset = (
        read_count(where, state, "nested_blocksize", 0),
        state.get("nested_offset", 0.0),
    )
    if size < 2 or size % 2 or nested < 0:
        raise ModelLoadError(f"{where} says blocks of {size} weights and of {nested} scales.")
    if not isinstance(offset, int | float) or not math.isfinite(offset):
        raise ModelLoadError(f"{where} says nested_offset {offset!r}, which is no number.")
    return BlockState(size, nested, float(offset))


def read_bitsandbytes_layout(where: str, quant_config: Mapping[str, Any]) -> BitsandbytesLayout:
    """Return the layout from bitsandbytes' description; raises ModelLoadError for unknown kinds."""
    if quant_config.get("load_in_8bit") or quant_config.get("_load_in_8bit"):
        return BitsandbytesLayout("int8")
    kind = quant_config.get("bnb_4bit_quant_type", "fp4")
    if not (quant_config.get("load_in_4bit") or quant_config.get("_load_in_4bit")) or kind not in (
        "nf4",
        "fp4",
    ):
        raise ModelLoadError(
            f"{where} says bitsandbytes with {kind!r}; read are load_in_8bit, and load_in_4bit "
            "with nf4 or fp4."
        )
    return BitsandbytesLayout("nf4" if kind == "nf4" else "fp4")
