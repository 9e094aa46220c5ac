"""Formats of quantised weights: how a checkpoint announces one, and the refusal of all others.

Weights whose scales are ignored still load, but as other numbers: the model would answer nonsense
that looks like text. So anything like an unsupported format is refused by name. Those that are
read are in `model/quantised/`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.checkpoint_files import StoredTensor
from tgi_trio.model.config import ModelConfig, read_json
from tgi_trio.model.gguf.block_types import BY_NAME

SERVED_DTYPES: Final = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F64": "float64",  # read as float32
}
SERVED: Final = (
    f"Served are checkpoints in {', '.join(SERVED_DTYPES.values())}, and the quantised ones that "
    "docs/models.md lists: take the model's original one; --quantize eetq makes 8-bit weights of "
    "it on a CPU."
)

# Dtypes of indices and masks, which transformers' models may have among their tensors. No format
# stores weights in them.
INDEX_DTYPES: Final = frozenset({"I64", "BOOL"})
TABLE_DTYPES: Final = {"I64": "int64", "I32": "int32"}  # of tables that a model reads

# Keys of config.json that describe a format. MLX uses the first, and may leave what the original
# model says in the second; compressed-tensors used the third.
_CONFIG_KEYS: Final = ("quantization", "quantization_config", "compression_config")
# Other files that describe one, and the tools that write them.
_FILES: Final = {
    "quantize_config.json": "GPTQ or AWQ",
    "quant_config.json": "AWQ",
    "hf_quant_config.json": "ModelOpt",
    "quantization_config.json": "AutoRound",
}
# Older versions of these do not name the method, but each tool has a unique key.
_OLDER_KEYS: Final[Mapping[str, Mapping[str, str]]] = {
    "GPTQ or AWQ": {"awq": "w_bit", "gptq": "bits"},
    "AWQ": {"awq": "w_bit"},
}
# Endings of the names of a quantised matrix's tensors, and their formats. The first row that
# matches counts.
_PIECES: Final = (
    (r"\.weight_scale_inv", "FP8 with a scale per block (fp8)"),
    (r"\.weight_(packed|shape|zero_point|g_idx|global_scale)", "compressed-tensors"),
    (r"\.input_global_scale", "compressed-tensors"),
    (r"\.weight_scale(_2)?", "FP8 or 8-bit integers (fp8, compressed-tensors)"),
    (r"\.((input|output)_(scale|zero_point)|activation_scale(_ub)?)", "FP8 or 8-bit integers"),
    (r"\.(SCB|weight_format)", "8 bits of bitsandbytes"),
    (r"\.(nested_)?(absmax|quant_map)|\.quant_state\.\w+", "4 bits of bitsandbytes"),
    (r"\.(qweight|qzeros|g_idx)", "GPTQ or AWQ"),
    (r"\.scales", "GPTQ, AWQ or MLX"),
    (r"\.(biases|global_scale)", "MLX"),
    (r"\.(W_q|zero_scale|(scale|zero)_q)", "HQQ"),
    (r"_proj\.(B|s)", "Marlin"),
    (r"\.q_(weight|scale|scale_max|groups|group_map|invperm|perm)", "EXL2"),
    (r"\.(trellis|s[uv]h?|mcg|mul1)", "EXL3"),
    (r"_proj_(blocks|scales)", "MXFP4"),
    (r"\.(k|v|kv)_(scale|zero_point)", "scales of an 8-bit KV cache"),
    (r"\.(bias_(scale|zero_point)|input_prescale|(shared_)?input_rotation(_\d+)?)", "Quark"),
    (r"\._\w+_(qdata|scale|zero_point|scale_and_zero|\w+_scale)", "torchao"),
    (r"\.(codes|codebooks)", "AQLM"),
)


# Models have tensors of such names as well (a router's factor): they are pieces beside these alone.
_NEEDED: Final = {".global_scale": ".scales", ".biases": ".scales"}

_A_PIECE: Final = re.compile(f"(?:{'|'.join(ending for ending, _ in _PIECES)})$")


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """What a checkpoint states about the format of its weights."""

    where: str  # the file, and the key in it
    method: str  # "gptq"
    values: Mapping[str, Any]
    name: str  # of the format, with its variant


def check_format(config: ModelConfig, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise ModelLoadError if the folder states that its weights are quantised."""
    found = find_quantization_config(config)
    if found is None:
        return
    if are_plain(tensors):
        raise refuse_format(config, found, describe_plain(found))
    raise refuse_format(config, found)


def are_plain(tensors: Mapping[str, StoredTensor]) -> bool:
    """Return whether no tensor looks like part of a quantised matrix."""
    plain = all(tensor.dtype in SERVED_DTYPES for tensor in tensors.values())
    return plain and not any(_find_piece(tensor, tensors) for tensor in tensors)


def describe_plain(found: QuantizationConfig) -> str:
    """Return advice for a folder that announces a format but has only unquantised tensors."""
    return f" Its tensors are plain numbers: if they are the model's own, take out {found.where}."


def refuse_format(
    config: ModelConfig, found: QuantizationConfig | None, hint: str = ""
) -> ModelLoadError:
    """Return the error for weights in an unsupported format."""
    where, name = (found.where, found.name) if found else ("nothing else", "of an unknown kind")
    return ModelLoadError(
        f"{config.folder} holds quantised weights in the format {name}, as {where} says, which "
        f"nothing here reads. {SERVED}{hint}"
    )


def check_dtypes(tensors: Mapping[str, StoredTensor], more: Collection[str] = frozenset()) -> None:
    """Raise ModelLoadError for a tensor whose dtype no backend reads; `more` are read as well."""
    served = {*SERVED_DTYPES, *BY_NAME, *more}
    unread = (name for name, tensor in tensors.items() if tensor.dtype not in served)
    for name in sorted(unread):
        tensor = tensors[name]
        piece = find_format_of_tensor(name) or _find_format_beside(name, tensors)
        format_of = f", a part of the format {piece}" if piece else ""
        raise ModelLoadError(
            f"Tensor {name!r} in {tensor.file} is of type {tensor.dtype}{format_of}, which "
            f"nothing here reads. {SERVED}"
        )


def check_tables(tensors: Mapping[str, StoredTensor]) -> None:
    """Raise ModelLoadError for a table of whole numbers in another dtype."""
    for name, tensor in sorted(tensors.items()):
        if tensor.dtype not in TABLE_DTYPES:
            raise ModelLoadError(
                f"Tensor {name!r} in {tensor.file} is of type {tensor.dtype}, but a table of whole "
                f"numbers is {' or '.join(TABLE_DTYPES)}."
            )


def refuse_pieces(tensors: Mapping[str, StoredTensor], names: Iterable[str]) -> None:
    """Raise ModelLoadError if one of `names` is part of a quantised matrix."""
    for name in sorted(names):
        if piece := _find_piece(name, tensors):
            raise ModelLoadError(
                f"Tensor {name!r} in {tensors[name].file} is a part of quantised weights in the "
                f"format {piece}, which nothing here reads. {SERVED}"
            )


def find_format_of_tensor(name: str) -> str | None:
    """Return the format whose matrices have a tensor with such a name, or None."""
    if not _A_PIECE.search(name):  # the only test that most of tens of thousands of names need
        return None
    return next(piece for ending, piece in _PIECES if re.search(f"(?:{ending})$", name))


def _find_piece(name: str, tensors: Mapping[str, StoredTensor]) -> str | None:
    """Return the format that one of the tensors is part of, or None."""
    module, dot, ending = name.rpartition(".")
    needed = _NEEDED.get(dot + ending)
    alone = needed is not None and module + needed not in tensors
    return None if alone else find_format_of_tensor(name)


def _find_format_beside(name: str, tensors: Mapping[str, StoredTensor]) -> str | None:
    """Return the format shown by tensors beside one that looks like an unquantised weight."""
    module = name.rpartition(".")[0] + "."
    beside = (other for other in tensors if other.startswith(module) and other != name)
    return next(
        (piece for other in sorted(beside) if (piece := find_format_of_tensor(other))), None
    )


def find_quantization_config(config: ModelConfig) -> QuantizationConfig | None:
    """Return what a folder states about quantised weights, or None."""
    for key in _CONFIG_KEYS:
        if isinstance(found := config.get(key), dict) and found:
            return _read(f"{key} in config.json", found)
    for file, tool in _FILES.items():
        if (content := read_json(config.folder / file)) is not None:
            inner = content.get("quantization")
            return _read(file, inner if isinstance(inner, dict) else content, tool)
    return None


def _read(where: str, quant_config: Mapping[str, Any], tool: str = "") -> QuantizationConfig:
    method = quant_config.get("quant_method") or quant_config.get("quant_algo")
    if not method and tool in _OLDER_KEYS:
        method = next(
            (name for name, key in _OLDER_KEYS[tool].items() if key in quant_config), None
        )
    if not method and not tool and {"bits", "group_size"} <= quant_config.keys():
        method = "mlx"  # the only tool that does not say so
    method = str(method or tool or "of an unnamed method")
    named = tool.lower() if tool == "ModelOpt" else method.lower()
    return QuantizationConfig(where, named, quant_config, _describe(quant_config, method))


def _describe(quant_config: Mapping[str, Any], method: str) -> str:
    """Return a format's name and variant."""
    words = [method]
    words += [
        str(quant_config[key])
        for key in ("fmt", "format", "checkpoint_format")
        if quant_config.get(key)
    ][:1]
    bits = quant_config.get("bits") or quant_config.get("w_bit") or quant_config.get("num_bits")
    if quant_config.get("load_in_8bit") or quant_config.get("_load_in_8bit"):
        bits = 8
    elif quant_config.get("load_in_4bit") or quant_config.get("_load_in_4bit"):
        words.append(str(quant_config.get("bnb_4bit_quant_type", "fp4")))
        bits = 4
    return ", ".join(dict.fromkeys([*words, *([f"{bits} bits"] if bits else [])]))
