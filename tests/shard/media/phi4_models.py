"""Tiny models of Phi-4-multimodal with the adapters that they bring along, as whole folders."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import peft
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from tests.router.media.torchvision_processors import whole_processor
from tgi_trio.testing.checkpoints import VOCAB_SIZE, fill_parameters, make_tokenizer

FAMILY = "phi4_multimodal"
EXTRACTOR = {"feature_size": 8}
TOKENS = ("<|image|>", "<|audio|>", "<|user|>", "<|end|>", "<|assistant|>")
# As the published files have it, without tools.
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for p in m['content'] %}{% if p['type'] == 'image' %}<|image|>"
    "{% elif p['type'] == 'audio' %}<|audio|>{% elif p['type'] == 'text' %}{{ p['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_VISION: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "image_token_id": VOCAB_SIZE},
}
_AUDIO: dict[str, Any] = {
    **{"hidden_size": 16, "intermediate_size": 16, "num_blocks": 2, "num_attention_heads": 2},
    **{"ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16, "input_size": 8},
    **{"nemo_conv_channels": 8, "bias_max_distance": 20, "audio_token_id": VOCAB_SIZE + 1},
}
# As it was published first: its tokens, a template of texts alone, and names of tensors.
FIRST_TOKENS = ("<|endoftext10|>", "<|endoftext11|>", *TOKENS[2:])
_FIRST_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_FIRST_NAMES = (
    (r"(feed_forward_(?:in|out))\.gate_up_proj", r"\1.net.0.linear"),
    (r"(feed_forward_(?:in|out))\.down_proj", r"\1.net.2"),
    (r"(encoders\.\d+\.self_attn)\.([qkv])_proj", r"\1.linear_\2"),
    (r"(encoders\.\d+\.self_attn)\.o_proj", r"\1.linear_out"),
    (r"img_projection_up", "img_projection.0"),
    (r"img_projection_down", "img_projection.2"),
    (r"global_img_feature_extensor", "glb_GN"),
    (r"sub_img_feature_extensor", "sub_GN"),
    (r"up_proj_for_speech", "audio_projection.speech.0"),
    (r"down_proj_for_speech", "audio_projection.speech.2"),
    (r"up_proj_for_vision_speech", "audio_projection.vision.0"),
    (r"down_proj_for_vision_speech", "audio_projection.vision.2"),
    (r"(model\.layers\.\d+\.(?:self_attn|mlp)\.\w+_proj)\.", r"\1.base_layer."),
)
# Names of adapters' folders, and their ranks.
_ADAPTERS = {"vision": 6, "speech": 4}


class Phi4Folder(NamedTuple):
    """A model's folder, and what says what is right."""

    folder: Path
    processor: Any
    adapted: Any  # of PEFT, around transformers' model, in float32: adapters "vision", "speech"


def make_phi4(folder: Path, *, first: bool = False, spare: int = 0) -> Phi4Folder:
    """Write a random model with its adapters; `first`: as it was published first.

    `spare`: rows of the embedding for more tokens.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
    from transformers.models.phi4_multimodal.feature_extraction_phi4_multimodal import (
        Phi4MultimodalFeatureExtractor,
    )
    from transformers.models.phi4_multimodal.processing_phi4_multimodal import (
        Phi4MultimodalProcessor,
    )

    config = AutoConfig.for_model(
        FAMILY,
        **{
            "vocab_size": VOCAB_SIZE + len(TOKENS) + spare,
            "hidden_size": 64,
            "intermediate_size": 96,
        },
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
        **{"max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": [1]},
        **{"pad_token_id": 2, "tie_word_embeddings": True, "sliding_window": None},
        **{"vision_config": _VISION, "audio_config": _AUDIO},
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    # With torch's own kernel, patches of images that fill their crops see those before them alone.
    model.set_attn_implementation("eager")
    fill_parameters(model, 0, False)
    with torch.no_grad():  # as in `make_checkpoint`
        model.get_input_embeddings().weight.mul_(0.3)
    model.save_pretrained(folder)
    told = {"image_processor_type": "Phi4MultimodalImageProcessorFast", "dynamic_hd": 6}
    (folder / "preprocessor_config.json").write_text(json.dumps(told | EXTRACTOR))
    tokenizer = PreTrainedTokenizerFast(**_write_tokenizer(folder, first))
    pixels = whole_processor(FAMILY, "Phi4Multimodal", dynamic_hd=6)
    kind: Any = Phi4MultimodalProcessor
    kind.check_argument_for_proper_class = lambda self, name, value: type(value)
    processor = kind(pixels, Phi4MultimodalFeatureExtractor(**EXTRACTOR), tokenizer)
    processor.chat_template = TEMPLATE
    model.eval().generation_config.eos_token_id = None
    adapted: Any = None
    torch.manual_seed(0)
    for name, rank in _ADAPTERS.items():
        targets = r"((layers.*self_attn\.(qkv|o)_proj)|(layers.*mlp\.(gate_up|down)_proj))"
        lora = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=rf".*{targets}")
        if adapted is None:
            adapted = peft.get_peft_model(model, lora, adapter_name=name)
        else:
            adapted.add_adapter(name, lora)
        for own, parameter in adapted.named_parameters():
            if f"lora_B.{name}" in own:
                torch.nn.init.normal_(parameter, std=0.5)
        adapted.save_pretrained(folder / f"{name}-lora", selected_adapters=[name])
        for file in (folder / f"{name}-lora" / name).iterdir():  # as they are published
            file.rename(folder / f"{name}-lora" / file.name)
    if first:
        _publish_first(folder, adapted)
    return Phi4Folder(folder, processor, adapted.eval())


def _publish_first(folder: Path, adapted: Any) -> None:
    """Write config.json and weights anew, as they were before transformers had a class."""
    values = json.loads((folder / "config.json").read_text())
    tower = values["audio_config"]
    renamed = {
        **{"hidden_size": "attention_dim", "num_attention_heads": "attention_heads"},
        **{"intermediate_size": "linear_units"},
        "depthwise_separable_out_channel": "depthwise_seperable_out_channel",
    }
    sounds = {renamed.get(name, name): value for name, value in tower.items()}
    sounds["nemo_conv_settings"] = {"conv_channels": sounds.pop("nemo_conv_channels")}
    distance = sounds.pop("bias_max_distance")
    sounds["relative_attention_bias_args"] = {"type": "t5", "t5_bias_max_distance": distance}
    values |= {
        **{"model_type": "phi4mm", "architectures": ["Phi4MMForCausalLM"], "eos_token_id": 1},
        "auto_map": {"AutoConfig": "configuration_phi4mm.Phi4MMConfig"},
        "audio_processor": {"name": "cascades", "config": sounds},
        "audio_config": {"audio_token_id": tower["audio_token_id"]},
        "embd_layer": {
            "audio_embd_layer": {"downsample_rate": 1},
            "image_embd_layer": {"crop_size": 448},
        },
    }
    (folder / "config.json").write_text(json.dumps(values))
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for found, other in _FIRST_NAMES:
            name = re.sub(found, other, name)
        tensors[name] = tensor
    for name, tensor in adapted.state_dict().items():  # which its files have as well
        if ".lora_" in name:
            tensors[name.removeprefix("base_model.model.")] = tensor.clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _write_tokenizer(folder: Path, first: bool) -> dict[str, Any]:
    """Write a tokenizer with Phi-4's tokens; return what transformers' is made of."""
    make_tokenizer(folder)
    file = str(folder / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(file)
    tokens = FIRST_TOKENS if first else TOKENS
    tokenizer.add_special_tokens(list(tokens))
    tokenizer.save(file)
    told = json.loads((folder / "tokenizer_config.json").read_text())
    more = {"image_token": tokens[0], "audio_token": tokens[1]}
    if first:
        numbered = {str(VOCAB_SIZE + i): {"content": each} for i, each in enumerate(tokens)}
        told |= {"chat_template": _FIRST_TEMPLATE, "added_tokens_decoder": numbered}
    else:
        told |= {"chat_template": TEMPLATE, "extra_special_tokens": more}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return {
        **{"tokenizer_file": file, "bos_token": "<s>", "pad_token": "</s>"},
        "extra_special_tokens": more,
    }
