"""Features of Phi-4-multimodal are those that transformers' whole model puts among embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.router.media.image_files import noise
from tests.router.media.sound_files import as_floats, make_samples
from tests.shard.media.phi4_models import EXTRACTOR, FAMILY, make_phi4
from tests.shard.torch_backend.interpreter import need_triton
from tgi_trio.media.feature_extractors import FeatureExtractor
from tgi_trio.media.processors import PixelProcessor
from tgi_trio.shard.media.tower import load_tower

need_triton()

from tests.shard.media.audio_device import check_on_device  # noqa: E402  (it imports Triton)

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
# Heights and widths: a crop, a part of one, and several, of which the last ones have a part.
SIZES = ((448, 448), (200, 448), (448, 37), (896, 448), (448, 900), (896, 1000))


def test_images_and_sounds_are_seen_and_heard(tmp_path: Path) -> None:
    """Also sounds beside images, and all of them on a device."""
    made = make_phi4(tmp_path)
    model, seen = made.adapted.get_base_model(), list[Any]()
    model.model.layers[0].register_forward_pre_hook(
        lambda module, args, given: seen.append(args[0] if args else given["hidden_states"]),
        with_kwargs=True,
    )
    tower = load_tower(tmp_path, FAMILY, CPU, torch.float32, hears=True)

    def expected(token: str, given: Any) -> Any:
        with torch.no_grad():
            model(**given)
        places = given["input_ids"][0] == made.processor.tokenizer.convert_tokens_to_ids(token)
        return seen.pop()[0][places].numpy()

    cut = PixelProcessor("phi4", {"dynamic_hd": 6}, {})
    pictures = [noise(*size, seed=i) for i, size in enumerate(SIZES)]
    for picture in pictures:
        given = made.processor(text="<|image|>", images=[picture], return_tensors="pt")
        bundle = cut.process(np.asarray(picture))
        rows = tower.encode(bundle).rows
        wanted = expected("<|image|>", given)
        assert rows.shape == wanted.shape, picture.size
        assert np.allclose(rows, wanted, atol=1e-4 * np.abs(wanted).max()), picture.size
    check_on_device(tmp_path, FAMILY, bundle, rows)
    extract = FeatureExtractor("phi4", EXTRACTOR).extract
    for seconds in (0.025, 0.71, 41.3):  # forty are heard as one piece
        samples = as_floats(make_samples(seconds))
        for beside in (False, True):
            more = {"images": [pictures[0]]} if beside else {}
            text = "<|image|><|audio|>" if beside else "<|audio|>"
            given = made.processor(text=text, audio=[samples], **more, return_tensors="pt")
            rows = tower.encode(extract(samples, beside)).rows
            wanted = expected("<|audio|>", given)
            assert rows.shape == wanted.shape
            assert np.allclose(rows, wanted, atol=1e-4 * np.abs(wanted).max())
    check_on_device(tmp_path, FAMILY, extract(samples, True), rows)
