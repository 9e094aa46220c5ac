"""Idefics 1 behind a whole server: tokens see the last image before them, text sees none. The
oracle is transformers, its processor included.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.router.media.image_files import noise
from tests.system import image_support
from tests.system.client import post
from tests.system.image_support import know_tokens, question, told
from tests.system.server import ServerProcess, serving
from tgi_trio.testing.wrapped_checkpoints import make_wrapped

pytestmark = [pytest.mark.system, pytest.mark.thorough]

MOST = 12  # tokens of an answer
FAKE, IMAGE = "<fake_token_around_image>", "<image>"
PROCESSOR: dict[str, Any] = {
    **{"size": {"height": 16, "width": 16}, "image_num_channels": 3},
    **{"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.5]},
}
PICTURES = [noise(24, 60), noise(16, 16, seed=1)]
TEXTS = ["Look:", "and then", "so?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model, with a tokenizer that knows the two tokens around and of an image."""
    folder = tmp_path_factory.mktemp("idefics")
    make_wrapped(folder, "idefics")
    know_tokens(folder, [FAKE, IMAGE])
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with serving(
        "--model-id", str(folder), "--dtype", "float32", "--stall-timeout", "600"
    ) as server:
        yield server


def ask(server: ServerProcess, count: int, texts: list[str] = TEXTS) -> dict[str, Any]:
    return image_support.ask(server, texts, PICTURES[:count], max_new_tokens=MOST)


def expected(folder: Path, count: int) -> tuple[list[int], list[int]]:
    """Return the prompt that transformers' processor makes, and its model's greedy tokens."""
    import torch
    from transformers import AutoTokenizer, IdeficsForVisionText2Text, IdeficsProcessor
    from transformers.models.idefics.image_processing_pil_idefics import IdeficsImageProcessorPil

    by_any = {"check_argument_for_proper_class": lambda self, name, value: type(value)}
    kind = type("AnyProcessor", (IdeficsProcessor,), by_any)  # PIL's processor is none of its own
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    processor: Any = kind(IdeficsImageProcessorPil(**PROCESSOR), tokenizer)
    turns = [each for pair in zip(TEXTS, PICTURES[:count], strict=False) for each in pair]
    inputs = processor(text=[[*turns, TEXTS[count]]], return_tensors="pt")
    model: Any = IdeficsForVisionText2Text.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    found = model.generate(**inputs, max_new_tokens=MOST, do_sample=False, pad_token_id=2)
    ids = inputs["input_ids"][0].tolist()
    return ids, found[0, len(ids) :].tolist()


@pytest.mark.parametrize("count", [0, 1, 2])
def test_prompts_and_tokens_are_those_of_transformers(
    server: ServerProcess, folder: Path, count: int
) -> None:
    details = ask(server, count, TEXTS[: count + 1])
    prompt, ids = expected(folder, count)
    assert [token["id"] for token in details["prefill"]] == prompt
    tokens = told(details)
    assert tokens == ids[: len(tokens)] and (len(tokens) == MOST or tokens[-1] == 1)


def test_a_second_question_needs_no_tower_and_streams_say_the_same(server: ServerProcess) -> None:
    first = ask(server, 1)
    encoded = server.metric("tgi_image_encode_duration_count")
    hits = server.metric("tgi_image_cache_hits")
    other = ask(server, 1, ["Another:", "then?"])
    assert other["prefill"] != first["prefill"]
    body = question(TEXTS, PICTURES[:1], max_new_tokens=MOST, decoder_input_details=False)
    answer = post(f"{server.url}/generate_stream", json=body)
    events = [json.loads(line[5:]) for line in answer.text.splitlines() if line.startswith("data:")]
    assert [event["token"]["id"] for event in events] == told(first)
    assert events[-1]["generated_text"] == first["text"]
    assert server.metric("tgi_image_encode_duration_count") == encoded
    assert server.metric("tgi_image_cache_hits") == hits + 2
    server.wait_idle()
