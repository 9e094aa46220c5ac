"""Tiny models of Qwen3-ASR as whole folders: of transformers' class, and as published first."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import load_file, save_file

from tgi_trio.testing.checkpoints import VOCAB_SIZE, fill_parameters, make_tokenizer
from tgi_trio.testing.wrapped_families import TEXT

TOKENS = {
    **{"audio_token": "<|audio_pad|>", "audio_bos_token": "<|audio_start|>"},
    "audio_eos_token": "<|audio_end|>",
}
TURNS = ("<|im_start|>", "<|im_end|>")
EXTRACTOR = {"feature_size": 16, "n_window": 50, "min_length": 8000}
# Sounds alone are read of what users say. As it was published first it knows no answers.
_QUESTION = (
    "<|im_start|>system\n{% for m in messages if m.role == 'system' %}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ p.text }}{% endfor %}{% endif %}{% endfor %}<|im_end|>\n<|im_start|>user\n"
    "{% for m in messages if m.content is not string %}{% for p in m.content %}"
    "{% if p.type == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>{% endif %}{% endfor %}"
    "{% endfor %}<|im_end|>\n"
)
_ANSWERS = (
    "{% for m in messages if m.role == 'assistant' %}<|im_start|>assistant\n{% generation %}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endgeneration %}{% endfor %}"
)
_BEGIN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEMPLATE, FIRST_TEMPLATE = f"{_QUESTION}{_ANSWERS}{_BEGIN}", f"{_QUESTION}{_BEGIN}"
_TOWER = {
    **{"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 16},
    **{"num_mel_bins": 16, "downsample_hidden_size": 4, "output_dim": 64, "n_window_infer": 200},
}
_FIRST_NAMES = (
    (r"^model\.audio_tower\.", "thinker.audio_tower."),
    (r"^model\.multi_modal_projector\.linear_", "thinker.audio_tower.proj"),
    (r"^model\.language_model\.", "thinker.model."),
    (r"^lm_head\.", "thinker.lm_head."),
)


def make_qwen3_asr(folder: Path, *, first: bool = False) -> tuple[Any, Any]:
    """Write a random model; return transformers' processor and model of it, in float32.

    `first`: its folder is as it was published first.
    """
    from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedTokenizerFast
    from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor
    from transformers.models.qwen3_asr.processing_qwen3_asr import Qwen3ASRProcessor

    size = VOCAB_SIZE + len(TOKENS) + len(TURNS) + 1
    text = TEXT | {"model_type": "qwen3", "head_dim": 16, "vocab_size": size}
    config = AutoConfig.for_model(
        "qwen3_asr",
        **{"text_config": text, "audio_config": _TOWER, "audio_token_id": VOCAB_SIZE},
        **{"eos_token_id": 1, "pad_token_id": 2},
    )
    model: Any = AutoModelForMultimodalLM.from_config(config).float()
    fill_parameters(model, 0, False)
    with torch.no_grad():  # as in `make_checkpoint`
        model.get_input_embeddings().weight.mul_(0.3)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    file = str(folder / "tokenizer.json")
    made = tokenizers.Tokenizer.from_file(file)
    made.add_special_tokens([*TOKENS.values(), *TURNS])
    made.add_tokens(["<asr_text>"])
    made.save(file)
    told = json.loads((folder / "tokenizer_config.json").read_text())
    told |= {"chat_template": FIRST_TEMPLATE if first else TEMPLATE, "extra_special_tokens": TOKENS}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    if first:
        (folder / "preprocessor_config.json").write_text(json.dumps(EXTRACTOR))
        _publish_first(folder)
    else:
        whole = {"feature_extractor": EXTRACTOR, "processor_class": "Qwen3ASRProcessor"}
        (folder / "processor_config.json").write_text(json.dumps(whole))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=file,
        **{"bos_token": "<s>", "pad_token": "</s>", "extra_special_tokens": TOKENS},
    )
    extractor: Any = Qwen3ASRFeatureExtractor(**EXTRACTOR)
    processor = Qwen3ASRProcessor(extractor, tokenizer, chat_template=TEMPLATE)
    model.eval().generation_config.eos_token_id = None
    return processor, model


def _publish_first(folder: Path) -> None:
    """Write config.json and weights anew, as they were before transformers had a class."""
    values = json.loads((folder / "config.json").read_text())
    text = {name: value for name, value in values["text_config"].items() if name != "model_type"}
    rope = {"mrope_section": [4, 2, 2], "mrope_interleaved": True, "rope_type": "default"}
    text |= {"rope_scaling": rope, "rope_theta": text.pop("rope_parameters")["rope_theta"]}
    tower = {**values["audio_config"], "max_source_positions": 1500, "conv_chunksize": 500}
    whole = {
        **{"model_type": "qwen3_asr", "architectures": ["Qwen3ASRForConditionalGeneration"]},
        "support_languages": ["Chinese", "English"],
        "thinker_config": {
            **{"text_config": text, "audio_config": {**tower, "model_type": "qwen3_asr_audio"}},
            "audio_token_id": values["audio_token_id"],
        },
    }
    (folder / "config.json").write_text(json.dumps(whole))
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for found, other in _FIRST_NAMES:
            name = re.sub(found, other, name)
        tensors[name] = tensor
    assert all(name.startswith("thinker.") for name in tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
