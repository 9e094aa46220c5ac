"""BitNet b1.58 (Ma and others 2024, arXiv 2402.17764): weights of -1, 0 and 1 times a number.

A matrix has one such number. Quantised offline its weights are in the file, four to a byte, or as
plain numbers, which transformers writes as well. Online they are made of trained numbers as these
are loaded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.matrices.references import MatrixRef
from tgi_trio.model.quantised.layout import FLOATS, ONE, Headers, Part, split_name

CODES_OF_BYTE: Final = 4
TRAINED: Final = "trained"  # the role of numbers that are rounded as they are loaded
_HEAD: Final = ("lm_head",)  # what transformers leaves as it is, unless the description has a list
_LINEARS: Final = ("bitlinear", "autobitlinear")
_MODES: Final = ("offline", "online")


@dataclass(frozen=True, slots=True)
class BitnetLayout:
    """weight = code * scale, or code / scale if it `divides`."""

    divides: bool
    online: bool
    unrounded: tuple[str, ...]  # patterns of modules that are plain numbers, as in transformers

    name = "bitnet"

    def parts(self, matrix: MatrixRef, tensors: Headers) -> Sequence[Part]:
        module, weight = split_name(matrix.name), tensors.get(matrix.name)
        if module is None or weight is None:
            return ()
        shape, packed = (matrix.rows, matrix.columns), weight.dtype == "U8"
        scale = Part("scales", f"{module}.weight_scale", FLOATS, ONE)
        if packed and (matrix.rows % CODES_OF_BYTE or matrix.transposed):
            raise ModelLoadError(
                f"{matrix.name!r} of {matrix.rows} x {matrix.columns} cannot be stored as BitNet's "
                f"bytes: outputs come by {CODES_OF_BYTE}, and rows are outputs."
            )
        if packed:
            rows = matrix.rows // CODES_OF_BYTE
            return Part("codes", matrix.name, ("U8",), ((rows, matrix.columns),)), scale
        if matrix.transposed:
            return ()
        if scale.name in tensors:
            return Part("codes", matrix.name, FLOATS, (shape,)), scale
        if self.online and self._rounds(module):
            return (Part(TRAINED, matrix.name, FLOATS, (shape,)),)
        return ()

    def _rounds(self, module: str) -> bool:
        """Return whether a module is a linear that is rounded: in a layer, or the head."""
        if not re.search(r"\.\d+\.", module) and module not in _HEAD:
            return False
        return not any(
            re.match(rf"(?:{each})(?:(?<=\.)|(?=\.|$))", module) or module.endswith(each)
            for each in self.unrounded
        )


def read_bitnet_layout(where: str, quant_config: Mapping[str, Any]) -> BitnetLayout:
    """Return the layout from a description; raises ModelLoadError for unsupported variants."""
    kind, mode = (
        quant_config.get("linear_class", _LINEARS[0]),
        quant_config.get("quantization_mode", _MODES[0]),
    )
    if kind not in _LINEARS or mode not in _MODES:
        raise ModelLoadError(
            f"{where} says linear_class {kind!r} and quantization_mode {mode!r}; read are "
            f"{' and '.join(_LINEARS)}, {' and '.join(_MODES)}."
        )
    if quant_config.get("use_rms_norm"):
        raise ModelLoadError(
            f"{where} says use_rms_norm: a norm in every linear, which nothing here computes."
        )
    patterns = quant_config.get("modules_to_not_convert")
    unrounded = _HEAD if patterns is None else patterns
    if not isinstance(unrounded, list | tuple) or not all(isinstance(p, str) for p in unrounded):
        raise ModelLoadError(f"{where} says modules_to_not_convert {patterns!r}, no list of names.")
    return BitnetLayout(
        divides=kind == "bitlinear",
        online=mode == "online" and kind == "autobitlinear",
        unrounded=tuple(unrounded),
    )
