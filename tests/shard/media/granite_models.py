"""Tiny models of Granite Speech with the adapter that they bring along, as whole folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import peft
import tokenizers
import torch

from tests.router.media.torchaudio_processors import make_granite_extractor
from tgi_trio.testing.checkpoints import VOCAB_SIZE, fill_parameters, make_tokenizer
from tgi_trio.testing.wrapped_families import TEXT

EXTRACTOR = {"n_mels": 8}
# Condensed from Granite 3.3's, which takes texts alone.
TEMPLATE = (
    "{% for m in messages %}<|start_of_role|>{{ m['role'] }}<|end_of_role|>{{ m['content'] }}"
    "<|end_of_text|>\n{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant"
    "<|end_of_role|>{% endif %}"
)
_ENCODER: dict[str, Any] = {
    **{"input_dim": 16, "hidden_dim": 16, "num_layers": 2, "num_heads": 2, "dim_head": 8},
    **{"context_size": 20, "max_pos_emb": 24, "conv_kernel_size": 5, "output_dim": 8},
}
_PROJECTOR: dict[str, Any] = {
    **{"model_type": "blip_2_qformer", "hidden_size": 16, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "intermediate_size": 16},
}


class GraniteFolder(NamedTuple):
    """A model's folder, and what says what is right."""

    folder: Path
    processor: Any
    adapted: Any  # of PEFT, around transformers' model, in float32


def make_granite(folder: Path, family: str = "granite_speech", **text: Any) -> GraniteFolder:
    """Write a random model with its adapter; `text`: of its text."""
    from transformers import AutoConfig, AutoModelForMultimodalLM, PreTrainedTokenizerFast
    from transformers.models.granite_speech.processing_granite_speech import GraniteSpeechProcessor

    plus = family.endswith("plus")
    options = TEXT | {
        **{"model_type": "granite", "vocab_size": VOCAB_SIZE + 4},
        **{"embedding_multiplier": 12.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
        **text,
    }
    config = AutoConfig.for_model(
        family,
        text_config=options,
        encoder_config=_ENCODER | ({"cat_hidden_layers": [1]} if plus else {}),
        projector_config=_PROJECTOR | {"encoder_hidden_size": 32 if plus else 16},
        audio_token_index=VOCAB_SIZE,
    )
    model: Any = AutoModelForMultimodalLM.from_config(config)
    fill_parameters(model, 0, False)
    with torch.no_grad():  # as in `make_checkpoint`
        model.get_input_embeddings().weight.mul_(0.03)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(EXTRACTOR))
    processor = GraniteSpeechProcessor(
        make_granite_extractor(**EXTRACTOR), PreTrainedTokenizerFast(**_write_tokenizer(folder))
    )
    processor.chat_template = TEMPLATE
    model.eval().generation_config.eos_token_id = None
    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    adapted: Any = peft.get_peft_model(model, lora)
    torch.manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=1.0)
    adapted.save_pretrained(folder)
    return GraniteFolder(folder, processor, adapted.eval())


def _write_tokenizer(folder: Path) -> dict[str, Any]:
    """Write a tokenizer with Granite's tokens; return what transformers' is made of."""
    make_tokenizer(folder)
    file = str(folder / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(file)
    roles = ["<|audio|>", "<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"]
    tokenizer.add_special_tokens(roles)
    tokenizer.save(file)
    told = json.loads((folder / "tokenizer_config.json").read_text())
    told["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return {"tokenizer_file": file, "bos_token": "<s>", "pad_token": "</s>"}
