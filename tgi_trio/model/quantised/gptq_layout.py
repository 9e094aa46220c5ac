"""GPTQ (Frantar and others 2022, arXiv 2210.17323), as stored by AutoGPTQ and its successors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.matrices.references import MatrixRef
from tgi_trio.model.quantised.layout import (
    FLOATS,
    Headers,
    Part,
    check_bits,
    count_groups,
    count_words,
    read_count,
    split_name,
)

_BITS = (2, 3, 4, 8)


@dataclass(frozen=True, slots=True)
class GptqLayout:
    """weight = scale * (code - zero), with the scale and zero of the input's group."""

    bits: int
    group: int  # inputs that share a scale, unless a tensor lists groups; -1: all
    zeros_less_one: bool  # the first version stores zero points minus one
    mixed: bool = False  # modules may have other bits and groups, which their tensors show

    name = "gptq"

    def own_settings(self, columns: int, words: int, groups: int) -> tuple[int, int]:
        """Return the bits and the group of a matrix with so many inputs, words and groups."""
        shown = [bits for bits in _BITS if count_words(columns, bits) == words]
        if not self.mixed or not shown or not groups or columns % groups:
            return self.bits, self.group
        return shown[0], columns // groups

    def parts(self, matrix: MatrixRef, tensors: Headers) -> Sequence[Part]:
        module = split_name(matrix.name)
        if module is None or f"{module}.qweight" not in tensors:
            return ()
        rows, columns = matrix.rows, matrix.columns
        words, stored = tensors[f"{module}.qweight"].shape[:1], tensors.get(f"{module}.scales")
        groups = stored.shape[0] if stored and stored.shape else 0
        bits, group = self.own_settings(columns, words[0] if words else 0, groups)
        unit = 32 if bits == 3 else 32 // bits  # codes that fill whole words
        if rows % unit or columns % unit:
            raise ModelLoadError(
                f"{matrix.name!r} of {rows} x {columns} cannot be stored as GPTQ in {bits} bits: "
                f"{unit} codes fill whole words."
            )
        groups = count_groups(matrix, group)
        return (
            Part("codes", f"{module}.qweight", ("I32",), ((count_words(columns, bits), rows),)),
            Part("zeros", f"{module}.qzeros", ("I32",), ((groups, count_words(rows, bits)),)),
            Part("scales", f"{module}.scales", FLOATS, ((groups, rows),)),
            Part("groups", f"{module}.g_idx", ("I32",), ((columns,),), needed=False),
        )


def read_gptq_layout(where: str, quant_config: Mapping[str, Any]) -> GptqLayout:
    """Return the layout from GPTQ's description; raises ModelLoadError for unsupported variants."""
    form = quant_config.get("checkpoint_format") or quant_config.get("format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise ModelLoadError(
            f"{where} says that GPTQ's weights are in the form {form!r}; read are gptq, gptq_v2 "
            "and marlin."
        )
    bits, group = (
        read_count(where, quant_config, "bits"),
        read_count(where, quant_config, "group_size", -1),
    )
    check_bits(where, "GPTQ", bits, group, _BITS)
    if quant_config.get("pack_dtype", "int32") != "int32":
        raise ModelLoadError(
            f"{where} says pack_dtype {quant_config['pack_dtype']!r}; GPTQ is read from int32."
        )
    return GptqLayout(bits, group, form == "gptq", mixed=bool(quant_config.get("dynamic")))
