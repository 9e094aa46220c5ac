"""config.json of Phi-4-multimodal as published first says what transformers' class is made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tgi_trio.model.config import read_config
from tgi_trio.model.phi4mm import name_as_transformers

# Condensed from the published file.
PUBLISHED: dict[str, Any] = {
    "_name_or_path": "Phi-4-multimodal-instruct",
    "architectures": ["Phi4MMForCausalLM"],
    "audio_processor": {
        "config": {
            **{"activation": "swish", "activation_checkpointing": {"interval": 1}},
            **{"attention_dim": 1024, "attention_heads": 16, "batch_norm": False, "causal": True},
            **{"chunk_size": -1, "depthwise_seperable_out_channel": 1024, "input_size": 80},
            **{"left_chunk": 18, "linear_units": 1536, "num_blocks": 24, "time_reduction": 8},
            "nemo_conv_settings": {"conv_channels": 1024},
            "relative_attention_bias_args": {"t5_bias_max_distance": 500, "type": "t5"},
        },
        "name": "cascades",
    },
    "auto_map": {"AutoConfig": "configuration_phi4mm.Phi4MMConfig"},
    "embd_layer": {
        "audio_embd_layer": {"compression_rate": 8, "downsample_rate": 1},
        "image_embd_layer": {"crop_size": 448, "hd_transform_order": "sub_glb"},
    },
    "eos_token_id": 199999,
    "hidden_size": 3072,
    "model_type": "phi4mm",
    "speech_lora": {"r": 320},
    "vision_lora": {"r": 256},
    "vocab_size": 200064,
}


def test_what_is_said_is_transformers(tmp_path: Path) -> None:
    """As transformers' own program converts it."""
    found = name_as_transformers(PUBLISHED)
    assert found == {
        "auto_map": PUBLISHED["auto_map"],
        "audio_config": {
            **{"activation": "swish", "chunk_size": -1, "input_size": 80, "left_chunk": 18},
            **{"num_blocks": 24, "time_reduction": 8, "hidden_size": 1024},
            **{"num_attention_heads": 16, "depthwise_separable_out_channel": 1024},
            **{"intermediate_size": 1536, "nemo_conv_channels": 1024, "bias_max_distance": 500},
            "downsample_rate": 1,
        },
        "eos_token_id": [199999, 200020],
        "hidden_size": 3072,
        "model_type": "phi4_multimodal",
        "vision_config": {"crop_size": 448},
        "vocab_size": 200064,
    }
    assert name_as_transformers({"model_type": "phi3", "a": 1}) == {"model_type": "phi3", "a": 1}
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    config = read_config(tmp_path)
    assert (config.model_type, config.text_type, config.eos_ids) == (
        *("phi4_multimodal", "phi3"),
        (199999, 200020),
    )


def test_what_says_too_little_has_no_towers_sizes() -> None:
    found = name_as_transformers({"model_type": "phi4mm", "audio_processor": None})
    assert found["audio_config"] == {"downsample_rate": 1}
    assert found["vision_config"] == {"crop_size": 448}
