"""Towers: what of a folder they need, and pixels as transformers' processors make them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.model.support import Asked
from tests.shard.media.images_support import make_folder
from tests.shard.media.pictures import PROCESSOR, picture
from tgi_trio.errors import ModelLoadError
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.model.check import check_model
from tgi_trio.model.checkpoint_files import stored_names
from tgi_trio.model.config import read_config
from tgi_trio.model.image_families import IMAGE_FAMILIES
from tgi_trio.model.leftovers import has_vision_tower
from tgi_trio.model.wrappers import text_name
from tgi_trio.router.media.served_images import find_served_images
from tgi_trio.shard.media.loading import has_bfloat16, load_encoder
from tgi_trio.shard.media.normalising import Normalising
from tgi_trio.shard.media.tower import load_tower
from tgi_trio.testing.wrapped_families import FAMILIES

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
LLAMA4 = IMAGE_FAMILIES["llama4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("llava"), "llava")


def changed(folder: Path, to: Path, change: Any) -> Path:
    """Copy a checkpoint with other tensors: `change` of all of them, by name."""
    shutil.copytree(folder, to)
    tensors = change(load_file(folder / "model.safetensors"))
    save_file(tensors, to / "model.safetensors")
    return to


@pytest.mark.parametrize(
    ("now", "then"),
    [
        ("vision_tower.", "vision_tower.vision_model."),
        ("vision_tower.", "model.vision_tower."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
    ],
)
def test_older_and_newer_names_are_found(folder: Path, tmp_path: Path, now: str, then: str) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {name.replace(now, then, 1): value for name, value in tensors.items()}
        assert found.keys() != tensors.keys()
        return found

    other = changed(folder, tmp_path / "other", rename)
    image = picture("llava", 1)
    ours = load_tower(other, "llava", CPU, torch.float32).encode(image.bundle)
    theirs = load_tower(folder, "llava", CPU, torch.float32).encode(image.bundle)
    assert np.array_equal(ours.rows, theirs.rows) and ours.rows.dtype == np.float32


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("gemma3", ()),
        ("mistral3", (("vision_tower.", "vision_tower.vision_model."),)),
        ("qwen2_5_vl", (("visual.", "vision_tower."),)),
        ("qwen3_vl", (("model.visual.", "vision_tower."),)),
    ],
)
def test_towers_in_the_form_of_mlx(
    tmp_path: Path, family: str, names: tuple[tuple[str, str], ...]
) -> None:
    """As mlx-vlm writes them: convolutions with their channels at the end, and its names."""
    moved = []

    def convert(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {}
        for name, tensor in tensors.items():
            for old, new in names:
                name = name.replace(old, new, 1)
            if tensor.dim() > 3:
                tensor = tensor.moveaxis(1, -1).contiguous()
                moved.append(name)
            found[name] = tensor
        assert not names or found.keys() != tensors.keys()
        return found

    source = make_folder(tmp_path / "source", family)
    other = changed(source, tmp_path / "other", convert)
    assert moved
    image = picture(family, 1)
    ours = load_tower(other, family, CPU, torch.float32).encode(image.bundle)
    theirs = load_tower(source, family, CPU, torch.float32).encode(image.bundle)
    assert np.array_equal(ours.rows, theirs.rows)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", sorted(IMAGE_FAMILIES.keys() & FAMILIES.keys()))
def test_whether_a_folder_has_a_tower_is_told_by_names(tmp_path: Path, family: str) -> None:
    folder = make_folder(tmp_path, family)
    names = stored_names(folder)
    assert has_vision_tower(names)
    text = {text_name(name) for name in names if not has_vision_tower([name])}
    assert text and not any(name.startswith("vis") for name in text)


def test_images_are_not_served_where_there_is_the_text_alone(tmp_path: Path) -> None:
    """As mlx-lm converts such models."""

    def strip(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value for name, value in tensors.items() if "language_model" in name}

    source = make_folder(tmp_path / "source", "gemma3")
    assert find_served_images(source)[1] is None
    other = changed(source, tmp_path / "other", strip)
    model, why = find_served_images(other)
    assert model is None and why is not None and "no vision tower among them" in why
    assert check_model(read_config(other), Asked()) == []


def test_it_needs_nothing_of_the_text(folder: Path, tmp_path: Path) -> None:
    def strip(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value for name, value in tensors.items() if "language_model" not in name}

    tower = load_tower(changed(folder, tmp_path / "own", strip), "llava", CPU, torch.float32)
    assert tower.encode(picture("llava", 1).bundle).rows.shape == (4, 64)


def test_a_missing_tensor_is_named(folder: Path, tmp_path: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: value for name, value in tensors.items() if "linear_2.bias" not in name}

    with pytest.raises(ModelLoadError, match=r"no tensor 'multi_modal_projector.linear_2.bias'"):
        load_tower(changed(folder, tmp_path / "less", drop), "llava", CPU, torch.float32)


def test_a_torchvision_of_another_torch_is_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As importing it raises, which towers of timm do."""
    import transformers

    def build(config: object) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(transformers.AutoModel, "from_config", build)
    with pytest.raises(ModelLoadError, match=r"cannot build the tower .* torchvision::nms"):
        load_tower(folder, "llava", CPU, torch.float32)


def test_a_bundle_without_pixels_is_refused(folder: Path) -> None:
    tower = load_tower(folder, "llava", CPU, torch.float32)
    with pytest.raises(ValueError, match="a bundle of image_sizes has no pixels"):
        tower.encode({"image_sizes": np.ones((1, 2), np.int32)})
    with pytest.raises(ValueError, match="no three channels"):
        tower.encode({"pixel_values": np.ones((1, 4, 16, 16), np.uint8)})


def test_a_family_without_a_tower_is_refused(folder: Path, tmp_path: Path) -> None:
    other = shutil.copytree(folder, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"model_type": "florence2"}))
    with pytest.raises(ModelLoadError, match="type 'florence2' has no vision tower here"):
        load_encoder(ShardSettings(model_path=other, device="cpu"), frozenset())


@pytest.mark.parametrize(
    "settings",
    [
        PROCESSOR,
        {"do_normalize": False},
        {"do_rescale": False, "do_normalize": False},
        {"rescale_factor": 1 / 127.5, "image_mean": 1.0, "image_std": [1.0, 1.0, 1.0]},
    ],
)
def test_pixels_are_those_of_transformers(tmp_path: Path, settings: dict[str, Any]) -> None:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    same = {"do_resize": False, "do_center_crop": False}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    mean = np.broadcast_to(settings.get("image_mean", 0.5), 3).tolist()
    processor = CLIPImageProcessorPil(**{**same, **settings, "image_mean": mean})
    pixels = picture("llava", 4).bundle["pixel_values"]
    wanted = processor(list(pixels), return_tensors="np", input_data_format="channels_first")
    found = Normalising.read(tmp_path).apply(pixels)
    np.testing.assert_allclose(found, wanted["pixel_values"], atol=5e-7, rtol=0)
    patches = Normalising.read(tmp_path).apply(pixels.reshape(1, -1))  # channels are runs, too
    assert np.array_equal(patches.reshape(found.shape), found)


def test_pixels_of_llama4_are_rounded_to_bfloat16_on_the_way(tmp_path: Path) -> None:
    """As its processor does it, with torch; of one that only rescales they are not."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    levels = torch.arange(256).bfloat16() * (1 / 255)
    mean, deviation = (
        torch.tensor(PROCESSOR[f"image_{name}"]).bfloat16()[:, None] for name in ("mean", "std")
    )
    wanted = (levels - mean) / deviation
    found = Normalising.read(tmp_path, LLAMA4).table
    assert torch.equal(torch.from_numpy(found), wanted.float())
    (tmp_path / "preprocessor_config.json").write_text('{"do_normalize": false}')
    assert np.array_equal(
        Normalising.read(tmp_path, LLAMA4).table, Normalising.read(tmp_path).table
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"image_mean": [0.5, 0.5]}', "image_mean .0.5, 0.5.; it must be three numbers"),
        ('{"image_mean": [1, 1, 1], "image_std": 0}', "image_std 0; it must be three numbers"),
        ("{", "cannot be read"),
        ("[]", "preprocessor_config.json holds no JSON object"),
        (None, "no preprocessor_config.json or processor_config.json that says"),
    ],
)
def test_settings_of_processors_are_checked(tmp_path: Path, text: str | None, why: str) -> None:
    if text is not None:
        (tmp_path / "preprocessor_config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=why):
        Normalising.read(tmp_path)


def test_what_files_do_not_say_is_as_in_the_family_processor(tmp_path: Path) -> None:
    """Of families that are published with other code's settings."""
    (tmp_path / "preprocessor_config.json").write_text('{"media_proc_cfg": {}}')
    found = Normalising.read(tmp_path, IMAGE_FAMILIES["kimi_k25"]).table
    np.testing.assert_allclose(found[:, [0, 255]], [[-1, 1]] * 3, atol=1e-6)
    (tmp_path / "preprocessor_config.json").write_text('{"image_mean": 1.0}')
    found = Normalising.read(tmp_path, IMAGE_FAMILIES["muse_glimmer"]).table
    np.testing.assert_allclose(found[:, [0, 255]], [[-2, 0]] * 3, atol=1e-6)
    with pytest.raises(ModelLoadError, match="image_std None"):
        Normalising.read(tmp_path, LLAMA4)


def test_newer_folders_have_the_settings_in_another_file(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": PROCESSOR}))
    assert Normalising.read(tmp_path).table.shape == (3, 256)


def test_bfloat16_is_for_processors_that_have_it() -> None:
    assert has_bfloat16("processor : 0\nflags\t\t: fpu avx512f avx512_bf16 sse\n")
    assert has_bfloat16("Features : fp asimd bf16\n")
    assert not has_bfloat16("model name : bf16\nflags : fpu avx2 avx512f\n")
