"""Recognising the format of a checkpoint's quantised weights, among those that are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from tgi_trio.errors import ConfigurationError
from tgi_trio.model.checkpoint_tensors import gguf_files
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.formats import find_quantization_config
from tgi_trio.model.gguf.files import read_model
from tgi_trio.model.quantised.auto_round_layout import read_auto_round_layout
from tgi_trio.model.quantised.awq_layout import read_awq_layout
from tgi_trio.model.quantised.bitnet_layout import read_bitnet_layout
from tgi_trio.model.quantised.bitsandbytes_layout import read_bitsandbytes_layout
from tgi_trio.model.quantised.compressed_layout import read_compressed_layout
from tgi_trio.model.quantised.exl2_layout import read_exl2_layout
from tgi_trio.model.quantised.exl3_layout import read_exl3_layout
from tgi_trio.model.quantised.fp8_layout import read_fp8_layout
from tgi_trio.model.quantised.gptq_layout import read_gptq_layout
from tgi_trio.model.quantised.hqq_layout import read_hqq_layout
from tgi_trio.model.quantised.layout import MatrixLayout
from tgi_trio.model.quantised.marlin_layout import is_marlin, read_marlin_layout
from tgi_trio.model.quantised.mlx_layout import read_mlx_layout
from tgi_trio.model.quantised.modelopt_layout import read_modelopt_layout
from tgi_trio.model.quantised.mxfp4_layout import read_mxfp4_layout
from tgi_trio.model.quantised.quark_layout import read_quark_layout
from tgi_trio.model.quantised.torchao_layout import read_torchao_layout

# Values of `--quantize` that round unquantised weights during loading: TGI's, then ours. The others
# of `QUANTIZATIONS` state a checkpoint's format, and so do those of bitsandbytes and FP8.
MADE_AT_LOAD: Final = (
    *("eetq", "bitsandbytes", "bitsandbytes-nf4", "bitsandbytes-fp4", "fp8"),
    *("int4", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k"),
)
# By `quant_method` of a checkpoint's description.
_READ: Final[Mapping[str, Callable[[str, Mapping[str, Any]], MatrixLayout]]] = {
    "gptq": read_gptq_layout,
    "awq": read_awq_layout,
    "compressed-tensors": read_compressed_layout,
    "fp8": read_fp8_layout,
    "bitsandbytes": read_bitsandbytes_layout,
    "mxfp4": read_mxfp4_layout,
    "marlin": read_marlin_layout,
    "modelopt": read_modelopt_layout,
    "exl2": read_exl2_layout,
    "exl3": read_exl3_layout,
    "bitnet": read_bitnet_layout,
    "auto-round": read_auto_round_layout,
    "intel/auto-round": read_auto_round_layout,  # until its version 0.3
    "fbgemm_fp8": read_fp8_layout,
    "quark": read_quark_layout,
    "torchao": read_torchao_layout,
    "mlx": read_mlx_layout,
    "hqq": read_hqq_layout,
}


def find_layout(config: ModelConfig) -> MatrixLayout | None:
    """Return how a checkpoint stores its matrices, by its files, or None: no format of ours.

    Raises ModelLoadError for an unsupported variant of a format.
    """
    found = find_quantization_config(config)
    if found is None or found.method not in _READ:
        return None
    method = "marlin" if found.method == "gptq" and is_marlin(found.values) else found.method
    return _READ[method](f"{found.where} of {config.folder}", found.values)


def check_stated(config: ModelConfig, quantize: str) -> None:
    """Raise ConfigurationError if `--quantize` contradicts the checkpoint.

    Values in `MADE_AT_LOAD` round unquantised weights; the others state the weights' format.
    """
    found, name = find_quantization_config(config), find_word(config)
    if name == quantize or (quantize in MADE_AT_LOAD and name is None and found is None):
        return
    stored = name or ("plain numbers" if found is None else found.name)
    raise ConfigurationError(
        f"--quantize {quantize} contradicts {config.folder}, which holds {stored}: leave it out, "
        "the format is recognised from the checkpoint"
    )


def find_word(config: ModelConfig) -> str | None:
    """Return the `--quantize` value of a checkpoint's format; None: it is not quantised.

    Raises ModelLoadError as `find_layout` and `read_model` do.
    """
    files = gguf_files(config.folder)
    if files and not all(info.kind.plain for _, info in read_model(files).tensors.values()):
        return "gguf"
    layout = find_layout(config)
    return layout.name if layout else None


def find_made(config: ModelConfig, quantize: str | None) -> str | None:
    """Return the format to which linear layers are rounded during loading; None: as stored."""
    plain = find_word(config) is None and find_quantization_config(config) is None
    return quantize if quantize in MADE_AT_LOAD and plain else None
