"""Gemma 3 behind a whole server: an image's tokens see one another, also beside a grammar, among
others that leave little room, and when a shard has crashed. The oracle is transformers.
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
import tokenizers
from PIL import Image

from tests.router.media.image_files import noise
from tests.system import image_support
from tests.system.image_support import interleave, know_tokens, told
from tests.system.server import ServerProcess, serving
from tgi_trio.testing.checkpoints import VOCAB_SIZE
from tgi_trio.testing.wrapped_checkpoints import make_wrapped

pytestmark = [pytest.mark.system, pytest.mark.thorough]

MOST = 8  # tokens of an answer
LONGER = 60  # and of those that do not fit beside each other
FEATURES = 4  # tokens of an image
SOFT, BEGIN, END = "<image_soft_token>", "<start_of_image>", "<end_of_image>"
PROCESSOR: dict[str, Any] = {
    **{"size": {"height": 16, "width": 16}, "do_rescale": True, "rescale_factor": 1 / 255},
    **{"do_normalize": True, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
}
PICTURES = [noise(24, 40), noise(40, 16, seed=1)]
TEXTS = ["Look: ", " and then ", " so?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model, with a tokenizer that knows the tokens of its images."""
    folder = tmp_path_factory.mktemp("gemma")
    make_wrapped(folder, "gemma3", image_token=VOCAB_SIZE, vocab_size=VOCAB_SIZE + 3)
    know_tokens(folder, [SOFT, BEGIN, END])
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    """A server whose blocks are too few for all answers at the same time."""
    flags: tuple[str, ...] = ("--max-input-tokens", "80", "--max-total-tokens", "112")
    room = ("--max-batch-total-tokens", "192", "--max-batch-prefill-tokens", "80")
    flags += ("--dtype", "float32", "--stall-timeout", "600")
    with serving("--model-id", str(folder), *flags, *room) as server:
        yield server


def ask(server: ServerProcess, count: int, **more: Any) -> dict[str, Any]:
    """Return the details of an answer about so many pictures."""
    return image_support.ask(server, TEXTS, PICTURES[:count], **{"max_new_tokens": MOST, **more})


def expected(folder: Path, pictures: list[Image.Image]) -> tuple[list[int], int]:
    """Greedy tokens of transformers' model, and how many its prompt has."""
    import torch
    from transformers import AutoModelForImageTextToText, Gemma3ImageProcessorPil

    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.token_to_id(SOFT) == VOCAB_SIZE
    processor: Any = Gemma3ImageProcessorPil(**PROCESSOR)
    inputs = {"pixel_values": processor(list(pictures), return_tensors="pt")["pixel_values"]}
    shown = f"\n\n{BEGIN}{SOFT * FEATURES}{END}\n\n"
    ids = torch.tensor([tokenizer.encode(interleave(TEXTS, [shown] * len(pictures))).ids])
    inputs["token_type_ids"] = (ids == VOCAB_SIZE).long()
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    found = model.generate(ids, **inputs, max_new_tokens=MOST, do_sample=False, pad_token_id=2)
    return found[0, ids.shape[1] :].tolist(), ids.shape[1]


@pytest.mark.parametrize("count", [1, 2])
def test_tokens_are_those_of_transformers(server: ServerProcess, folder: Path, count: int) -> None:
    details = ask(server, count)
    ids, length = expected(folder, PICTURES[:count])
    assert len(details["prefill"]) == length
    tokens = told(details)
    assert tokens == ids[: len(tokens)] and (len(tokens) == MOST or tokens[-1] == 1)


def test_the_same_tokens_in_little_room_beside_a_grammar_and_behind_a_crash(
    server: ServerProcess,
) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    by_grammar = {"grammar": {"type": "json", "value": schema}, "max_new_tokens": LONGER}
    longer = {"max_new_tokens": LONGER, "min_new_tokens": LONGER}
    alone = [told(ask(server, count, **longer)) for count in (1, 2)]
    answer = ask(server, 1, **by_grammar)
    assert json.loads(answer["text"])["a"] in (1, 2)
    accepted, _ = server.books()
    with ThreadPoolExecutor(6) as pool:
        with server.held():  # so that all of them come at once
            asked = [pool.submit(ask, server, 1 + i % 2, **longer) for i in range(5)]
            guided = pool.submit(ask, server, 1, **by_grammar)
            server.wait_metric("tgi_request_accepted", accepted + 6)
        found = [told(each.result()) for each in asked]
        assert guided.result()["text"] == answer["text"]
    assert found == [alone[i % 2] for i in range(5)]
    (shard,) = server.shards()
    os.kill(shard, signal.SIGKILL)
    assert told(ask(server, 2, **longer)) == alone[1]
    server.wait_idle()
