"""What a speculator's folder says, and what is refused of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.shard.speculation.eagle_support import DRAFT_TOKENS, TARGET, eagle, eagle_one
from tests.shard.speculation.heads_support import HEADS, medusa, mlp_speculator, vllm_medusa
from tgi_trio import demo
from tgi_trio.errors import ConfigurationError, ModelLoadError
from tgi_trio.hub.resolve import Served, resolve_drafter, resolve_served
from tgi_trio.model.facts import read_model_facts
from tgi_trio.model.speculators.eagle_one import EagleOneSpec
from tgi_trio.model.speculators.recognise import (
    base_of_heads,
    count_drafts,
    count_heads,
    find_kind,
    read_heads,
)
from tgi_trio.model.speculators.spec import EagleSpec, MedusaSpec, MlpSpec
from tgi_trio.settings.records import Options
from tgi_trio.settings.resolve import DRAFTED, resolve
from tgi_trio.shard.checkpoint.heads import read_token_map

HIDDEN, VOCAB = 32, 96
EAGLE_VOCAB = 512


def read(folder: Path) -> Any:
    return read_heads(folder, hidden=HIDDEN, vocabulary=VOCAB)


def test_formats_are_told_apart_by_their_tensors(tmp_path: Path) -> None:
    base = tmp_path / "base"
    one = read(medusa(tmp_path / "1", base, HIDDEN, VOCAB, layers=1, own=True))
    two = read(medusa(tmp_path / "2", base, HIDDEN, VOCAB, layers=2, own=False))
    other = read(vllm_medusa(tmp_path / "v", base, HIDDEN, VOCAB))
    mlp = read(mlp_speculator(tmp_path / "m", base, HIDDEN, VOCAB, tied=True))
    assert isinstance(one, MedusaSpec) and not one.shares_head and one.heads == HEADS
    assert isinstance(two, MedusaSpec) and two.shares_head and two.layers == 2
    assert isinstance(other, MedusaSpec) and other.token_map == "token_map"
    ids = read_token_map(other, VOCAB)
    assert ids is not None and ids.tolist() == list(range(5, 5 + 3 * (VOCAB // 4), 3))
    assert isinstance(mlp, MlpSpec) and mlp.tied and mlp.heads == HEADS


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = mlp_speculator(tmp_path, tmp_path, HIDDEN, VOCAB, tied=False)
    tensors = load_file(folder / "model.safetensors")
    del tensors["speculator.proj.1.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"'speculator\.proj\.1\.weight' is missing"):
        read(folder)


def test_tokens_that_the_model_has_not_are_refused(tmp_path: Path) -> None:
    spec = read(vllm_medusa(tmp_path, tmp_path, HIDDEN, VOCAB))
    with pytest.raises(ModelLoadError, match="the model has 0 to 49"):
        read_token_map(spec, 50)


@pytest.mark.parametrize(
    "config",
    [
        {"speculators_model_type": "eagle", "model_type": "speculator"},
        {"architectures": ["EAGLEModel"], "model_type": "llama"},
    ],
)
def test_other_kinds_of_eagle_are_refused_with_what_is_served(
    config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"fusion_fc.weight": torch.zeros(4, 8)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"EAGLE speculator.*served are Medusa heads.*EAGLE-3"):
        find_kind(tmp_path)


def test_a_first_eagle_is_known_by_its_tensors_however_it_is_stored(tmp_path: Path) -> None:
    folder = eagle_one(tmp_path, tmp_path, EAGLE_VOCAB, biased=True)
    tensors = load_file(folder / "model.safetensors")
    spec = read_heads(folder, hidden=TARGET, vocabulary=EAGLE_VOCAB)
    assert isinstance(spec, EagleOneSpec) and spec.taps(8) == (8,)
    assert "embed_tokens.weight" not in spec.tensors  # the model's own is read
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")  # as its authors publish it
    kind = find_kind(resolve_drafter(str(folder)))
    assert kind is not None and kind.word == "eagle"
    config = json.loads((folder / "config.json").read_text())
    for renamed in ({"model_type": "eagle", "model": config}, {"architectures": ["EAGLEModel"]}):
        (folder / "config.json").write_text(json.dumps(config | renamed))
        assert find_kind(folder) is kind
        read_heads(folder, hidden=TARGET, vocabulary=EAGLE_VOCAB)


Changes = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]


def check_refused(folder: Path, change: Changes, said: str) -> None:
    """A drafter with other values in config.json, or other tensors, is refused with a sentence."""
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    change(config, tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=said):
        read_heads(folder, hidden=TARGET, vocabulary=EAGLE_VOCAB)


OTHERS: dict[str, tuple[Changes, str]] = {
    "another hidden size": (
        lambda config, tensors: config.update(hidden_size=128),
        r"made for another model: its hidden_size is 128, the model's is 64",
    ),
    "another vocabulary": (
        lambda config, tensors: config.update(vocab_size=32000),
        r"made for another model: its vocab_size is 32000, the model's is 512",
    ),
    "a norm": (
        lambda config, tensors: tensors.update({"layers.0.input_layernorm.weight": torch.ones(64)}),
        r"'layers\.0\.input_layernorm\.weight' in .* is no part of an EAGLE drafter of one layer",
    ),
    "a tensor that is missing": (
        lambda config, tensors: tensors.pop("layers.0.mlp.up_proj.weight"),
        r"'layers\.0\.mlp\.up_proj\.weight' is missing",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_first_eagle_of_another_shape_is_refused(what: str, tmp_path: Path) -> None:
    check_refused(eagle_one(tmp_path, tmp_path, EAGLE_VOCAB), *OTHERS[what])


def test_eagle_3_is_read_as_its_authors_write_it_and_as_speculators_does(tmp_path: Path) -> None:
    theirs = eagle(tmp_path / "1", tmp_path, EAGLE_VOCAB, taps=(2, 4, 5))
    library = eagle(tmp_path / "2", tmp_path, EAGLE_VOCAB, taps=(2, 4, 5), speculators=True)
    for folder, normed in ((theirs, False), (library, True)):
        spec = read_heads(folder, hidden=TARGET, vocabulary=EAGLE_VOCAB)
        assert isinstance(spec, EagleSpec) and spec.norms_residual is normed
        assert spec.taps(8) == (2, 4, 5)
        ids = read_token_map(spec, EAGLE_VOCAB)
        assert ids is not None and len(ids) == DRAFT_TOKENS and (ids[1:] > ids[:-1]).all()
        assert base_of_heads(folder) == str(tmp_path)
        with pytest.raises(ModelLoadError, match=r"layers \[2, 4, 5\].*the model has 4 layers"):
            spec.taps(4)
    assert (count_heads(theirs), count_heads(library)) == (4, 3)
    assert count_drafts(library, 7) == 7  # it goes on from its own drafts


HOSTILE: dict[str, tuple[Callable[[dict[str, Any], dict[str, torch.Tensor]], object], str]] = {
    "tokens that the model has not": (
        lambda config, tensors: tensors["d2t"].__setitem__(7, EAGLE_VOCAB),
        r"'d2t' in .* names tokens \d+ to \d+; the model has 0 to 511",
    ),
    "a map of another length": (
        lambda config, tensors: tensors.update(d2t=tensors["d2t"][:-1].clone()),
        r"'d2t'.* shape \[299\], but the head has 300 rows",
    ),
    "a map of no numbers": (
        lambda config, tensors: tensors.update(d2t=tensors["d2t"].float()),
        r"'d2t'.* is of type F32; token ids are one of",
    ),
    "another vocabulary": (
        lambda config, tensors: config.update(vocab_size=32000),
        r"made for another model: its vocab_size is 32000, the model's is 512",
    ),
    "another hidden size": (
        lambda config, tensors: tensors.update({"fc.weight": torch.zeros(64, 96)}),
        r"'fc\.weight'.* shape \[64, 96\].*need \[64, 192\]",
    ),
    "a tensor that is missing": (
        lambda config, tensors: tensors.pop("midlayer.mlp.up_proj.weight"),
        r"'midlayer\.mlp\.up_proj\.weight' is missing",
    ),
    "a tensor too many": (
        lambda config, tensors: tensors.update(
            {"midlayer.self_attn.q_norm.weight": torch.ones(16)}
        ),
        r"q_norm\.weight' in .* is no part of an EAGLE-3 drafter",
    ),
    "two layers": (
        lambda config, tensors: config.update(num_hidden_layers=2),
        r"has 2 layers with 'silu'; served are",
    ),
    "no number of heads": (
        lambda config, tensors: config.update(num_attention_heads="many"),
        r"says num_attention_heads 'many'; an EAGLE drafter needs a number",
    ),
    "a norm that is missing": (
        lambda config, tensors: config.update(norm_before_fc=True),
        r"'input_norm\.weight' is missing",
    ),
    "two norms in one place": (
        lambda config, tensors: config.update(norm_before_fc=True, fc_norm=True),
        r"says norm_before_fc and fc_norm, which exclude each other",
    ),
    "a norm without a word": (
        lambda config, tensors: tensors.update({"fc_norm.0.weight": torch.ones(64)}),
        r"'fc_norm\.0\.weight' in .* is no part of an EAGLE-3 drafter",
    ),
    "a window of no size": (
        lambda config, tensors: config.update(layer_types=["sliding_attention"]),
        r"says sliding_window None; an EAGLE drafter needs a number above 0",
    ),
    "one state alone": (
        lambda config, tensors: config["eagle_config"].update(use_aux_hidden_state=False),
        r"use_aux_hidden_state false; served are",
    ),
    "layers by name": (
        lambda config, tensors: config.update(eagle_aux_hidden_state_layer_ids=["low"]),
        r"\['low'\]; a list of numbers of layers is needed",
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_drafters_that_cannot_be_are_refused_by_name(what: str, tmp_path: Path) -> None:
    check_refused(eagle(tmp_path, tmp_path, EAGLE_VOCAB), *HOSTILE[what])


def test_a_repository_of_heads_stands_for_its_base(tmp_path: Path) -> None:
    heads = medusa(tmp_path / "h", demo.model_path(), 256, 2056, layers=1, own=False)
    assert resolve_served(str(heads)) == Served(demo.model_path(), heads)
    (heads / "config.json").write_text(
        json.dumps({"medusa_num_heads": 3, "base_model_name_or_path": demo.MODEL_ID})
    )
    assert resolve_served(str(heads)) == Served(demo.model_path(), heads)
    (heads / "config.json").write_text(json.dumps({"medusa_num_heads": 3}))
    with pytest.raises(ModelLoadError, match=r"which model its heads draft for.*--draft-model"):
        resolve_served(str(heads))


def test_heads_that_are_a_pickle_are_converted_without_being_run(tmp_path: Path) -> None:
    heads = medusa(tmp_path, demo.model_path(), HIDDEN, VOCAB, layers=1, own=False)
    file = heads / "medusa_lm_head.safetensors"
    torch.save(load_file(file), heads / "medusa_lm_head.pt")
    expected = load_file(file)
    file.unlink()
    assert resolve_drafter(str(heads)) == heads
    found = load_file(file)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_as_many_tokens_are_drafted_as_there_are_heads_unless_fewer_are_asked_for(
    tmp_path: Path,
) -> None:
    facts = read_model_facts(demo.model_path())
    heads = medusa(tmp_path, demo.model_path(), HIDDEN, VOCAB, layers=1, own=False)

    def drafts(**options: Any) -> int | None:
        return resolve(Options(**options), facts).speculate

    assert drafts() == 0
    assert resolve(Options(draft_model=heads), facts).drafter == "medusa"
    assert drafts(speculate=5) == 5
    assert drafts(draft_model=heads) == HEADS
    assert drafts(draft_model=heads, speculate=1) == 1
    assert drafts(draft_model=heads, speculate=0) == 0
    assert drafts(draft_model=demo.model_path()) == DRAFTED
    said = r"Speculate is set to `4` but this medusa models only has `3` heads, please make them"
    with pytest.raises(ConfigurationError, match=said):
        drafts(draft_model=heads, speculate=4)
