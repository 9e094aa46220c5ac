"""Composite models (text with images or audio): their text model, and its place in checkpoints.

config.json has the text's numbers in `text_config`, without those that equal the text model's
defaults. Checkpoints have its weights under different names, which have changed over time. The text
is one of our own families, for which all other code uses only the plain names. Sources: the
configuration classes of transformers, and its table of conversions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

T = TypeVar("T")

# model_type of the composite -> that of its text, unless `text_config` states it. Only those whose
# text attends only to preceding tokens, as it does without images.
TEXT_TYPES: Final[dict[str, str]] = {
    "aya_vision": "cohere2",
    "cohere2_vision": "cohere2",
    "cohere_compass": "cohere_compass_text",
    "cosmos3_omni": "qwen3_vl_text",
    "deepseek_ocr2": "deepseek_ocr2_text",
    "deepseek_vl": "llama",
    "deepseek_vl_hybrid": "llama",
    "exaone4_5": "exaone4",
    "fast_vlm": "qwen2",
    "fuyu": "persimmon",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "glm46v": "glm4v_text",
    "glm5_next": "glm5_next_text",
    "glm4v": "glm4v_text",
    "glm4v_moe": "glm4v_moe_text",
    "glm_ocr": "glm_ocr_text",
    "glmasr": "llama",
    "glmga": "glm4v_text",
    "got_ocr2": "qwen2",
    "granite4_vision": "granite4_vision_text",
    "granite_docling": "granite_docling_text",
    "granite_speech": "granite",
    "granite_speech_plus": "granite",
    "hunyuan_vl": "hunyuan_vl_text",
    "hyperclovax_vision_v2": "hyperclovax",
    "idefics": "idefics",
    "idefics2": "mistral",
    "idefics3": "llama",
    "internvl": "qwen2",
    "janus": "llama",
    "kimi_k25": "deepseek_v3",
    "lfm2_vl": "lfm2",
    "lfm3_vl": "lfm3",
    "lighton_ocr": "qwen3",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_next_video": "llama",
    "llava_onevision": "qwen2",
    "minicpm_ocr": "qwen3_5_text",
    "minicpmv4_6": "qwen3_5_text",
    "minicpmv4_7": "qwen3_5_text",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "mistral3": "mistral",
    "mistral_large4": "mistral_large4_text",
    "mllama": "mllama_text_model",
    "muse_glimmer": "muse_glimmer_text",
    "nemotron_h_omni": "nemotron_h",
    "ovis2": "qwen2",
    "paddleocr_vl": "paddleocr_vl_text",
    "paligemma": "gemma",
    "perception_lm": "llama",
    "phi4_multimodal": "phi3",
    "pp_chart2table": "qwen2",
    "qianfan_ocr": "qwen3",
    "qwen2_5_omni_thinker": "qwen2_5_omni_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_audio": "qwen2",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_asr": "qwen3",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_omni_moe_thinker": "qwen3_omni_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen4_exp": "qwen4_exp_text",
    "smolvlm": "llama",
    "step3p7": "step3p5",
    "ultravox": "llama",
    "unlimited_ocr": "unlimited_ocr_text",
    "video_llama_3": "qwen2",
    "video_llava": "llama",
    "vipllava": "llama",
    "voxtral": "llama",
}

SIZES: Final = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
# Defaults that `text_config` may leave out, in the order of `SIZES`. None: it follows from the
# others. The families' functions have the other defaults.
DEFAULTS: Final[dict[str, tuple[int | None, ...]]] = {
    "cohere": (256000, 8192, 22528, 40, 64, None, None, 8192),
    "cohere2": (256000, 8192, 22528, 40, 64, None, None, 8192),
    "cohere_compass_text": (256000, 8192, 22528, 40, 64, None, None, 8192),
    "deepseek_ocr2_text": (102400, 4096, 11008, 32, 32, None, None, 2048),
    "deepseek_v3": (129280, 7168, 18432, 61, 128, 128, None, 4096),
    "gemma": (256000, 3072, 24576, 28, 16, 16, 256, 8192),
    "gemma2": (256000, 2304, 9216, 26, 8, 4, 256, 8192),
    "gemma3_text": (262208, 2304, 9216, 26, 8, 4, 256, 131072),
    "gemma3n_text": (262400, 2048, 16384, 35, 8, 2, 256, 32768),
    "gemma4_text": (262144, 2304, 9216, 30, 8, 4, 256, 131072),
    "gemma4_unified_text": (262144, 2304, 9216, 30, 8, 4, 256, 262144),
    "exaone4": (102400, 4096, 16384, 32, 32, 32, None, 2048),
    "glm4": (151552, 4096, 13696, 40, 32, 2, 128, 131072),
    "glm4_moe": (151552, 4096, 10944, 46, 96, 8, None, 131072),
    "glm4v_moe_text": (151424, 4096, 10944, 46, 96, 8, None, 65536),
    "glm4v_text": (151552, 4096, 13696, 40, 32, 2, None, 32768),
    "glm5_next_text": (154880, 4096, 12288, 45, 64, 64, None, 1048576),
    "glm_ocr_text": (59392, 1024, 4096, 16, 16, 8, None, 131072),
    "granite_docling_text": (133800, 1024, 2048, 28, 16, 4, None, 32768),
    "granite": (32000, 4096, 11008, 32, 32, None, None, 2048),
    "granite4_vision_text": (32000, 4096, 11008, 32, 32, None, None, 2048),
    "hunyuan_vl_text": (290943, 4096, 11008, 32, 32, None, None, 2048),
    "lfm2": (65536, 2560, 12288, 32, 32, 8, None, 128000),
    "lfm2_moe": (65536, 2048, 7168, 32, 32, 8, None, 128000),
    "lfm3": (128000, 2048, 7680, 24, 16, 4, 128, 128000),
    "llama": (32000, 4096, 11008, 32, 32, None, None, 2048),
    "llama4_text": (202048, 5120, 8192, 48, 40, 8, 128, 131072),
    "minimax_m3_vl_text": (200064, 6144, 3072, 60, 64, 4, 128, 524288),
    "mistral": (32000, 4096, 14336, 32, 32, 8, None, 131072),
    "mistral_large4_text": (204800, 6144, 24576, 72, 64, 64, None, 1048576),
    "mixtral": (32000, 4096, 14336, 32, 32, 8, None, 131072),
    "mllama_text_model": (128256, 4096, 14336, 40, 32, 8, None, 131072),
    "muse_glimmer_text": (202048, 6656, 19968, 52, 32, 2, 128, 131072),
    "nemotron_h": (131072, 4096, 21504, 52, 32, 8, 128, 4096),
    "paddleocr_vl_text": (103424, 1024, 3072, 18, 16, 2, 128, 131072),
    "persimmon": (262144, 4096, 16384, 36, 64, None, None, 16384),
    "phi3": (32064, 3072, 8192, 32, 32, None, None, 4096),
    "qwen2": (151936, 4096, 22016, 32, 32, 32, None, 32768),
    "qwen2_5_omni_text": (152064, 3584, 18944, 28, 28, 4, None, 32768),
    "qwen2_5_vl_text": (152064, 8192, 29568, 80, 64, 8, None, 32768),
    "qwen2_vl_text": (152064, 8192, 29568, 80, 64, 8, None, 32768),
    "qwen3": (151936, 4096, 22016, 32, 32, 32, 128, 32768),
    "qwen3_moe": (151936, 2048, 6144, 24, 32, 4, None, 32768),
    "qwen3_omni_moe_text": (3584, 2048, 18944, 28, 28, 4, None, 32768),
    "qwen3_vl_moe_text": (151936, 2048, 5632, 24, 16, 16, None, 128000),
    "step3p5": (128815, 4096, 11264, 45, 64, 8, 128, 128000),
    "qwen3_vl_text": (151936, 4096, 22016, 32, 32, 32, 128, 128000),
    "unlimited_ocr_text": (129280, 1280, 6848, 12, 10, 10, None, 32768),
}
# Types of texts in files that were published first -> what they are called since.
_FORMER_TYPES: Final = {"exaone4_5_text": "exaone4"}
# Tokens after the vocabulary which a text reads, for images, but never generates.
EXTRA_TOKENS: Final[Mapping[str, int]] = {"mllama_text_model": 8}

# Models that speak as well keep the part that reads and writes text in this, of a type with this
# ending, and its weights under this.
_THINKER: Final = "thinker"
# With what transformers' `generate` ends a text, where the files of such a model do not say it.
_THINKER_EOS: Final = {"qwen3_omni_moe_thinker": 151645}
# Prefixes of names in such checkpoints -> those in checkpoints of the text alone; the first match
# counts. The newer ones come first.
_PLACES: Final = (
    ("model.language_model.lm_head.", "lm_head."),
    ("model.language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("language_model.model.", "model."),
    ("language_model.backbone.", "backbone."),
    ("language_model.", "model."),
    ("text_model.", "model."),
)


def find_thinker(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the part that reads and writes text, of a model that also speaks.

    `values`: its config.json, which is returned if it is another model's. What the whole says
    beside its parts holds for this one as well.
    """
    thinker = values.get(f"{_THINKER}_config")
    if not isinstance(thinker, Mapping):
        return dict(values)
    kind = thinker.get("model_type") or f"{values.get('model_type')}_{_THINKER}"
    found = {**values, **thinker, "model_type": kind}
    text = thinker.get("text_config")
    places = (found, text if isinstance(text, Mapping) else {})
    if kind in _THINKER_EOS and all(said.get("eos_token_id") is None for said in places):
        found["eos_token_id"] = _THINKER_EOS[kind]
    return found


def is_thinker(kind: str) -> bool:
    """Return whether a type is of the part that reads and writes text of one that also speaks."""
    return kind in TEXT_TYPES and kind.endswith(f"_{_THINKER}")


def text_type(whole: str, nested: Mapping[str, Any] | None) -> str:
    """Return the type of the text model; `nested`: its config, None if there is none."""
    if whole not in TEXT_TYPES:
        return whole
    found = str((nested or {}).get("model_type") or TEXT_TYPES[whole])
    return _FORMER_TYPES.get(found, found)


def text_defaults(kind: str) -> dict[str, Any]:
    """Return the sizes that a nested config of this type may leave out."""
    pairs = zip(SIZES, DEFAULTS.get(kind, ()), strict=False)  # other types have no known defaults
    return {name: value for name, value in pairs if value is not None}


def text_name(name: str) -> str:
    """Return a weight's name in a checkpoint of the text alone.

    Other names are unchanged: those of other parts, and plain ones.
    """
    name = name.removeprefix(f"{_THINKER}.")
    for begin, plain in _PLACES:
        if name.startswith(begin):
            return plain + name[len(begin) :]
    return name


def rename_text(tensors: Mapping[str, T]) -> dict[str, T]:
    """Return a checkpoint's tensors, with the text's under plain names."""
    return {text_name(name): stored for name, stored in tensors.items()}
