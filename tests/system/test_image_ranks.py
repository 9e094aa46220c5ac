"""Qwen2.5-VL behind a whole server of two ranks: the tokens of transformers' `generate`.

Rank 0 alone has the tower, and images of their own sizes turn what follows them by three positions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from PIL import Image

from tests.router.media.image_files import noise
from tests.system.image_support import ask, interleave, know_tokens, told
from tests.system.server import ServerProcess, serving
from tgi_trio.testing.checkpoints import VOCAB_SIZE
from tgi_trio.testing.wrapped_checkpoints import make_wrapped

pytestmark = [pytest.mark.system, pytest.mark.thorough]

MOST = 8  # tokens of an answer
PAD, BEGIN, END = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>"
PROCESSOR: dict[str, Any] = {
    **{"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 2048}},
    **{"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True},
    **{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
}
PICTURES = [noise(24, 40), noise(40, 16, seed=1)]
TEXTS = ["Look: ", " and then ", " so?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model, with a tokenizer that knows the tokens of its images."""
    folder = tmp_path_factory.mktemp("qwen")
    make_wrapped(folder, "qwen2_5_vl", image_token=VOCAB_SIZE, vocab_size=VOCAB_SIZE + 3)
    know_tokens(folder, [PAD, BEGIN, END])
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with serving("--model-id", str(folder), "--dtype", "float32", "--num-shard", "2") as server:
        yield server


def expected(folder: Path, pictures: list[Image.Image]) -> tuple[list[int], int]:
    """Greedy tokens of transformers' model, and how many its prompt has."""
    import torch
    from transformers import AutoModelForImageTextToText, Qwen2VLImageProcessorPil

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    processor: Any = Qwen2VLImageProcessorPil(**PROCESSOR)
    inputs = dict(processor(list(pictures), return_tensors="pt"))
    counts = (inputs["image_grid_thw"].prod(-1) // 4).tolist()
    prompt = interleave(TEXTS, [BEGIN + PAD * count + END for count in counts])
    ids = torch.tensor([tokenizer.encode(prompt).ids])
    inputs["mm_token_type_ids"] = (ids == VOCAB_SIZE).long()
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    found = model.generate(ids, **inputs, max_new_tokens=MOST, do_sample=False, pad_token_id=2)
    return found[0, ids.shape[1] :].tolist(), ids.shape[1]


@pytest.mark.parametrize("count", [1, 2])
def test_tokens_are_those_of_transformers(server: ServerProcess, folder: Path, count: int) -> None:
    pictures = PICTURES[:count]
    details = ask(server, TEXTS, pictures, max_new_tokens=MOST)
    ids, length = expected(folder, pictures)
    assert len(details["prefill"]) == length
    said = told(details)
    assert said == ids[: len(said)] and (len(said) == MOST or said[-1] == 1)
