"""compressed-tensors, as written by llm-compressor: integers, packed or not, FP8 and FP4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.matrices.references import MatrixRef
from tgi_trio.model.quantised import mxfp4_layout, mxfp8_layout, nvfp4_layout
from tgi_trio.model.quantised.fp8_layout import E4M3
from tgi_trio.model.quantised.layout import (
    EXPONENT_DTYPES,
    FLOATS,
    ONE,
    Headers,
    Part,
    count_groups,
    count_words,
    read_count,
    read_shape,
    scale_shapes,
    split_name,
)

_STRATEGIES: Final = ("tensor", "channel", "group", "block")
_NVFP4, _MXFP4, _MXFP8 = "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"
# The type of each format's numbers, and their possible bits.
_FORMATS: Final[Mapping[str, tuple[str, tuple[int, ...]]]] = {
    "pack-quantized": ("int", (4, 8)),
    "int-quantized": ("int", (8,)),
    "float-quantized": ("float", (8,)),
    _NVFP4: ("float", (4,)),
    _MXFP4: ("float", (4,)),
    _MXFP8: ("float", (8,)),
}
# Formats with 8-bit scales: the only strategy and the only size of a group.
_SMALL_SCALES: Final[Mapping[str, tuple[str, int]]] = {
    _NVFP4: ("tensor_group", nvfp4_layout.GROUP),
    _MXFP4: ("group", mxfp4_layout.GROUP),
    _MXFP8: ("group", mxfp8_layout.GROUP),
}
# other things that may have been done to weights
_ELSEWHERE: Final = ("sparsity_config", "transform_config")


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one group of a model's matrices is stored."""

    form: str  # "pack-quantized"
    bits: int
    block: tuple[int, int]  # outputs and inputs that share a scale; -1: all


@dataclass(frozen=True, slots=True)
class CompressedLayout:
    """weight = scale * (code - zero), or scale * number; there are groups of matrices.

    A matrix's tensors show its group, since there is only one for each form.
    """

    schemes: Mapping[str, Scheme]  # by form

    name = "compressed-tensors"

    def parts(self, matrix: MatrixRef, tensors: Headers) -> Sequence[Part]:
        module, weight = split_name(matrix.name), tensors.get(matrix.name)
        if module is None:
            return ()
        packed = tensors.get(f"{module}.weight_packed")
        if packed is not None and (packed.dtype == "U8" or "pack-quantized" not in self.schemes):
            return self._packed_floats(module, matrix, tensors)
        if packed is not None:
            scheme = self._scheme(matrix, "pack-quantized")
            return _packed(module, matrix, scheme)
        if weight is None or weight.dtype not in ("I8", E4M3):
            return ()
        scales = tensors.get(f"{module}.weight_scale")
        if scales is not None and scales.dtype in EXPONENT_DTYPES:
            self._scheme(matrix, _MXFP8)
            return mxfp8_layout.mxfp8_parts(matrix, matrix.name, f"{module}.weight_scale")
        scheme = self._scheme(
            matrix, "int-quantized" if weight.dtype == "I8" else "float-quantized"
        )
        shapes = scale_shapes(matrix, scheme.block)
        parts = [
            Part("codes", matrix.name, (weight.dtype,), ((matrix.rows, matrix.columns),)),
            Part("scales", f"{module}.weight_scale", FLOATS, shapes),
            # Of activations, which are not quantised that way here.
            Part("inputs", f"{module}.input_scale", FLOATS, ONE, False),
            Part("input zeros", f"{module}.input_zero_point", ("I8",), ONE, False),
        ]
        if weight.dtype == "I8":
            parts.append(Part("zeros", f"{module}.weight_zero_point", ("I8",), shapes, False))
        return parts

    def _packed_floats(self, module: str, matrix: MatrixRef, tensors: Headers) -> tuple[Part, ...]:
        codes, scales = f"{module}.weight_packed", f"{module}.weight_scale"
        factor, found = f"{module}.weight_global_scale", tensors.get(scales)
        form = _MXFP4 if found is not None and found.dtype in EXPONENT_DTYPES else _NVFP4
        self._scheme(matrix, form)
        if form == _NVFP4:
            parts = nvfp4_layout.nvfp4_parts(matrix, codes, scales, factor)
        else:
            parts = mxfp4_layout.mxfp4_parts(matrix, codes, scales)
        # Of activations, which are not quantised that way here.
        inputs = f"{module}.input_global_scale"
        return (*parts, Part("inputs", inputs, FLOATS, ONE, needed=False))

    def _scheme(self, matrix: MatrixRef, form: str) -> Scheme:
        if form not in self.schemes or matrix.transposed:
            raise ModelLoadError(
                f"{matrix.name!r} is stored in the form {form}, of which config.json says nothing."
            )
        return self.schemes[form]


def _packed(module: str, matrix: MatrixRef, scheme: Scheme) -> tuple[Part, ...]:
    rows, columns, bits = matrix.rows, matrix.columns, scheme.bits
    if scheme.block[0] != 1:  # zero points are packed along the outputs, so each output has its own
        raise ModelLoadError(
            f"{matrix.name!r} is packed with scales that several outputs share, as none are read."
        )
    zeros = (count_words(rows, bits), count_groups(matrix, scheme.block[1]))
    return (
        Part("codes", f"{module}.weight_packed", ("I32",), ((rows, count_words(columns, bits)),)),
        Part("shape", f"{module}.weight_shape", ("I64", "I32"), ((2,),)),
        Part("scales", f"{module}.weight_scale", FLOATS, scale_shapes(matrix, scheme.block)),
        Part("zeros", f"{module}.weight_zero_point", ("I32",), (zeros,), needed=False),
        Part("groups", f"{module}.weight_g_idx", ("I32",), ((columns,),), needed=False),
    )


def read_compressed_layout(where: str, quant_config: Mapping[str, Any]) -> CompressedLayout:
    """Return the layout from a description's groups; raises ModelLoadError for unsupported ones."""
    status = quant_config.get("quantization_status") or "compressed"
    if status != "compressed":
        raise ModelLoadError(f"{where} says that weights are {status!r}; read are compressed ones.")
    for key in _ELSEWHERE:
        other = quant_config.get(key)
        if other and other != {"format": "dense"}:
            raise ModelLoadError(f"{where} has a {key}, which nothing here reads.")
    groups = quant_config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ModelLoadError(f"{where} has no config_groups, which say how weights are stored.")
    schemes: dict[str, Scheme] = {}
    for group in groups.values():
        scheme = _read_scheme(where, group, quant_config.get("format"))
        if schemes.setdefault(scheme.form, scheme) != scheme:
            raise ModelLoadError(
                f"{where} has two groups of the form {scheme.form} that differ; one of each is "
                "read."
            )
    return CompressedLayout(schemes)


def _read_scheme(where: str, group: Any, default: Any) -> Scheme:
    """Return how a group of matrices is stored."""
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(weights, dict):
        raise ModelLoadError(f"{where} has a group in config_groups that says nothing of weights.")
    form = group.get("format") or default
    bits, kind = read_count(where, weights, "num_bits"), weights.get("type", "int")
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if form == "naive-quantized":
        form = "int-quantized" if kind == "int" else "float-quantized"
    known = isinstance(form, str) and form in _FORMATS
    if not known or strategy not in _strategies(form) or (kind, bits) not in _held(form):
        raise ModelLoadError(
            f"{where} says {form} with {kind} of {bits} bits by {strategy}; read are "
            f"{', '.join(_FORMATS)}, of 4 or 8 bits, by {', '.join(_STRATEGIES)}, of NVFP4 by "
            "tensor_group."
        )
    block = _read_block(where, weights, strategy)
    if form in _SMALL_SCALES and block[1] != _SMALL_SCALES[form][1]:
        raise ModelLoadError(
            f"{where} says {form} in groups of {block[1]}; {_SMALL_SCALES[form][1]} are read."
        )
    return Scheme(form, bits, block)


def _strategies(form: str) -> tuple[str, ...]:
    """Return the strategies, by which scales are shared, of a format."""
    return (_SMALL_SCALES[form][0],) if form in _SMALL_SCALES else _STRATEGIES


def _held(form: str) -> list[tuple[str, int]]:
    """Return the types and bits of a format's numbers."""
    kind, bits = _FORMATS[form]
    return [(kind, count) for count in bits]


def _read_block(where: str, weights: Mapping[str, Any], strategy: str) -> tuple[int, int]:
    """Return how many outputs and inputs share a scale; -1: all."""
    if strategy == "tensor":
        return -1, -1
    grouped = strategy in ("group", "tensor_group")
    size = read_count(where, weights, "group_size") if grouped else -1
    if strategy == "block":
        block = read_shape(where, weights, "block_structure")
        if block is not None:
            return block
        size = 0
    if size == 0:
        raise ModelLoadError(f"{where} says that weights share scales by {strategy}, not of which.")
    return 1, size
