"""Tiny models that hear and do not see, with transformers' processors of them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch

from tests.router.text.tekken_cases import SPECIAL, make_tekken
from tgi_trio.router.text.tekken import convert_tekken
from tgi_trio.testing.checkpoints import VOCAB_SIZE, fill_parameters, make_tokenizer
from tgi_trio.testing.wrapped_families import TEXT

EXTRACTOR = {
    **{"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 8},
    **{"return_attention_mask": True},
}


class Family(NamedTuple):
    """A type, beside its text."""

    tokens: tuple[str, str, str]  # of a sound, and around it
    tower: dict[str, Any]
    processor: str  # transformers' class
    text: dict[str, Any]
    token_name: str  # of the first one's id in config.json


FAMILIES = {
    "qwen2_audio": Family(
        ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
        {
            **{"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2},
            **{"encoder_ffn_dim": 16, "num_mel_bins": 8},
        },
        *("Qwen2AudioProcessor", {"model_type": "qwen2"}, "audio_token_index"),
    ),
    "glmasr": Family(
        ("<|pad|>", "<|begin_of_audio|>", "<|end_of_audio|>"),
        {
            **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"intermediate_size": 64, "num_mel_bins": 8},
        },
        "GlmAsrProcessor",
        {"model_type": "llama", "max_position_embeddings": 1024},
        "audio_token_id",
    ),
    "voxtral": Family(
        ("[AUDIO]", "[BEGIN_AUDIO]", ""),
        {
            **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"intermediate_size": 320, "num_mel_bins": 8},
        },
        "VoxtralProcessor",
        {"model_type": "llama", "max_position_embeddings": 1024},
        "audio_token_id",
    ),
}
_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{% if p.type == 'text' %}"
    "{{ p.text }}{% else %}<|begin_of_audio|><|pad|><|end_of_audio|>{% endif %}{% endfor %}"
    "{% endfor %}"
)


def make_processor(family: str, tokenizer: Any) -> Any:
    """Return transformers' processor, whose features are those without torch."""
    from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

    module = f"transformers.models.{family}.processing_{family}"
    extractor: Any = WhisperFeatureExtractor(**EXTRACTOR)
    extractor._torch_extract_fbank_features = extractor._np_extract_fbank_features
    made = getattr(importlib.import_module(module), FAMILIES[family].processor)
    template = {"chat_template": _TEMPLATE} if family == "glmasr" else {}
    return made(extractor, tokenizer, **template)


def make_folder(folder: Path, family: str) -> tuple[Path, Any]:
    """Write a random model; return its folder and transformers' processor of it."""
    from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedTokenizerFast

    row = FAMILIES[family]
    tekken = make_tekken("v7") if family == "voxtral" else None
    size, token = VOCAB_SIZE + len(row.tokens), VOCAB_SIZE
    if tekken is not None:
        size, token = tekken["config"]["default_vocab_size"], SPECIAL.index("[AUDIO]")
    text = TEXT | row.text | {"vocab_size": size}
    whole: dict[str, Any] = {"text_config": text, "audio_config": row.tower}
    config = AutoConfig.for_model(family, **whole | {row.token_name: token})
    model = AutoModelForMultimodalLM.from_config(config)
    fill_parameters(model, 0, False)
    if getattr(config, "tie_word_embeddings", False):
        with torch.no_grad():  # as in `make_checkpoint`
            model.get_input_embeddings().weight.mul_(0.3)
    model.save_pretrained(folder)
    if tekken is not None:  # as it is published: there is no other tokenizer, and no template
        (folder / "tekken.json").write_text(json.dumps(tekken))
        (folder / "preprocessor_config.json").write_text(json.dumps(EXTRACTOR))
        made = tokenizers.Tokenizer.from_str(json.dumps(convert_tekken(tekken)))
        return folder, make_processor(family, PreTrainedTokenizerFast(tokenizer_object=made))
    make_tokenizer(folder)
    file = str(folder / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(file)
    tokenizer.add_special_tokens(list(row.tokens))
    tokenizer.save(file)
    theirs = PreTrainedTokenizerFast(tokenizer_file=file, bos_token="<s>", pad_token="</s>")
    processor = make_processor(family, theirs)
    if family == "qwen2_audio":
        (folder / "preprocessor_config.json").write_text(json.dumps(EXTRACTOR))
    else:
        whole = {"audio_token": row.tokens[0], "feature_extractor": EXTRACTOR}
        (folder / "processor_config.json").write_text(json.dumps(whole))
    told = json.loads((folder / "tokenizer_config.json").read_text())
    told["chat_template"] = processor.chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder, processor
