"""Section of docs/models.md: the formats of quantised checkpoints."""

from __future__ import annotations

from typing import Final

from tgi_trio.model.mlx_names import LOST
from tools.docs.markdown import table

_FORMATS: Final = """
## Quantised weights

The format is recognised from the checkpoint: by its config.json (or `quantize_config.json` or
`quant_config.json` beside it) and by its tensors' headers. No flag is needed; `--quantize` may only
name the same format. A matrix that is not stored in the format is plain numbers.

Weights are those that were stored. The CPU kernels and
[devices](device/weights.md#weights-that-stay-codes) multiply most formats as they are stored, and
what a backend has no kernel for is dequantised as it is loaded, into `--dtype`
([which](#formats-and-backends)). The generic decoder serves them on all its backends, over ranks
and in mixtures of experts; T5 and models of `transformers` do not have them.

{formats}
Some checkpoints also say how activations are to be rounded (w8a8, FP8, NVFP4). That is not
followed: the backend decides, and `--activations`. torch does not round them, nor do devices,
unless `--activations 8` asks for [8 bits](device/weights.md#activations-of-8-bits). The CPU kernels
round what is multiplied by weights that stay as stored, and the log of a start says to what:

- **int8 by a [matrix unit](cpu-backend/quantised.md#int8-by-the-matrix-unit)**, with one scale for
  an output or for 64 inputs or more, but in experts: 16 bits, with one scale for a token; with
  `--activations 8`, 8 bits.
- **Other integers, NVFP4, and MXFP4 of GGUF files**:
  [8 bits](cpu-backend/quantised.md#quantised-weights-a-block), with one scale for 32 inputs. With
  `--activations 16`, and where a processor has no dot product of bytes for codes of 8 bits and of
  the tables of IQ4_NL and IQ4_XS, 16 bits.
- **FP8, MXFP8, NF4, FP4, MXFP4**: bfloat16 where a model is in bfloat16 and the processor
  multiplies its pairs, whether `--activations 8` is given or not. Elsewhere, and with
  `--activations 16`, they are not rounded.
- **EXL3**, and whatever is dequantised: as with plain weights, whatever the flag says.
- **`--quantize eetq` and `bitsandbytes`**: in a bfloat16 model as int8 by a matrix unit, where
  there is one. Elsewhere they are not rounded, unless the flag asks for 8 or 16 bits.

BitNet's models are trained with activations of 8 bits that have one scale for a token, and
`transformers` computes them so. Here torch does not round them, and the CPU kernels do as for other
integers, with one scale for 32 inputs. In a random model of six layers log-probabilities differ by
0.089 on average between exact activations and `transformers`, by 0.054 between exact ones and the
kernels, and by 0.101 between the latter two (`tests/shard/test_bitnet.py`).

mlx-lm changes names, and more, as it reads a model, and writes it so: experts of a layer lie in one
tensor, the expansion of latents in two, taps of convolutions in the middle, some norms have 1
added, Falcon H1's factors are in its weights. All this is undone (`model/mlx_names.py`), so a
checkpoint of it is its family's. It leaves the towers of composite models out: their text is served
then, and images are refused. mlx-vlm keeps them, not quantised, with other names and axes of
convolutions, which are undone as well.

The tests read files that compressed-tensors, bitsandbytes, auto-round, mlx-lm, HQQ, torchao and,
where it is installed, Quark make while they run (`tests/shard/made_by_tools`), files that these,
gptqmodel, ModelOpt and vLLM's packers have made (`tests/data/quantised`), and matrices packed bit
by bit (`tests/shard/checkpoint/test_quantised_matrices.py`). The log-probabilities of prompts and
the greedy tokens are those of `transformers` with the weights that these libraries dequantise
(`tests/shard/test_quantised_models.py`).
"""

# format, word of --quantize, what is read, what is not
_READ: Final = (
    (
        "GPTQ",
        "`gptq`",
        "2, 3, 4, 8 bits, any group size, versions 1 and 2, in act-order or not; modules that "
        "differ (`dynamic`)",
        "other orders of packing than int32's",
    ),
    (
        "AutoRound",
        "`gptq`, `awq`",
        "weights in GPTQ's forms or AWQ's (`packing_format`), modules that differ (`extra_config`)",
        "FP8, MXFP4 and NVFP4 under its name: llm-compressor's are read",
    ),
    (
        "Marlin",
        "`marlin`",
        "GPTQ of 4 bits in the order of its kernel (`checkpoint_format: marlin`, "
        "`is_marlin_format`), any group size",
        "8 bits; the sparse kind (`marlin_24`)",
    ),
    ("AWQ", "`awq`", "4 bits in GEMM's order, any group size", "GEMV's order"),
    (
        "compressed-tensors",
        "`compressed-tensors`",
        "pack-quantized (4 and 8 bits), int-quantized (8), float-quantized (FP8); scales of the "
        "tensor, of channels, groups and blocks; symmetric or not; in act-order or not; "
        "nvfp4-pack-quantized, mxfp4-pack-quantized, mxfp8-quantized",
        "sparse weights, transforms, MXFP6, two groups of one form that differ",
    ),
    (
        "ModelOpt",
        "`modelopt`",
        "FP8 of the tensor or of outputs, MXFP8, NVFP4, and mixtures of these; described in "
        "config.json or `hf_quant_config.json`",
        "what AWQ or SVD has changed (`NVFP4_AWQ`, `NVFP4_SVD`), whole numbers",
    ),
    (
        "bitsandbytes",
        "`bitsandbytes`, `bitsandbytes-nf4`, `bitsandbytes-fp4`",
        "8 bits; NF4 and FP4 in blocks of any size, with double quantisation or not",
        "4 bits in other words than bytes",
    ),
    (
        "FP8",
        "`fp8`",
        "e4m3 with scales of blocks (DeepSeek), powers of two as well (DeepSeek V4, whose experts "
        "are MXFP4), of the tensor or of outputs; FBGEMM's (`fbgemm_fp8`)",
        "e5m2",
    ),
    (
        "EXL2",
        "`exl2`",
        "2 to 8 bits, mixed within matrices; what exllamav2 has divided, and its heads of tied "
        "models. A matrix with codes of more than 4 bits keeps them in 8",
        "",
    ),
    (
        "EXL3",
        "`exl3`",
        "1 to 8 bits and, of its codebook MUL1, 1.5 to 7.5; all three codebooks (3INST, MCG, "
        "MUL1), scales and the signs of the first checkpoints; what exllamav3 has divided, and its "
        "heads of tied models",
        "other factors of codebooks; embeddings in its trellis form",
    ),
    (
        "torchao",
        "`torchao`",
        "what transformers writes as safetensors: Int8 and Intx (8da4w) of the tensor, of outputs "
        "and groups, symmetric or not; Float8 (e4m3); Int4 in plain bytes and in tinygemm's tiles; "
        "modules that differ (`FqnToConfig`), embeddings as well",
        "pickled files, MX and NVFP4, AWQ and SmoothQuant (`act_pre_scale`), Int4 of Intel's and "
        "AMD's devices",
    ),
    (
        "Quark",
        "`quark`",
        "FP8 (e4m3) of the tensor, of outputs and blocks; INT4 and UINT4 in both orders "
        "(`pack_method`), INT8 and UINT8, of the tensor, of outputs and groups; MXFP4, MXFP8; "
        "layers that differ (`layer_quant_config`); scales of K and V. Its files for AWQ and FP8 "
        "are those formats'",
        "FP6, 2 and 3 bits, weights quantised in two steps, rotated inputs, `fake_quantized`",
    ),
    (
        "BitNet",
        "`bitnet`",
        "-1, 0 and 1 times a number of the matrix: four weights to a byte, or plain (`offline`); "
        "trained weights, rounded while they are loaded (`online`); `bitlinear`, `autobitlinear`",
        "norms in linears (`use_rms_norm`)",
    ),
    ("MXFP4", "`mxfp4`", "the experts of gpt-oss: e2m1, 32 inputs with a power of two", ""),
    (
        "MLX",
        "`mlx`",
        "what mlx-lm converts: affine of 2, 3, 4, 5, 6 and 8 bits in groups of 32, 64 and 128, "
        "mxfp4, mxfp8, nvfp4; modules that differ, embeddings and heads as well; and what it "
        "converts to plain numbers",
        "nvfp4 with a factor (`global_scale`); "
        + ", ".join(f"`{family}`" for family in sorted(LOST))
        + ", where what it changes cannot be undone; towers that are quantised",
    ),
    (
        "HQQ",
        "`hqq`",
        "1, 2, 3, 4, 5, 6 and 8 bits along both axes, any group size, as transformers stores it; "
        "codes stored as numbers (`view_as_float`), modules that differ",
        "its library's own `qmodel.pt`; scales that are quantised or apart (`offload_meta`)",
    ),
)


def render_formats() -> str:
    """Return the section."""
    return _FORMATS.format(
        formats=table(("format", "`--quantize`", "read", "refused by name"), _READ)
    )
