"""A tiny model that hears and does not see, with transformers' processor of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from tgi_trio.testing.checkpoints import VOCAB_SIZE, fill_parameters, make_tokenizer
from tgi_trio.testing.wrapped_families import TEXT

TOKENS = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
TOWER = {
    **{"d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 16},
    **{"num_mel_bins": 8},
}
EXTRACTOR = {
    **{"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 8},
    **{"return_attention_mask": True},
}


def make_folder(folder: Path) -> tuple[Path, Any]:
    """Write a random model; return its folder and transformers' processor of it."""
    from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedTokenizerFast
    from transformers.models.qwen2_audio.processing_qwen2_audio import Qwen2AudioProcessor
    from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

    text = TEXT | {"model_type": "qwen2", "vocab_size": VOCAB_SIZE + len(TOKENS)}
    config = AutoConfig.for_model(
        "qwen2_audio", text_config=text, audio_config=TOWER, audio_token_index=VOCAB_SIZE
    )
    model = AutoModelForMultimodalLM.from_config(config)
    fill_parameters(model, 0, False)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    file = str(folder / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(file)
    tokenizer.add_special_tokens(list(TOKENS))
    tokenizer.save(file)
    (folder / "preprocessor_config.json").write_text(json.dumps(EXTRACTOR))
    theirs = PreTrainedTokenizerFast(tokenizer_file=file, bos_token="<s>", pad_token="</s>")
    extractor: Any = WhisperFeatureExtractor(**EXTRACTOR)
    extractor._torch_extract_fbank_features = extractor._np_extract_fbank_features
    processor: Any = Qwen2AudioProcessor(extractor, theirs)
    told = json.loads((folder / "tokenizer_config.json").read_text())
    told["chat_template"] = processor.chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder, processor
