"""Choosing the format of a checkpoint's weights."""

from __future__ import annotations

from functools import partial
from typing import Final

from tgi_trio.model.config import ModelConfig
from tgi_trio.model.formats import find_quantization_config, refuse_format
from tgi_trio.model.quantised.awq_layout import AwqLayout
from tgi_trio.model.quantised.bitnet_layout import BitnetLayout
from tgi_trio.model.quantised.bitsandbytes_layout import BitsandbytesLayout
from tgi_trio.model.quantised.compressed_layout import CompressedLayout
from tgi_trio.model.quantised.exl2_layout import Exl2Layout
from tgi_trio.model.quantised.exl3_layout import Exl3Layout
from tgi_trio.model.quantised.fp8_layout import Fp8Layout
from tgi_trio.model.quantised.gptq_layout import GptqLayout
from tgi_trio.model.quantised.hqq_layout import HqqLayout
from tgi_trio.model.quantised.layout import MatrixLayout
from tgi_trio.model.quantised.marlin_layout import MarlinLayout
from tgi_trio.model.quantised.mlx_layout import MlxLayout
from tgi_trio.model.quantised.modelopt_layout import ModeloptLayout
from tgi_trio.model.quantised.mxfp4_layout import Mxfp4Layout
from tgi_trio.model.quantised.quark_layout import QuarkLayout
from tgi_trio.model.quantised.recognise import find_layout
from tgi_trio.model.quantised.torchao_layout import TorchaoLayout
from tgi_trio.shard.checkpoint.container import Container
from tgi_trio.shard.checkpoint.formats.awq import AwqSource
from tgi_trio.shard.checkpoint.formats.bitnet import open_bitnet
from tgi_trio.shard.checkpoint.formats.bitsandbytes import open_bitsandbytes
from tgi_trio.shard.checkpoint.formats.compressed_tensors import open_compressed
from tgi_trio.shard.checkpoint.formats.exl2 import Exl2Source
from tgi_trio.shard.checkpoint.formats.exl3 import Exl3Source
from tgi_trio.shard.checkpoint.formats.fp8 import open_fp8
from tgi_trio.shard.checkpoint.formats.gguf import GgufFormat
from tgi_trio.shard.checkpoint.formats.gptq import GptqSource
from tgi_trio.shard.checkpoint.formats.hqq import open_hqq
from tgi_trio.shard.checkpoint.formats.latent_halves import HalvesFormat
from tgi_trio.shard.checkpoint.formats.marlin import MarlinSource
from tgi_trio.shard.checkpoint.formats.mlx import open_mlx
from tgi_trio.shard.checkpoint.formats.modelopt import open_modelopt
from tgi_trio.shard.checkpoint.formats.mxfp4 import Mxfp4Source
from tgi_trio.shard.checkpoint.formats.pieces import Open, PiecesFormat
from tgi_trio.shard.checkpoint.formats.plain import PlainFormat
from tgi_trio.shard.checkpoint.formats.quark import open_quark
from tgi_trio.shard.checkpoint.formats.torchao import open_torchao
from tgi_trio.shard.checkpoint.stored_matrix import WeightFormat

FORMATS: Final[tuple[WeightFormat, ...]] = (GgufFormat(), HalvesFormat(PlainFormat()))


def choose_format(config: ModelConfig, container: Container) -> WeightFormat:
    """Return the format of a checkpoint; raises ModelLoadError if no format claims it."""
    for known in FORMATS:
        if known.claims(config, container):
            return known
    layout = find_layout(config)
    if layout is None:
        raise refuse_format(config, find_quantization_config(config))
    return HalvesFormat(PiecesFormat(layout, _reader(layout)))


def _reader(layout: MatrixLayout) -> Open:
    """Return the function that opens matrices of a layout."""
    match layout:
        case GptqLayout():
            return partial(GptqSource, layout)
        case AwqLayout():
            return partial(AwqSource, layout)
        case CompressedLayout():
            return partial(open_compressed, layout)
        case BitsandbytesLayout():
            return partial(open_bitsandbytes, layout)
        case Fp8Layout():
            return partial(open_fp8, layout)
        case MarlinLayout():
            return partial(MarlinSource, layout)
        case Mxfp4Layout():
            return Mxfp4Source
        case Exl2Layout():
            return Exl2Source
        case Exl3Layout():
            return Exl3Source
        case BitnetLayout():
            return partial(open_bitnet, layout)
        case ModeloptLayout():
            return open_modelopt
        case QuarkLayout():
            return partial(open_quark, layout)
        case TorchaoLayout():
            return open_torchao
        case MlxLayout():
            return open_mlx
        case HqqLayout():
            return open_hqq
    raise ValueError(f"nothing reads {layout.name}")
