"""Tiny random checkpoints of many model families, complete with a tokenizer, for tests.

transformers builds and writes them, so that what we load is what `save_pretrained` writes; it is
imported inside the functions and nowhere on the way to a served model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count, islice, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tgi_trio.testing import tiny_families, tiny_hybrids
from tgi_trio.testing.tiny_families import ABSENT

if TYPE_CHECKING:
    import torch

VOCAB_SIZE = 512
BEGIN, END, PAD = "<s>", "</s>", "<pad>"  # ids 0, 1, 2
_SPECIALS = (BEGIN, END, PAD)
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)

_IDS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_GPT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
}
_T5: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "decoder_start_token_id": 2,
}
_MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_LATENT: dict[str, Any] = _MOE | {  # DeepSeek: attention over a compressed K and V
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_local_experts": 8,  # another name of the same
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
_INDEX: dict[str, Any] = {  # prompts are longer than what a token attends to
    "index_topk": 12,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "num_local_experts": ABSENT,
    "num_experts": ABSENT,
}
# The options of a family's configuration class that differ from _COMMON; ABSENT removes one.
_FAMILY: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 48, "query_pre_attn_scalar": 24},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 48,
        "query_pre_attn_scalar": 24,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3": {},
    "olmo": {"clip_qkv": 2.0},
    "olmo2": {},
    "olmo3": {"num_hidden_layers": 4, "sliding_window": 24},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "llama4_text": {
        "num_local_experts": 4,
        "intermediate_size": 48,
        "intermediate_size_mlp": 64,
        "head_dim": 16,
        "num_hidden_layers": 3,
        "interleave_moe_layer_step": 2,
        "no_rope_layer_interval": 3,
        "attention_chunk_size": 24,
        "floor_scale": 8,
    },
    "granite": {
        "embedding_multiplier": 1.5,
        "residual_multiplier": 0.8,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    },
    "cohere": {},
    "cohere2": {"num_hidden_layers": 4, "sliding_window": 24},
    "stablelm": {"use_qkv_bias": True},
    "starcoder2": {"sliding_window": 48},
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
    },
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "head_dim": 32,
    },
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gptj": _GPT | {"rotary_dim": 8},
    "gpt_neox": {"num_key_value_heads": ABSENT},
    "phi": {},
    "xlnet": {"max_position_embeddings": ABSENT, "d_head": 16},
    "opt": {"num_key_value_heads": ABSENT, "intermediate_size": ABSENT, "ffn_dim": 128}
    | {"word_embed_proj_dim": 64},
    "bloom": {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "n_layer": 2, "n_head": 4},
    "falcon": {"num_key_value_heads": ABSENT, "intermediate_size": ABSENT},
    "codegen": _GPT | {"rotary_dim": 8},
    "deepseek_v2": _LATENT | {"topk_method": "group_limited_greedy"},
    "deepseek_v3": _LATENT,
    "sarvam_mla": _LATENT
    | dict.fromkeys(("num_local_experts", "num_experts", "num_key_value_heads"), ABSENT)
    | {"q_lora_rank": None, "n_group": ABSENT, "topk_group": ABSENT},
    "axk1": _LATENT | {"num_local_experts": ABSENT, "num_experts": ABSENT},
    "axk2": _LATENT | _INDEX | {"num_hidden_layers": 3, "gated_norm_rank": 8},
    "longcat_flash": {
        "num_layers": 2,
        "head_dim": 8,  # what turns
        "ffn_hidden_size": 128,
        "expert_ffn_hidden_size": 32,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "moe_topk": 3,
        "routed_scaling_factor": 1.5,
        "q_lora_rank": 32,
        "kv_lora_rank": 48,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "num_key_value_heads": 4,
        "num_hidden_layers": ABSENT,
        "intermediate_size": ABSENT,
    },
    "deepseek_v32": _LATENT | _INDEX,
    "glm_moe_dsa": _LATENT
    | _INDEX
    | {
        "num_hidden_layers": 3,
        "n_group": 1,
        "topk_group": 1,
        "indexer_types": ["full", "shared", "full"],
    },
    "hy_v4": _LATENT
    | _INDEX
    | {
        "num_hidden_layers": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": ABSENT,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "indexer_types": ["full", "full", "shared", "full"],
        "swiglu_limit": 0.7,
        "hc_magnitude": 1.5,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 48,
        "head_dim": 16,
        "sliding_window": 24,
    },
    "bart": {
        "vocab_size": VOCAB_SIZE,
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "max_position_embeddings": 512,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
    },
    "dbrx": {
        "vocab_size": VOCAB_SIZE,
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 512,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "phimoe": _MOE | {"attention_bias": True, "lm_head_bias": True},
    "t5": _T5,
    "mt5": _T5,
    "umt5": _T5,
    "mpt": {
        "vocab_size": VOCAB_SIZE,
        "d_model": 64,
        "n_layers": 2,
        "n_heads": 4,
        "max_seq_len": 512,
    },
}
# Buffers that a model is trained with.
_FILLED = (
    *("correction_bias", "expert_bias", "layer_scalar", "rotary_emb.alpha"),
    *("running_mean", "running_var"),
)
_SCALES = (
    *("layer_scalar", "router.scale", "softmax_scaling.scale", "per_expert_scale"),
    *("output_scale", "hc.scale", "hc_scale", "running_var"),
)  # near one, as norms are
# Parts of names of tensors that are filled like embeddings.
_EMBEDDINGS = ("emb", "wte", "wpe")
# Families that multiply embeddings by the square root of their width.
_SCALED_EMBEDDINGS = ("gemma3n_text", "gemma4_text", "gemma4_unified_text")
# Families that store norms less one.
_MINUS_ONE_NORMS = (
    "gemma", "gemma2", "gemma3_text", "recurrent_gemma", "vaultgemma", "minimax_m3_vl_text",
)  # fmt: skip


def tiny_values(family: str) -> dict[str, Any]:
    """Return the options of a family's smallest configuration; ABSENT: its class' default."""
    special = (_FAMILY | tiny_hybrids.FAMILIES | tiny_families.FAMILIES).get(family, {})
    return ({} if "vocab_size" in special else _COMMON) | special


def make_checkpoint(
    folder: Path, family: str, *, seed: int = 0, dtype: str = "float32", **overrides: Any
) -> Path:
    """Write a seeded random checkpoint of `family` (a model_type of transformers) to `folder`.

    The same arguments give the same tensors. Weights are scaled so that greedy output varies
    instead of repeating one token. `overrides` change the configuration. Returns `folder`.
    """
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSeq2SeqLM,
    )

    values = tiny_values(family) | overrides
    values = {name: value for name, value in values.items() if value is not ABSENT}
    config = AutoConfig.for_model(family, **(_IDS | values))
    kind: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    if type(config) not in kind._model_mapping:  # a model that reads images, or its text model
        kind = AutoModelForImageTextToText
    model = kind.from_config(config)
    fill_parameters(model, seed, family in _MINUS_ONE_NORMS)
    with torch.no_grad():
        if config.tie_word_embeddings:
            # With a large tied embedding, every token would predict itself; Gemma also multiplies
            # its embeddings by the square root of their width.
            scale = 0.04 if family in (*_MINUS_ONE_NORMS, *_SCALED_EMBEDDINGS) else 0.3
            model.get_input_embeddings().weight.mul_(scale)
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(folder)
    make_tokenizer(folder)
    return folder


def poison_token(folder: Path, token: int) -> None:
    """Change a checkpoint of one file so that a sequence's logits are NaN once it has `token`.

    Raises ValueError for a tied head, with which every sequence would have a NaN.
    """
    import torch
    from safetensors.torch import load_file, save_file

    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    if "lm_head.weight" not in tensors:
        raise ValueError(f"{file} has no lm_head.weight: its head is tied to the embedding")
    tensors["model.embed_tokens.weight"][token] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})


def make_tokenizer(folder: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """Write a byte-level BPE tokenizer of `vocab_size` entries, which decodes any text unchanged.

    After the bytes come words of common letters, the shortest first, so every id is readable text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    base = [*_SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = list(islice(_merges(), vocab_size - len(base)))
    tokens = base + [a + b for a, b in merges]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    tokenizer.add_special_tokens(list(_SPECIALS))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, 0)]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _merges() -> Iterator[tuple[str, str]]:
    """Yield every word of two letters, of three, ... as (all but the last letter, last letter)."""
    for length in count(2):
        for word in product("etaoinshrdlucmfw", repeat=length):
            yield "".join(word[:-1]), word[-1]


def fill_parameters(model: Any, seed: int, minus_one: bool) -> None:
    """Draw all parameters of a transformers model; `minus_one`: its norms are stored less one.

    The same model and seed give the same numbers.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    tables = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding)
    }
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):  # each token's experts, which differ
                count = model.config.n_routed_experts
                drawn = torch.rand(len(buffer), count, generator=generator).argsort(dim=-1)
                buffer.copy_(drawn[:, : buffer.shape[1]])
        biases = (pair for pair in model.named_buffers() if pair[0].endswith(_FILLED))
        for name, parameter in (*model.named_parameters(), *biases):
            embedding = name in tables or any(part in name for part in _EMBEDDINGS)
            _fill(name, parameter, generator, minus_one, embedding)


def _fill(
    name: str, parameter: torch.Tensor, generator: torch.Generator, minus_one: bool, embedding: bool
) -> None:
    """Draw one parameter: matrices preserve the size of activations, norms are near one."""
    import torch

    noise = torch.randn(parameter.shape, generator=generator)
    if parameter.dim() >= 2:
        # T5 and GPT-Neo keep the scale of their scores in these weights
        if "Attention.q." in name or "attn.attention.q_proj" in name:
            noise = noise / 4.0
        if "shared_transformer" in name:  # Zamba2's blocks have no residual connection
            noise = noise / 2.0
        # Towers of timm have convolutions, one behind the other.
        reads = parameter[0].numel() if "timm_model." in name else parameter.shape[-1]
        parameter.copy_(noise if embedding else noise * (2.0 / reads**0.5))
    elif "norm" in name or "ln_" in name or name.endswith(_SCALES):
        centre = 0.0 if name.endswith("bias") or minus_one else 1.0
        centre = 0.2 if "word_embeddings_layernorm.weight" in name else centre
        centre = 0.3 if name.endswith("softmax_scaling.scale") else centre  # times a logarithm
        parameter.copy_(centre + 0.1 * noise)
    else:
        parameter.copy_(0.1 * noise)
