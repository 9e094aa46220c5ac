"""Servers on a GGUF file and its projector: what they say of pictures is what transformers says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.router.media.image_files import encode, noise
from tests.shard.gguf.projectors import write_projector
from tests.shard.gguf.seeing import OPTIONS, write_text
from tests.support.gguf_files import tokenizer_metadata
from tests.system import image_support
from tests.system.client import post
from tests.system.image_support import interleave, know_tokens, told
from tests.system.server import ServerProcess, serving
from tests.system.test_images import url_of
from tgi_trio.testing.checkpoints import VOCAB_SIZE
from tgi_trio.testing.wrapped_checkpoints import make_wrapped

pytestmark = pytest.mark.system

MOST = 8  # tokens of an answer
TEXTS = ["Look: ", " and then ", " so?"]
TOKENS = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>"]
# As published: what a projector does not say.
PIXELS = {
    **{"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2},
    **{"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 16384},
    **{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.4, 0.5]},
}
PICTURES = [noise(24, 40, seed=1), noise(40, 17, seed=2)]


@dataclass(frozen=True)
class Made:
    """The same model three times."""

    source: Path  # a folder of transformers'
    home: Path  # of files: the text and its projector


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    source, home = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("files")
    options = {"vocab_size": VOCAB_SIZE + len(TOKENS), "image_token": VOCAB_SIZE}
    make_wrapped(source, "qwen2_5_vl", **options, **OPTIONS["qwen2_5_vl"])
    know_tokens(source, TOKENS)
    (source / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    write_text(source, home / "tiny-F32.gguf", "qwen2vl", tokenizer_metadata(source, "gpt-2"))
    write_projector(source, home / "mmproj-tiny-F32.gguf", "F32")
    return Made(source, home)


@pytest.fixture(scope="module")
def server(made: Made) -> Iterator[ServerProcess]:
    file, projector = made.home / "tiny-F32.gguf", made.home / "mmproj-tiny-F32.gguf"
    flags = ("--model-id", str(file), "--mmproj", str(projector), "--dtype", "float32")
    with serving(*flags, env={"XDG_CACHE_HOME": str(made.home / "cache")}) as running:
        yield running


def expected(folder: Path, count: int) -> tuple[list[int], list[int]]:
    """Return transformers' ids of a prompt with so many pictures, and its greedy tokens."""
    import torch
    from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.image_token, tokenizer.image_token_id = TOKENS[0], VOCAB_SIZE
    tokenizer.video_token, tokenizer.video_token_id = "<|video_pad|>", VOCAB_SIZE + 100
    by_any = {"check_argument_for_proper_class": lambda self, name, value: type(value)}
    kind: Any = type("AnyProcessor", (Qwen2_5_VLProcessor,), by_any)
    pixels = Qwen2VLImageProcessorPil.from_pretrained(folder)
    processor = kind(image_processor=pixels, tokenizer=tokenizer, video_processor=None)
    text = interleave(TEXTS, [f"{TOKENS[1]}{TOKENS[0]}{TOKENS[2]}"] * count)
    inputs = processor(text=[text], images=[PICTURES[:count]], return_tensors="pt")
    model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    found = model.eval().generate(**inputs, max_new_tokens=MOST, do_sample=False, pad_token_id=2)
    ids = inputs["input_ids"][0].tolist()
    return ids, found[0, len(ids) :].tolist()


@pytest.mark.parametrize("count", [1, 2])
def test_ids_and_tokens_are_those_of_transformers(
    server: ServerProcess, made: Made, count: int
) -> None:
    details = image_support.ask(server, TEXTS, PICTURES[:count], max_new_tokens=MOST)
    ids, tokens = expected(made.source, count)
    assert [token["id"] for token in details["prefill"]] == ids
    said = told(details)
    assert said == tokens[: len(said)] and (len(said) == MOST or said[-1] == 1)


def test_a_chat_shows_the_picture(server: ServerProcess) -> None:
    url = url_of(encode(PICTURES[0]))
    shown = {"type": "image_url", "image_url": {"url": url}}
    answers = []
    for content in ([shown, {"type": "text", "text": "What?"}], "What?"):
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": MOST}
        answers.append(post(f"{server.url}/v1/chat/completions", json=body))
        assert answers[-1].status_code == 200, answers[-1].text
    seen, blind = (answer.json()["usage"]["prompt_tokens"] for answer in answers)
    assert seen - blind >= 7 * 7, "an image has 56 x 56 pixels at least, in squares of eight"


def test_the_text_alone_is_served_where_a_folder_s_projector_is_declined(made: Made) -> None:
    env = {"XDG_CACHE_HOME": str(made.home / "cache")}
    with serving("--model-id", str(made.home), "--no-mmproj", env=env) as blind:
        url = url_of(encode(PICTURES[0]))
        content = [{"type": "image_url", "image_url": {"url": url}}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
        refused = post(f"{blind.url}/v1/chat/completions", json=body)
        assert refused.status_code == 422, refused.text
        details = image_support.ask(blind, ["Well"], [], max_new_tokens=2)
        assert len(told(details)) == 2
