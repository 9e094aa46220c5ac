"""What a tower takes of a device for the largest image, over the stand-in."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.shard.media.images_support import make_folder
from tests.shard.media.pictures import PROCESSOR
from tests.shard.torch_backend.interpreter import need_triton
from tgi_trio.errors import ConfigurationError
from tgi_trio.ipc.shard_settings import ShardSettings
from tgi_trio.shard.media import largest
from tgi_trio.shard.media.features import Bundle, ImageEncoder, ImageFeatures
from tgi_trio.shard.media.largest import measure_largest
from tgi_trio.shard.media.loading import load_encoder

need_triton()

from tgi_trio.testing.stand_in_device import StandInDevice  # noqa: E402  (it imports Triton)

pytestmark = pytest.mark.usefixtures("one_thread")
CUT = {"do_resize": True, "size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}


class Noting:
    """An encoder that keeps what it was shown."""

    def __init__(self, encoder: ImageEncoder | None) -> None:
        self._encoder = encoder
        self.shown: list[tuple[int, ...]] = []

    def encode(self, bundle: Bundle) -> ImageFeatures:
        if self._encoder is None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.shown.append(bundle["pixel_values"].shape)
        return self._encoder.encode(bundle)


def settings(folder: Path, device: str, family: str = "llava") -> ShardSettings:
    told: dict[str, Any] = {"family": family, "settings": PROCESSOR | CUT, "given": {}}
    image = json.dumps(told | {"height": 40, "width": 60})
    return ShardSettings(model_path=folder, device=device, dtype="float32", largest_image=image)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(largest, "reset_peak", lambda device: 1000)
    monkeypatch.setattr(largest, "peak_bytes", lambda device: 5000)
    found = make_folder(tmp_path, "llava")
    load_encoder(settings(found, "cpu"), os.sched_getaffinity(0))  # imports are not the device's
    return found


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_the_largest_image_is_as_others_come(family: str) -> None:
    """Patches of Qwen's processor are floats, which no tower takes for a picture's bytes."""
    told = {"family": family, "settings": PROCESSOR, "given": {}, "height": 64, "width": 96}
    bundle = largest.make_largest(json.dumps(told))
    assert bundle["pixel_values"].dtype == np.uint8


def test_the_peak_is_measured_where_the_tower_is(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with StandInDevice():
        asked = settings(folder, "cuda")
        with torch.inference_mode():  # the stand-in makes no views of parameters there
            encoder = Noting(load_encoder(asked, os.sched_getaffinity(0)))
        assert measure_largest(encoder, asked) == 4000 and encoder.shown == [(1, 3, 16, 16)]
        assert measure_largest(encoder, settings(folder, "cuda", "none")) == 0
        with pytest.raises(ConfigurationError, match="lower --max-image-pixels or --max-input-"):
            measure_largest(Noting(None), asked)
    assert "of the device is not counted: no image processor is known" in capfd.readouterr().err


def test_ranks_of_another_machine_take_none_of_this_ones_devices(folder: Path) -> None:
    """A tower was refused where there were fewer devices than ranks of all machines."""
    asked = replace(settings(folder, "cuda"), world_size=2, local_size=1)
    with StandInDevice():  # one device
        with torch.inference_mode():
            encoder = Noting(load_encoder(asked, os.sched_getaffinity(0)))
        assert measure_largest(encoder, asked) == 4000 and encoder.shown


def test_on_a_cpu_nothing_is_computed(folder: Path) -> None:
    encoder = Noting(None)
    assert measure_largest(encoder, settings(folder, "cpu")) == 0
