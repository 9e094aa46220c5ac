"""Projectors: a text and a tower in two files give the whole model's own tokens with images.

What the files hold is made by `projectors.py`, what it means is said by transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.shard.gguf.projectors import TYPES, write_projector
from tests.shard.gguf.seeing import ARCHITECTURES, OPTIONS, write_text
from tests.shard.media.images_support import Golden, Model, arena, make_folder
from tests.shard.media.test_families import check
from tests.shard.torch_backend.models_support import load
from tgi_trio.errors import ModelLoadError
from tgi_trio.ipc.images import ArenaPlace, read_bundle, write_bundle
from tgi_trio.media.processors import PixelProcessor
from tgi_trio.model.config import read_config
from tgi_trio.model.families.registry import decoder_spec
from tgi_trio.model.gguf.folder import gguf_folder
from tgi_trio.model.gguf.projectors.table import PROJECTORS
from tgi_trio.model.image_rules import image_rules
from tgi_trio.router.media.layouts.layout import ImageSize
from tgi_trio.router.media.served_images import find_served_images
from tgi_trio.shard.media.projector_parameters import open_projector
from tgi_trio.shard.media.tower import load_tower

pytestmark = pytest.mark.usefixtures("one_thread")

Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return what makes the folder of a family's model, with its text beside it, once."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            home = tmp_path_factory.mktemp("model")
            name = family.partition("/")[0]
            make_folder(home / "source", name, **OPTIONS.get(family, {}))
            write_text(home / "source", home / "text.gguf", ARCHITECTURES[family])
            made[family] = home
        return made[family]

    return make


def join(home: Path, projector: Path) -> Path:
    return gguf_folder(home / "text.gguf", home / "cache", tokenizer=False, projector=projector)


def test_every_type_is_tested() -> None:
    kinds = {"pixtral": "llava"}
    families = {case.partition("/")[0] for case in ARCHITECTURES}
    assert {TYPES[kinds.get(each, each)] for each in families} == PROJECTORS.keys()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_tokens_and_logits_are_those_of_the_whole_model(source: Make, family: str) -> None:
    home = source(family)
    folder = join(home, write_projector(home / "source", home / "mmproj.gguf", "F32"))
    config = read_config(folder)
    tower = load_tower(folder, config.model_type, torch.device("cpu"), torch.float32)
    name, golden = family.partition("/")[0], Golden(home / "source")
    whole = Model(name, home / "source", golden, tower, image_rules(config))
    assert whole.rules == image_rules(read_config(whole.folder))
    runner, recorder = load(folder)
    check(whole, runner, recorder)


@pytest.mark.sampled(2, first=1)
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_the_config_is_that_of_the_source(source: Make, family: str) -> None:
    home = source(family)
    folder = join(home, write_projector(home / "source", home / "config.gguf"))
    made = json.loads((folder / "config.json").read_text())
    theirs = json.loads((home / "source/config.json").read_text())
    if family != "smolvlm":  # which a file does not tell from Idefics 3
        assert made["model_type"] == theirs["model_type"]
    tower, said = made["vision_config"], theirs["vision_config"]
    for name in tower.keys() & said.keys() - {"model_type", "vision_use_head"}:
        if name == "deepstack_visual_indexes" and family.startswith("qwen3_5"):
            assert tower[name] == []
            continue
        assert tower[name] == pytest.approx(said[name]), name
    for name in made.keys() & theirs.keys() - {"model_type", "text_config", "vision_config"}:
        assert made[name] == theirs[name], name
    pixels = json.loads((folder / "preprocessor_config.json").read_text())
    expected = json.loads((home / "source/preprocessor_config.json").read_text())
    if expected.get("do_normalize", True):
        assert pixels["image_mean"] == pytest.approx(expected["image_mean"])
        assert pixels["image_std"] == pytest.approx(expected["image_std"])
    else:
        assert (pixels["image_mean"], pixels["image_std"]) == ([0.0] * 3, [1.0] * 3)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_the_text_is_the_file_s_own(source: Make, family: str) -> None:
    """But for how it turns by places in images, which token these have in Gemma 4, and how experts
    would lie in one tensor, which they do not here.
    """
    home = source(family)
    seeing = join(home, write_projector(home / "source", home / "text.mmproj.gguf"))
    blind = gguf_folder(home / "text.gguf", home / "cache", tokenizer=False)
    specs = []
    for folder in (seeing, blind):
        spec = decoder_spec(read_config(folder))
        assert spec is not None
        layers = (
            replace(
                layer,
                rotary=layer.rotary
                and replace(layer.rotary, sections=(), sections_alternate=False, parameters={}),
                experts=layer.experts and replace(layer.experts, gate_up="turns"),
            )
            for layer in spec.layers
        )
        inputs = spec.per_layer_inputs and replace(spec.per_layer_inputs, image_token=0)
        specs.append(replace(spec, family="", layers=tuple(layers), per_layer_inputs=inputs))
    assert specs[0] == specs[1]
    assert read_config(seeing).dtype == read_config(blind).dtype
    assert read_config(seeing).eos_ids == read_config(blind).eos_ids


@pytest.mark.sampled(4, first=2)
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_pictures_are_prepared_for_the_tower(source: Make, family: str) -> None:
    """Its features are as many as the prompt has places for, which only settings say."""
    home = source(family)
    folder = join(home, write_projector(home / "source", home / "pictures.gguf", "F32"))
    model, why = find_served_images(folder)
    assert model is not None and model.layout is not None, why
    tower = load_tower(folder, read_config(folder).model_type, torch.device("cpu"), torch.float32)
    given = model.layout.processor_options
    processor = PixelProcessor(model.family, model.processor, given)
    for size in (ImageSize(100, 80), ImageSize(60, 130)):
        with arena(2**22) as memory:
            place = memory.view(ArenaPlace(0, memory.nbytes))
            pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
            write_bundle(place, processor.process(pixels))
            features = tower.encode(read_bundle(place)).rows
        assert len(features) == model.layout.count_features(size)


@pytest.mark.parametrize(("dtype", "most"), [("F16", 2**-11), ("BF16", 2**-8), ("Q8_0", 2**-7)])
def test_numbers_of_other_types_are_rounded_and_no_more(
    source: Make, dtype: str, most: float
) -> None:
    """By blocks of 32 of Q8_0 it is a part of the block's largest."""
    home = source("qwen2_5_vl")
    file = write_projector(home / "source", home / f"{dtype}.gguf", dtype)
    stored = load_file(home / "source/model.safetensors")
    compared = 0
    with open_projector(file) as read:
        for name, tensor in stored.items():
            if "visual." not in name:
                continue
            expected = tensor.float().numpy()
            found = read(name.removeprefix("model."), expected.shape)
            assert np.abs(found - expected).max() <= most * np.abs(expected).max() * 1.01
            compared += not np.array_equal(found, expected)
    assert compared > 5, "some numbers are rounded"


def test_halves_of_an_mlp_that_older_files_call_the_other_way(source: Make, tmp_path: Path) -> None:
    home = source("smolvlm")
    newer, older = (
        write_projector(home / "source", tmp_path / f"{each}.gguf", "F32", older=bool(each))
        for each in (0, 1)
    )
    with open_projector(newer) as read, open_projector(older) as read_older:
        for part, shape in (("fc1", (24, 16)), ("fc2", (16, 24))):
            name = f"vision_model.encoder.layers.1.mlp.{part}.weight"
            assert np.array_equal(read(name, shape), read_older(name, shape))


def changed(home: Path, tmp_path: Path, **said: Any) -> Path:
    keys = {f"clip.{key.replace('__', '.')}": value for key, value in said.items()}
    return write_projector(home / "source", tmp_path / "mmproj.gguf", "F32", keys)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another type": ({"projector_type": "ultravox"}, "of the type 'ultravox'.*qwen3vl_merger"),
    "no type": ({"projector_type": None}, "of the type ''"),
    "sounds alone": (
        {"has_vision_encoder": False, "has_audio_encoder": True}, "projector of sounds alone",
    ),
    "another text": ({"projector_type": "gemma3"}, "for texts of the architecture gemma3.*qwen2vl"),
    "no heads": ({"vision__attention__head_count": None}, "no clip.vision.attention.head_count"),
    "many blocks": ({"vision__block_count": 10**6}, "block_count is 1000000: it has fewer"),
    "fewer blocks": ({"vision__block_count": 3}, "no tower of its type has its tensor 'v.blk.3"),
    "two means": ({"vision__image_mean": [0.5, 0.5]}, "image_mean is no list of three"),
    "no windows": ({"vision__n_wa_pattern": None}, "n_wa_pattern cannot be None"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_by_a_sentence(
    source: Make, tmp_path: Path, case: str
) -> None:
    said, reason = REFUSED[case]
    home = source("qwen2_5_vl")
    with pytest.raises(ModelLoadError, match=reason):
        join(home, changed(home, tmp_path, **said))


def test_a_projector_of_a_model_of_another_size_is_refused(source: Make, tmp_path: Path) -> None:
    home = source("qwen2_5_vl")
    tower = OPTIONS["qwen2_5_vl"]["whole"]["vision_config"] | {"out_hidden_size": 128}
    make_folder(tmp_path / "larger", "qwen2_5_vl", hidden_size=128, whole={"vision_config": tower})
    other = write_projector(tmp_path / "larger", tmp_path / "mmproj.gguf")
    with pytest.raises(
        ModelLoadError, match="features of 128 numbers, and embeddings of the model"
    ):
        join(home, other)
