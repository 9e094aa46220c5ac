"""InternVL as it is published: its config.json in transformers' words, and how images are made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.model.support import Asked
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.check import check_model
from tgi_trio.model.config import read_config
from tgi_trio.model.internvl_chat import find_pictures, name_as_transformers

# The shape of InternVL2.5-1B's own file, in what is read of it.
TOWER = {
    **{"model_type": "intern_vit_6b", "hidden_size": 1024, "image_size": 448, "patch_size": 14},
    **{"intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24},
    **{"norm_type": "layer_norm", "qk_normalization": False, "qkv_bias": True},
    **{"drop_path_rate": 0.0, "use_flash_attn": True, "hidden_act": "gelu"},
}
TEXT = {
    **{"model_type": "qwen2", "hidden_size": 896, "vocab_size": 151674, "eos_token_id": 151643},
    **{"num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2},
    **{"intermediate_size": 4864, "max_position_embeddings": 32768, "rope_theta": 1e6},
    **{"torch_dtype": "bfloat16", "architectures": ["Qwen2ForCausalLM"]},
}
PUBLISHED: dict[str, Any] = {
    **{"model_type": "internvl_chat", "architectures": ["InternVLChatModel"], "hidden_size": 896},
    **{"auto_map": {"AutoModel": "modeling_internvl_chat.InternVLChatModel"}, "llm_config": TEXT},
    **{"downsample_ratio": 0.5, "dynamic_image_size": True, "force_image_size": 448},
    **{"max_dynamic_patch": 12, "min_dynamic_patch": 1, "ps_version": "v2", "select_layer": -1},
    **{"template": "internvl2_5", "use_thumbnail": True, "use_backbone_lora": 0},
    **{"use_llm_lora": 0, "vision_config": TOWER, "torch_dtype": "bfloat16"},
}
ADDED = {"added_tokens_decoder": {"151645": {"content": "<|im_end|>", "special": True}}}


def write(folder: Path, values: dict[str, Any], **files: Any) -> Path:
    for name, content in {"config": values, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_its_values_are_those_of_transformers_class(tmp_path: Path) -> None:
    from transformers import InternVLConfig

    config = read_config(write(tmp_path, PUBLISHED))
    assert (config.model_type, config.text_type) == ("internvl", "qwen2")
    assert (config.dtype, config.vocab_size, config.max_positions) == ("bfloat16", 151674, 32768)
    assert config.get("tie_word_embeddings") is False
    theirs: Any = InternVLConfig()  # whose tower is that of these models, but for a bias
    named, usual = config.values["vision_config"], theirs.vision_config.to_dict()
    assert named["attention_bias"] and named["model_type"] == usual["model_type"]
    same = named.keys() - {"attention_bias", "image_size", "patch_size"}
    assert {name: named[name] for name in same} == {name: usual[name] for name in same}
    assert config.get("vision_feature_layer") == theirs.vision_feature_layer
    assert config.get("downsample_ratio") == theirs.downsample_ratio


def test_what_a_tower_does_not_say_is_as_in_its_class() -> None:
    tower = name_as_transformers({**PUBLISHED, "vision_config": {"image_size": 448}})
    assert tower["vision_config"] == {
        **{"model_type": "internvl_vision", "hidden_size": 3200, "num_hidden_layers": 48},
        **{"num_attention_heads": 25, "intermediate_size": 12800, "image_size": 448},
        **{"patch_size": 14, "num_channels": 3, "hidden_act": "gelu", "norm_type": "rms_norm"},
        **{"layer_norm_eps": 1e-6, "attention_bias": False, "use_qk_norm": True},
    }


def test_other_types_are_left_alone() -> None:
    assert name_as_transformers({"model_type": "internvl", "llm_config": {}}) == {
        **{"model_type": "internvl", "llm_config": {}},
    }


def test_images_are_made_by_what_config_json_says() -> None:
    found = find_pictures(name_as_transformers(PUBLISHED))
    said = found.image_processor
    assert said["size"] == {"height": 448, "width": 448}
    assert (said["min_patches"], said["max_patches"]) == (1, 12)
    assert found.processor["image_seq_length"] == 256
    whole = find_pictures(name_as_transformers({**PUBLISHED, "dynamic_image_size": False}))
    assert whole.image_processor["max_patches"] == 1


@pytest.mark.parametrize(
    ("whole", "tower", "said"),
    [
        ({"ps_version": "v1"}, {}, "ps_version 'v1' for internvl_chat; served is 'v2'"),
        ({"use_thumbnail": False}, {}, "use_thumbnail False"),
        ({"pad2square": True}, {}, "pad2square True"),
        ({"use_llm_lora": 16}, {}, "use_llm_lora 16"),
        ({}, {"model_type": "intern_vit_patch"}, "its vision_config 'intern_vit_patch'"),
        ({}, {"use_moe": True}, "its vision_config 'intern_vit_6b with experts'"),
        ({}, {"norm_type": "batch_norm"}, "norm_type 'batch_norm'"),
        ({}, {"qk_normalization": True, "layer_norm_eps": 1e-5}, "layer_norm_eps 1e-05"),
        ({"max_dynamic_patch": "12"}, {}, "max_dynamic_patch '12', which is no positive number"),
        ({"downsample_ratio": 0.3}, {}, "downsample_ratio 0.3, which is no 1 / N"),
        ({"downsample_ratio": "half"}, {}, "downsample_ratio 'half', which is no 1 / N"),
        ({"force_image_size": 224}, {}, "force_image_size 224, and image_size 448 of its tower"),
        ({"force_image_size": 434}, {"image_size": 434}, "that are a multiple of these"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_made_otherwise_is_refused_by_name(
    whole: dict[str, Any], tower: dict[str, Any], said: str
) -> None:
    values = name_as_transformers({**PUBLISHED, **whole, "vision_config": {**TOWER, **tower}})
    with pytest.raises(ModelLoadError) as caught:
        find_pictures(values)
    assert said in str(caught.value)


@pytest.mark.parametrize("section", ["llm_config", "vision_config"])
def test_sections_of_other_kinds_are_none(section: str) -> None:
    found = name_as_transformers({**PUBLISHED, section: ["nothing"]})
    name = {"llm_config": "text_config", "vision_config": "vision_config"}[section]
    assert not isinstance(found.get(name), dict)


def test_an_answer_ends_where_its_own_code_ends_it(tmp_path: Path) -> None:
    folder = write(tmp_path, PUBLISHED, tokenizer_config=ADDED)
    assert read_config(folder).eos_ids == (151643, 151645)
    write(folder, {**PUBLISHED, "template": "another"})
    assert read_config(folder).eos_ids == (151643,)
    write(folder, PUBLISHED, tokenizer_config={}, added_tokens={"<|im_end|>": 7})
    assert read_config(folder).eos_ids == (151643, 7)


def test_a_text_that_is_not_computed_here_is_named(tmp_path: Path) -> None:
    text = {**TEXT, "model_type": "internlm_unknown"}
    config = read_config(write(tmp_path, {**PUBLISHED, "llm_config": text}))
    save_file({"mlp1.0.weight": np.zeros(4, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match="its text is of the type 'internlm_unknown'"):
        check_model(config, Asked())
