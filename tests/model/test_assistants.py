"""What the folder of an assistant of Gemma 4 says, and what is refused of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.shard.speculation.assistant_support import HIDDEN, VOCAB, WINDOW, assistant, gemma4
from tgi_trio.errors import ModelLoadError
from tgi_trio.model.config import read_config
from tgi_trio.model.facts import read_model_facts
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.specs.decoder import DecoderSpec
from tgi_trio.model.speculators.assistant import AssistantSpec
from tgi_trio.model.speculators.recognise import count_drafts, count_heads, find_kind, read_heads
from tgi_trio.settings.records import Options
from tgi_trio.settings.resolve import resolve
from tgi_trio.start.checks import check_start


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gemma4(tmp_path_factory.mktemp("base"))


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    return assistant(tmp_path, base)


def read(folder: Path) -> AssistantSpec:
    spec = read_heads(folder, hidden=HIDDEN, vocabulary=VOCAB)
    assert isinstance(spec, AssistantSpec)
    return spec


def spec_of(base: Path) -> DecoderSpec:
    spec = decoder_spec(read_config(base))
    assert spec is not None
    return spec


def test_it_reads_the_last_layers_with_keys_and_values(base: Path, folder: Path) -> None:
    spec, model = read(folder), spec_of(base)
    assert (spec.clusters, spec.clusters_used) == (32, 4)
    found = [(layer.reads_layer, layer.window) for layer in spec.reading(model).layers]
    # The model's layers alternate; the last two have no K and V of their own.
    assert found == [(0, WINDOW + 1)] * 3 + [(1, 0)]


def test_it_drafts_as_many_as_are_requested(base: Path, folder: Path) -> None:
    kind = find_kind(folder)
    assert kind is not None and kind.word == "gemma4_assistant"
    assert count_heads(folder) == 4 and count_drafts(folder, 9) == 9
    settings = resolve(Options(draft_model=folder), read_model_facts(base))
    assert (settings.drafter, settings.speculate) == ("gemma4_assistant", 4)
    assert check_start(settings, read_config(base)) == []


HOSTILE: dict[str, tuple[Callable[[dict[str, Any], dict[str, torch.Tensor]], object], str]] = {
    "another hidden size": (
        lambda config, tensors: config.update(backbone_hidden_size=1536),
        r"made for another model: its backbone_hidden_size is 1536, the model's is 64",
    ),
    "another vocabulary": (
        lambda config, tensors: config["text_config"].update(vocab_size=1024),
        r"made for another model: its vocab_size is 1024, the model's is 512",
    ),
    "no hidden size": (
        lambda config, tensors: config.update(backbone_hidden_size="large"),
        r"says backbone_hidden_size 'large'; an assistant of Gemma 4 needs a number above 0",
    ),
    "experts": (
        lambda config, tensors: config["text_config"].update(enable_moe_block=True),
        r"says enable_moe_block True; an assistant of Gemma 4 has none",
    ),
    "embeddings of layers, which are the default": (
        lambda config, tensors: config["text_config"].pop("hidden_size_per_layer_input"),
        r"says hidden_size_per_layer_input None; an assistant of Gemma 4 has none",
    ),
    "attention both ways": (
        lambda config, tensors: config["text_config"].update(use_bidirectional_attention="all"),
        r"says use_bidirectional_attention 'all', which is not served",
    ),
    "groups that are no equal parts": (
        lambda config, tensors: config.update(num_centroids=30),
        r"4 of 30 equal groups \(centroid_intermediate_top_k, num_centroids\), and there are 512",
    ),
    "a tensor that is missing": (
        lambda config, tensors: tensors.pop("model.layers.2.self_attn.q_proj.weight"),
        r"'model\.layers\.2\.self_attn\.q_proj\.weight' is missing",
    ),
    "a tensor too many": (
        lambda config, tensors: tensors.update({"model.layers.0.gate.weight": torch.ones(16)}),
        r"'model\.layers\.0\.gate\.weight' in .* is no part of an assistant of Gemma 4",
    ),
    "another shape": (
        lambda config, tensors: tensors.update({"pre_projection.weight": torch.zeros(32, 64)}),
        r"'pre_projection\.weight'.* shape \[32, 64\].*need \[32, 128\]",
    ),
    "a vector of another size": (
        lambda config, tensors: tensors.update({"model.norm.weight": torch.zeros(33)}),
        r"'model\.norm\.weight'.* shape \[33\].*need \[32\]",
    ),
    "tokens that the model has not": (
        lambda config, tensors: tensors["masked_embedding.token_ordering"].__setitem__(3, VOCAB),
        r"'masked_embedding\.token_ordering' in .* names tokens 0 to 512; the model has 0 to 511",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_no_assistant_of_the_model_is_refused(what: str, folder: Path) -> None:
    change, message = HOSTILE[what]
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message):
        read(folder)


def test_keys_and_values_of_another_model_are_refused(base: Path, folder: Path) -> None:
    model, spec = spec_of(base), read(folder)
    before = "made for another model: its layer 0 has 8 heads of 32 .* with a window, and there the"
    with pytest.raises(ModelLoadError, match=f"{before} model has none"):
        spec.reading(replace(model, layers=model.layers[1:2]))
    with pytest.raises(ModelLoadError, match=f"{before} model has 2 of 48"):
        spec.reading(replace(model, head_dim=48))
