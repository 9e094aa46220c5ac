"""Sections of docs/models.md: what is made of plain numbers, by whom, and 8-bit K and V."""

from __future__ import annotations

from collections.abc import Iterator

from tgi_trio.settings.records import KV_CACHE_DTYPES
from tgi_trio.shard.checkpoint.rounding.choose import ENCODINGS
from tgi_trio.shard.checkpoint.rounding.encoding import Encoding
from tgi_trio.shard.checkpoint.unpacked import UNPACKED_CODINGS
from tools.docs.markdown import table

_MADE = """
## Made while loading

`--quantize` rounds plain numbers while they are loaded, matrix by matrix. The most memory that this
takes is the result, one layer, and pages of the file that the kernel may take back
(`tests/shard/test_loading_memory.py`). Linear layers are rounded, the head among them; norms,
biases, routers and embeddings are not (a head that shares the embedding's weights is a rounded copy
of them). Nothing is calibrated. The result is what a file in the format would hold: GGUF's blocks
of 32 are bit by bit those of llama.cpp's reference.

{made}
Of several sizes of groups the first that divides a matrix's inputs is taken. A matrix that none
divides is rounded as the last column says, or else stays as it is. All backends compute the same
numbers, over any number of ranks. Our kernels multiply the codes, on CPUs and on devices. torch on
a CPU holds the codes and makes numbers of them in every call, so a step takes longer. It does so
with quantised checkpoints as well, where their numbers would take more than half of the free memory
({apart}). Models that run through `transformers` are refused.
(`tests/shard/test_rounded_models.py`, `tests/shard/checkpoint/test_rounding.py`)

## Written by `quantize`

`python -m tgi_trio quantize MODEL OUTPUT` writes a folder with GPTQ's weights of 4 bits (Frantar,
others 2022), symmetric, with the names and defaults of text-generation-inference for its numbers:
`--groupsize 128`, `--percdamp 0.01`, `--act-order`. The text that says which inputs matter is
Python's own reference, or `--calibration-text FILE`; `--samples 128` pieces of
`--sample-tokens 512` are sent through one layer after the other, each with the quantised weights of
those before it. All matrices of layers whose sizes are multiples of 32 are stored, in the first
version's layout with `quantization_config` and `quantize_config.json`; embeddings, head, norms,
routers and what latents are expanded with stay as they are. One layer is held at a time, and the
samples. Layers are kept in `OUTPUT.quantizing` as they are done: a run that is stopped goes on
there, and the result appears when it is whole. transformers with gptqmodel says the same of it
(`tests/shard/quantising/test_opened_by_others.py`, skipped where that is not installed).

`--format gguf:q4_0` and `gguf:q8_0` write one file for llama.cpp and others, rounded without
calibration; embedding and head have 8 bits in both. Written are llama, mistral (without windows),
qwen2 and qwen3, with llama3's, linear and YaRN scaling; config, tokenizer and chat template are in
the file. Whether its tokenizer is the model's is tried on a text with everything that tokenizers
disagree about. (`tests/shard/quantising`)

## K and V of 8 bits

`--kv-cache-dtype` {dtypes} keeps K and V as bytes: twice as many tokens fit as with bfloat16. Each
number is divided by the layer's scale and rounded to the nearest, and what is too large to the
largest. Attention reads the rounded numbers already in the step that computes them, so an answer
does not depend on chunks, prefixes or ranks. Scales are the checkpoint's (`self_attn.k_scale` and
`v_scale`, ModelOpt's `k_proj.k_scale`, Quark's `k_proj.output_scale`, the older `kv_scale`), else
1; without the flag they are left unread. The generic decoder has it on all its backends, except
that the CPU kernels leave GLM 5.3 Flash to torch. Other paths refuse it, and so does DeepSeek V4.
(`tests/shard/cpu_backend/test_kv_dtype.py`, `tests/shard/torch_backend/test_kv_dtype.py`)
"""


def render_quantised() -> str:
    """Return the sections."""
    header = ("`--quantize`", "bits", "stored as", "inputs that share a scale", "else")
    return _MADE.format(
        made=table(header, _made()),
        apart=", ".join(f"`{coding}`" for coding in UNPACKED_CODINGS),
        dtypes=" or ".join(f"`{word}`" for word in KV_CACHE_DTYPES),
    )


def _made() -> Iterator[tuple[str, str, str, str, str]]:
    for word, encoding in ENCODINGS.items():
        other = encoding.instead.coding if encoding.instead else ""
        yield f"`{word}`", str(encoding.bits), f"`{encoding.coding}`", _groups(encoding), other


def _groups(encoding: Encoding) -> str:
    """Return the sizes that an encoding has, the first first."""
    largest = 1 << 20
    if encoding.group(largest) == largest:
        return "all"
    sizes = [size for size in (256, 128, 64, 32) if encoding.group(size) == size]
    return ", ".join(map(str, sizes))
