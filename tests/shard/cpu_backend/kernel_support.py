"""Checkpoints that the CPU kernels fit, and runners of them."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListLike
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tests.shard.torch_backend.models_support import BLOCK, GreedyRecorder
from tgi_trio.ipc.startup import WarmupRequest
from tgi_trio.model.config import read_config
from tgi_trio.model.families import names
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.specs.decoder import DecoderSpec, LayerSpec, RotarySpec
from tgi_trio.shard.checkpoint.formats.plain import PlainMatrix
from tgi_trio.shard.checkpoint.lookup import open_checkpoint
from tgi_trio.shard.checkpoint.rounding.choose import ENCODINGS
from tgi_trio.shard.checkpoint.stored_matrix import Stack
from tgi_trio.shard.cpu_backend.adapters import CpuAdapters
from tgi_trio.shard.cpu_backend.cpu_runner import CpuRunner
from tgi_trio.shard.cpu_backend.forward import Forward
from tgi_trio.shard.cpu_backend.instructions import find_multiplier, find_variant
from tgi_trio.shard.cpu_backend.kernel_groups import find_kernel_groups
from tgi_trio.shard.cpu_backend.program import pack_program
from tgi_trio.shard.cpu_backend.tables import Code
from tgi_trio.shard.cpu_backend.verified import (
    choose_adapter_kernels,
    choose_panel_kernels,
    open_kernel_group,
)
from tgi_trio.shard.cpu_backend.weight_layout import CacheNumbers, Pairs

# A plain decoder.
LLAMA = DecoderSpec(
    family="llama",
    vocab_size=64,
    hidden_size=64,
    heads=2,
    kv_heads=1,
    head_dim=32,
    mlp_width=64,
    layers=(LayerSpec(scale=0.2, rotary=RotarySpec(dim=32)),) * 2,
    names=names.LLAMA,
)
# How most of the models below are compiled in float32, on this machine: it is kept already.
VARIANT = find_variant(LLAMA, "float32")

# Those with mixtures of experts.
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"head_dim": 32},
    "qwen2_moe": {
        "hidden_size": 128,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
    },
    "qwen3_moe": {"moe_intermediate_size": 96, "num_experts": 24, "num_experts_per_tok": 3},
    "phimoe": {"hidden_size": 128},
    "dbrx": {"d_model": 128},
    "olmoe": {"hidden_size": 128},
    "gpt_oss": {"head_dim": 32, "intermediate_size": 64},
}

# Those with operations that few have.
RARE: dict[str, dict[str, Any]] = {
    "olmo2": {"hidden_size": 128},
    "olmo3": {"hidden_size": 128},
    "gpt2": {"n_embd": 128},
    "gpt_bigcode": {"n_embd": 128},
    "gptj": {"n_embd": 128},
    "gpt_neox": {"hidden_size": 128},
    "phi": {"hidden_size": 128},
    "opt": {"hidden_size": 128, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    "falcon": {"hidden_size": 128},
    "bloom": {"hidden_size": 128},
    "mpt": {"d_model": 128},
    "cohere": {"hidden_size": 128, "use_qk_norm": True},
    "stablelm": {"hidden_size": 128, "qk_layernorm": True},
}

_DELTA = {  # with a query group of three, as Qwen 3 has here: fewer kernels to compile
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "head_dim": 64,
    "num_attention_heads": 6,
}

# Of Qwen 4's parts, for heads of 32 numbers or more.
QWEN4: dict[str, Any] = {
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "indexer_head_dim"), 32),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **{"hc_lowrank": 32, "ple_embed_dim": 64},
}

# Of GLM 5.3's parts, which is the text of models that see images.
GLM5: dict[str, Any] = {
    **dict.fromkeys(("linear_head_dim", "kv_lora_rank", "q_lora_rank", "v_head_dim"), 32),
    **dict.fromkeys(("qk_nope_head_dim", "index_head_dim"), 32),
    "moe_intermediate_size": 64,
}

# Those whose layers keep states.
HYBRIDS: dict[str, dict[str, Any]] = {
    "lfm2": {"hidden_size": 128},
    "lfm2_moe": {"hidden_size": 128, "moe_intermediate_size": 64},
    "lfm3": {"head_dim": 32},
    "qwen3_5_text": _DELTA,
    "qwen3_next": _DELTA | {"moe_intermediate_size": 64},
    "qwen4_exp_text": QWEN4 | _DELTA | {"indexer_head_dim": 64},
    "bamba": {"hidden_size": 128, "mamba_d_head": 32, "mamba_d_state": 32},
    "granitemoehybrid": {
        "hidden_size": 128,
        "mamba_d_head": 32,
        "mamba_d_state": 32,
        "intermediate_size": 64,
        "shared_intermediate_size": 96,
    },
    "mamba2": {"num_heads": 4, "head_dim": 32, "state_size": 32},
    "mamba": {"state_size": 16},
    "falcon_mamba": {"state_size": 16},
    "jamba": {"hidden_size": 128, "mamba_d_state": 16, "intermediate_size": 64},
    "recurrent_gemma": {"num_attention_heads": 2, "head_dim": 32},
    "falcon_h1": {"head_dim": 32, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 32},
    "nemotron_h": {
        "head_dim": 32,
        "mamba_head_dim": 32,
        "ssm_state_size": 32,
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 96,
    },
    "zamba2": {"hidden_size": 128, "mamba_d_state": 32, "adapter_rank": 32},
}

_LATENTS = {  # with a query group of two, as most have here: fewer kernels to compile
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 64,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}

# Those whose keys and values are compressed.
COMPRESSED: dict[str, dict[str, Any]] = {
    "kimi_linear": _LATENTS | {"q_lora_rank": None, "linear_head_dim": 32},
    "bailing_hybrid": _LATENTS | {"num_attention_heads": 4, "q_lora_rank": None, "head_dim": 32},
    "deepseek_v2": _LATENTS | {"q_lora_rank": None},
    "deepseek_v3": _LATENTS,
    "deepseek_v32": _LATENTS | {"index_head_dim": 64, "index_n_heads": 12},
    "glm_moe_dsa": _LATENTS | {"index_head_dim": 32},
    "hy_v4": _LATENTS | {"index_head_dim": 64},
    "axk1": _LATENTS,
    "axk2": _LATENTS | {"index_head_dim": 64},
    "glm4_moe_lite": _LATENTS,
    "mistral4": _LATENTS,
    "minicpm3": _LATENTS,
    "youtu": _LATENTS,
}

# Newer families, which are made of what others have.
NEWER: dict[str, dict[str, Any]] = {
    "afmoe": {"head_dim": 32},
    "apertus": {"head_dim": 32},
    "arcee": {"head_dim": 32},
    "biogpt": {"hidden_size": 128},
    "bitnet": {"hidden_size": 128},
    "cwm": {"head_dim": 32},
    "cohere2_moe": {"head_dim": 32, "intermediate_size": 64},
    "dots1": {"head_dim": 32},
    "ernie4_5": {"head_dim": 32},
    "ernie4_5_moe": {"head_dim": 32, "moe_intermediate_size": 64},
    "exaone4": {"head_dim": 32},
    "exaone_moe": {"head_dim": 32},
    "flex_olmo": {"hidden_size": 128, "intermediate_size": 64},
    "flint": {"head_dim": 32, "shared_expert_intermediate_size": 64},
    "glm": {"head_dim": 32},
    "glm4": {"head_dim": 32},
    "glm4_moe": {"head_dim": 32},
    "gpt_neo": {"hidden_size": 128},
    "granite_swa": {"hidden_size": 128},
    "granitemoe": {"hidden_size": 128, "intermediate_size": 64},
    "granitemoeshared": {
        "hidden_size": 128,
        "intermediate_size": 64,
        "shared_intermediate_size": 96,
    },
    "granitemoe_swa": {
        "hidden_size": 128,
        "intermediate_size": 64,
        "shared_intermediate_size": 96,
    },
    "helium": {"hidden_size": 128, "head_dim": 32},
    "hyperclovax": {"head_dim": 32},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32},
    "hy_v3": {"head_dim": 32},
    "internlm3": {"head_dim": 32},
    "laguna": {"head_dim": 32, "shared_expert_intermediate_size": 64},
    "kolibri1": {"head_dim": 32, "shared_expert_intermediate_size": 64},
    "mellum": {"head_dim": 32},
    "iquestcoder": {"head_dim": 32},
    "jais2": {"head_dim": 32},
    "minimax_m2": {"head_dim": 32, "intermediate_size": 64},
    "minimax_m3_vl_text": {
        "head_dim": 32,
        "intermediate_size": 64,
        "index_head_dim": 64,
        "index_block_size": 16,
        "index_topk_blocks": 2,
    },
    "llama4_text": {"head_dim": 32, "intermediate_size": 64},
    "ministral": {"head_dim": 32},
    "ministral3": {"head_dim": 32},
    "nanochat": {"hidden_size": 128},
    "nemotron": {"head_dim": 32},
    "openai-gpt": {"n_embd": 128},
    "persimmon": {"hidden_size": 128},
    "seed_oss": {"head_dim": 32},
    "solar_open": {"head_dim": 32},
    "smollm3": {"head_dim": 32},
    "vaultgemma": {"head_dim": 32},
    "xglm": {"d_model": 128},
}

# Those whose layers differ in their heads.
UNEQUAL: dict[str, dict[str, Any]] = {
    "mimo_v2_flash": {"head_dim": 64, "v_head_dim": 32},
    "gemma4_text": {"head_dim": 32, "global_head_dim": 64},
    "gemma4_unified_text": {"head_dim": 32, "global_head_dim": 64},
}

# Families the kernels serve, in sizes that they fit.
FITTING: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 32, "attention_bias": True, "mlp_bias": True},
    "mistral": {"head_dim": 32, "sliding_window": 24},
    "qwen2": {"hidden_size": 128},
    "qwen3": {"head_dim": 64, "num_attention_heads": 6},
    "gemma": {"head_dim": 32, "num_key_value_heads": 1},
    "gemma2": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32},
    "phi3": {"hidden_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1},
    "olmo": {"hidden_size": 128},
    "granite": {"hidden_size": 128},
    "starcoder2": {"hidden_size": 128},
    **RARE,
    **MIXTURES,
    **HYBRIDS,
    **COMPRESSED,
    **NEWER,
    **UNEQUAL,
}


@contextmanager
def cpu_runner(
    folder: Path,
    dtype: str = "float32",
    *,
    int8: bool = False,
    int8_by_rows: bool = False,
    quantize: str | None = None,
    pairs: Pairs = "float32",
    active_bits: int = 16,
    cores: ListLike[int] = (0,),
    max_lora_rank: int = 0,
    kv: CacheNumbers | None = None,
) -> Iterator[tuple[CpuRunner, GreedyRecorder]]:
    """Yield a warmed-up runner and its sampler; there is a thread for each of `cores`."""
    config = read_config(folder)
    spec = decoder_spec(config)
    assert spec is not None
    recorder = GreedyRecorder()
    with (
        open_checkpoint(
            config, spec.names.base, encoding=ENCODINGS[quantize] if quantize else None
        ) as weights,
        pack_program(
            spec,
            weights,
            dtype,
            int8=int8,
            int8_by_rows=int8_by_rows,
            threads=len(cores),
            max_lora_rank=max_lora_rank,
            kv=kv,
        ) as program,
    ):
        kv_dtype = kv.name if kv else None
        variant = find_variant(spec, dtype, int8=int8, pairs=pairs, kv_dtype=kv_dtype)
    multipliers = [find_multiplier(kind, active_bits) for kind in program.kinds]
    program.link(choose_panel_kernels(multipliers))
    for each in find_kernel_groups(program):
        program.link_kernel_group(each.codes, open_kernel_group(each, variant))
    adapters = None
    if max_lora_rank:
        of_heads = program.has((Code.SHRINK_HEADS,))
        program.link_adapters(choose_adapter_kernels(variant, of_heads=of_heads))
        adapters = CpuAdapters(config, program, variant.kv, max_lora_rank)
    with Forward(program, variant, list(cores)) as forward:
        runner = CpuRunner(config, forward, dtype=dtype, sampler=recorder, adapters=adapters)
        runner.warm_up(WarmupRequest(64, 512, 16, 511 * BLOCK))
        yield runner, recorder


def meets_subnormals(call: Callable[[], Any]) -> bool:
    """Return whether an operand of `call` is a subnormal number: the processor notes it, and takes
    a hundred times as long. Only x86 is asked.
    """
    if platform.machine() != "x86_64":
        call()
        return False
    libm, state = ctypes.CDLL(None), np.zeros(32, np.uint8)
    libm.fesetenv(ctypes.c_void_p(-1))  # the notes are cleared
    call()
    libm.fegetenv(ctypes.c_void_p(state.ctypes.data))
    return bool(state[28] & 2)  # of MXCSR


def stack(*parts: np.ndarray[Any, Any]) -> Stack:
    """Return matrices that are in memory alone, one below the other."""
    return Stack([PlainMatrix(part) for part in parts])
