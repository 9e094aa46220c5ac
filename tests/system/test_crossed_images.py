"""Llama 3.2 Vision behind a whole server: its layers attend to images, beside text that passes them
by, in little room and when a shard has crashed, and over two ranks. The oracle is transformers, its
processor included.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.router.media.image_files import noise
from tests.system import image_support
from tests.system.image_support import interleave, know_tokens, told
from tests.system.server import ServerProcess, serving
from tgi_trio.testing.checkpoints import VOCAB_SIZE
from tgi_trio.testing.wrapped_checkpoints import make_wrapped

pytestmark = [pytest.mark.system, pytest.mark.thorough]

MOST = 12  # tokens of an answer
IMAGE = "<|image|>"
PROCESSOR: dict[str, Any] = {
    **{"size": {"height": 16, "width": 16}, "max_image_tiles": 2},
    **{"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True},
    **{"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.5]},
}
PICTURES = [noise(24, 60), noise(16, 16, seed=1)]  # of two tiles, and of one
TEXTS = ["", " and then ", " so?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model, whose tokenizer knows a token behind those that the model says."""
    folder = tmp_path_factory.mktemp("mllama")
    make_wrapped(folder, "mllama", image_token=VOCAB_SIZE)
    know_tokens(folder, [IMAGE])
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    """A server that holds what layers read of one sequence's images and a few numbers more."""
    flags: tuple[str, ...] = ("--dtype", "float32", "--stall-timeout", "600")
    flags += ("--feature-memory", "4096")
    flags += ("--max-input-tokens", "64", "--max-total-tokens", "96")
    room = ("--max-batch-total-tokens", "160", "--max-batch-prefill-tokens", "64")
    with serving("--model-id", str(folder), *flags, *room) as server:
        yield server


def ask(server: ServerProcess, count: int, **more: Any) -> dict[str, Any]:
    """Return the details of an answer about so many pictures."""
    return image_support.ask(server, TEXTS, PICTURES[:count], **{"max_new_tokens": MOST, **more})


def expected(folder: Path, count: int) -> tuple[list[int], list[int]]:
    """Return the prompt that transformers' processor makes, and its model's greedy tokens."""
    import torch
    from transformers import AutoTokenizer, MllamaForConditionalGeneration, MllamaProcessor
    from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil

    by_any = {"check_argument_for_proper_class": lambda self, name, value: type(value)}
    kind = type("AnyProcessor", (MllamaProcessor,), by_any)  # PIL's processor is none of its own
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    processor: Any = kind(MllamaImageProcessorPil(**PROCESSOR), tokenizer)
    text = interleave(TEXTS, [IMAGE] * count)
    inputs = processor(images=[PICTURES[:count]], text=[text], return_tensors="pt")
    model: Any = MllamaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    found = model.generate(**inputs, max_new_tokens=MOST, do_sample=False, pad_token_id=2)
    ids = inputs["input_ids"][0].tolist()
    return ids, found[0, len(ids) :].tolist()


def test_two_ranks_say_the_same_and_go_on_behind_a_crash(folder: Path) -> None:
    """Rank 0 alone has a tower; what it made of images is handed around anew."""
    flags = ("--dtype", "float32", "--num-shard", "2", "--stall-timeout", "600")
    _, ids = expected(folder, 2)
    with serving("--model-id", str(folder), *flags) as server:
        for _ in range(2):
            tokens = told(ask(server, 2))
            assert tokens == ids[: len(tokens)] and (len(tokens) == MOST or tokens[-1] == 1)
            os.kill(server.shards()[1], signal.SIGKILL)
        server.wait_idle()


@pytest.mark.parametrize("count", [1, 2])
def test_prompts_and_tokens_are_those_of_transformers(
    server: ServerProcess, folder: Path, count: int
) -> None:
    details = ask(server, count)
    prompt, ids = expected(folder, count)
    assert [token["id"] for token in details["prefill"]] == prompt
    tokens = told(details)
    assert tokens == ids[: len(tokens)] and (len(tokens) == MOST or tokens[-1] == 1)


def test_the_same_in_little_room_beside_text_and_a_grammar_and_behind_a_crash(
    server: ServerProcess,
) -> None:
    """Where what is read of images has no room, they wait; nothing of penalties minds their ids."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    by_grammar = {"grammar": {"type": "json", "value": schema}, "max_new_tokens": 40}
    longer = {"max_new_tokens": 60, "min_new_tokens": 60, "repetition_penalty": 1.1}
    counts = (0, 1, 2)
    alone = [told(ask(server, count, **longer)) for count in counts]
    answer = ask(server, 1, **by_grammar)
    assert json.loads(answer["text"])["a"] in (1, 2)
    accepted, _ = server.books()
    with ThreadPoolExecutor(7) as pool:
        with server.held():  # so that all of them come at once
            asked = [pool.submit(ask, server, counts[i % 3], **longer) for i in range(6)]
            guided = pool.submit(ask, server, 1, **by_grammar)
            server.wait_metric("tgi_request_accepted", accepted + 7)
        found = [told(each.result()) for each in asked]
        assert guided.result()["text"] == answer["text"]
    assert found == [alone[i % 3] for i in range(6)]
    (shard,) = server.shards()
    os.kill(shard, signal.SIGKILL)
    assert told(ask(server, 2, **longer)) == alone[2]
    server.wait_idle()
