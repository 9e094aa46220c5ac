"""What Mistral Large 4's config.json says, and what of it is not ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.model.support import write_json
from tgi_trio.model.checkpoint_tensors import read_tensors
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.specs.decoder import DecoderSpec, LatentSpec
from tgi_trio.testing.wrapped_checkpoints import make_wrapped

SHARED: dict[str, Any] = {
    "num_hidden_layers": 6,
    "no_rope_layers": [1, 1, 0, 1, 0, 1],
    "kv_source_layers": [0, 1, 2, 1, 2, 1],
    "indexer_types": ["full", "full", "full", "full", "shared", "full"],
}


def spec_of(folder: Path, text: dict[str, Any]) -> DecoderSpec | None:
    write_json(folder, {"model_type": "mistral_large4", "text_config": text})
    return decoder_spec(read_config(folder))


@pytest.mark.parametrize(
    "said",
    [
        {},
        SHARED,
        {"index_topk_freq": 3, "num_hidden_layers": 7, "no_rope_layer_interval": 2},
        {"index_topk_pattern": "FSF", "num_hidden_layers": 3, "first_k_dense_replace": 2},
    ],
    ids=["nothing", "shared", "numbers", "pattern"],
)
def test_a_config_says_what_transformers_makes_of_it(tmp_path: Path, said: dict[str, Any]) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model("mistral_large4_text", **said).to_dict()
    found = spec_of(tmp_path / "published", {"model_type": "mistral_large4_text"} | said)
    assert found is not None and found == spec_of(tmp_path / "today", theirs)


def test_layers_read_the_latents_of_others(tmp_path: Path) -> None:
    """Behind those lie the index keys of all that read them, and choose for themselves."""
    found = spec_of(tmp_path, SHARED)
    assert found is not None
    assert [layer.reads_layer for layer in found.layers] == [None, None, None, 1, 2, 1]
    assert [layer.index_place for layer in found.layers] == [0, 0, 0, 1, 0, 2]
    widths = [found.sizes(layer).dim for layer in found.layers]
    whole, still = 512 + 64, 512
    assert widths == [whole + 128, *[whole + 3 * 128, still + 128] * 2, whole + 3 * 128]


def test_what_does_not_turn_has_more_of_the_latent(tmp_path: Path) -> None:
    found = spec_of(tmp_path, SHARED)
    assert found is not None
    own = [found.latent_of(layer) for layer in found.layers]
    sizes = [(each.plain_dim, each.rotary_dim) for each in own if isinstance(each, LatentSpec)]
    assert sizes == [(64, 64), (64, 64), (128, 0), (64, 64), (128, 0), (64, 64)]
    scales = {layer.scale for layer in found.layers}
    assert scales == {128**-0.5}


@pytest.mark.parametrize(
    "changes",
    [
        {"n_group": 4, "topk_group": 2},
        {"q_lora_rank": 1536},
        {"indexer_types": ["shared"] + ["full"] * 5},
        # transformers reads the latents that were made last, of those that turn or do not.
        {"kv_source_layers": [0, 1, 2, 0, 2, 1]},
        {"kv_source_layers": [0, 1, 2, 2, 2, 1]},
    ],
    ids=str,
)
def test_other_variants_are_none_of_ours(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert spec_of(tmp_path, SHARED | changes) is None


def test_tensors_have_the_names_of_transformers_modules(tmp_path: Path) -> None:
    """Those of published files, which save_pretrained writes as well, are Mistral's own."""
    folder = make_wrapped(tmp_path, "mistral_large4")
    names = set(read_tensors(read_config(folder)))
    place = "model.layers.0.self_attn.indexer."
    assert {f"{place}softmax_scaling.scale", f"{place}q_input_norm.bias", "lm_head.weight"} <= names
    assert {"model.rotary_emb.alpha", "model.layers.1.mlp.experts.3.down_proj.weight"} <= names
    assert not any(name.startswith("layers.") for name in names)
