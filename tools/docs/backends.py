"""Section of docs/models.md: what each backend computes with, for every way weights are stored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tgi_trio.model.gguf.block_types import BY_NAME
from tgi_trio.shard.checkpoint.formats.exl3 import BY_NAME as CODEBOOKS
from tgi_trio.shard.checkpoint.rounding.choose import ENCODINGS
from tgi_trio.shard.checkpoint.unpacked import UNPACKED_CODINGS
from tgi_trio.shard.cpu_backend.kinds.table import KINDS
from tools.docs.markdown import table

_SECTION: Final = """
### Formats and backends

To whoever computes with them, weights are of one of the kinds below, whatever tool has written
them. What a backend does with a kind:

- *as stored*: a kernel multiplies what the file holds;
- *codes*: they stay as small as stored where plain numbers would take too much memory, and become
  numbers in every call;
- *numbers*: they are dequantised as they are loaded.

Ranks divide outputs anywhere. They divide inputs at the borders in the last column; a part with any
other border is dequantised.

{rows}"""

# What stores weights so -> where inputs can be cut.
OF_FORMATS: Final = {
    "affine": (
        "GPTQ, AWQ, Marlin, compressed-tensors, Quark, BitNet",
        "groups of inputs; BitNet anywhere",
    ),
    "affine in any order": ("GPTQ and compressed-tensors in act-order, EXL2", "words of codes"),
    "lowered": (
        "MLX, HQQ along axis 1, torchao's Int4",
        "groups of inputs, for MLX of 32 at least",
    ),
    "lowered across outputs": ("HQQ along axis 0", "any input"),
    "int8": ("compressed-tensors, bitsandbytes, torchao, Quark", "none: outputs have a scale"),
    "table": (
        "bitsandbytes NF4 and FP4, MXFP4, compressed-tensors, Quark",
        "blocks of inputs",
    ),
    "e4m3": (
        "FP8, MXFP8, compressed-tensors, ModelOpt, torchao, Quark",
        "blocks of inputs, if there are any",
    ),
    "3inst": ("EXL3", "128 inputs, and outputs by 128"),
    "mcg": ("EXL3", "the same"),
    "mul1": ("EXL3", "the same"),
    "mul1 of half bits": ("EXL3", "the same"),
    "nvfp4": ("compressed-tensors, ModelOpt", "two blocks of 16"),
}
BLOCKS: Final = tuple(kind.name for kind in BY_NAME.values() if not kind.plain)


def render_backends() -> str:
    """Return the section."""
    header = ("weights", "of", "CPU kernels", "torch, on a CPU or a device", "ranks cut inputs at")
    return _SECTION.format(rows=table(header, _rows()))


def _rows() -> Iterator[tuple[str, str, str, str, str]]:
    for coding, (formats, cut) in OF_FORMATS.items():
        made = [word for word, encoding in ENCODINGS.items() if encoding.coding == coding]
        words = f"; made by {', '.join(f'`{word}`' for word in made)}" if made else ""
        yield f"`{coding}`", formats + words, _kernels(coding), _torch(coding), cut
    for coding in BLOCKS:
        cut = f"blocks of {BY_NAME[coding].weights}"
        yield f"`{coding}`", "GGUF", _kernels(coding), _torch(coding), cut


def _kernels(coding: str) -> str:
    """Return what the CPU kernels do with a coding, by the table of their kinds."""
    coding = coding.removesuffix(" in any order")  # which is one of packing, not of a kind
    if coding in KINDS:
        return "as stored"
    ends = (name.removeprefix(f"{coding} ") for name in KINDS if name.startswith(f"{coding} "))
    bits = [end for end in ends if end.isdigit()]
    return f"as stored ({', '.join(bits)} bits)" if bits else "numbers"


def _torch(coding: str) -> str:
    if coding.partition(" ")[0] in CODEBOOKS:
        return "numbers on a CPU, as stored on a device"
    return "codes" if coding in UNPACKED_CODINGS else "numbers"
