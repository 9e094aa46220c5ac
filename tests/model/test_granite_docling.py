"""The text of Granite Docling, where its config.json leaves out what its class has anyhow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec


def test_what_is_not_said_is_as_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model("granite_docling").get_text_config(decoder=True)
    values = {"model_type": "granite_docling", "text_config": {}, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = read_config(tmp_path)
    spec = decoder_spec(config)
    assert spec is not None and config.text_type == "granite_docling_text"
    assert (spec.vocab_size, spec.hidden_size) == (theirs.vocab_size, theirs.hidden_size)
    assert (spec.heads, spec.kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert len(spec.layers) == theirs.num_hidden_layers and spec.norm_eps == theirs.rms_norm_eps
    assert spec.embedding_scale == theirs.embedding_multiplier
    assert spec.residual_scale == theirs.residual_multiplier
    assert spec.layers[0].scale == theirs.attention_multiplier
    assert spec.logit_scale == pytest.approx(1 / theirs.logits_scaling)
    assert spec.tied_head == theirs.tie_word_embeddings
