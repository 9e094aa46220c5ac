"""`no_repeat_ngram_size`: answers are those of transformers' `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.system.client import generate, post
from tests.system.golden import reference, tokenize
from tests.system.server import serving
from tgi_trio.testing.checkpoints import make_checkpoint

pytestmark = pytest.mark.system

TEXT = "the cat and the cat and the cat"
NEW = 40


@pytest.mark.parametrize(
    ("family", "size", "flags"),
    [
        ("llama", 1, ("--speculate", "3")),
        ("llama", 1, ("--speculate", "3", "--cpu-backend", "torch")),
        ("t5", 2, ()),
    ],
    ids=["kernels", "torch", "t5"],
)
def test_it_is_as_in_transformers(
    tmp_path: Path, family: str, size: int, flags: tuple[str, ...]
) -> None:
    make_checkpoint(tmp_path, family)
    with serving("--model-id", str(tmp_path), "--dtype", "float32", *flags) as server:
        prompt = tokenize(server, TEXT)
        plain, barred = (
            reference(tmp_path, [prompt], NEW, no_repeat_ngram_size=each)[0] for each in (0, size)
        )

        def answer(**more: Any) -> list[int]:
            body = generate(server.url, TEXT, max_new_tokens=NEW, details=True, **more)
            return [token["id"] for token in body["details"]["tokens"]]

        assert answer() == plain != barred
        assert answer(no_repeat_ngram_size=size) == barred
        assert answer(no_repeat_ngram_size=size, no_repeat_ngram_window=10**6) == barred
        every = sorted({*prompt, *plain, *barred})
        spared = {"no_repeat_ngram_size": size, "no_repeat_ngram_whitelist": every}
        assert answer(**spared) == plain
        if family == "t5":
            return
        body = {"model": "tgi", "prompt": TEXT, "max_tokens": NEW, "temperature": 0}
        body |= {"no_repeat_ngram_size": size, "return_token_ids": True}
        [choice] = post(f"{server.url}/v1/completions", json=body).json()["choices"]
        assert choice["token_ids"] == barred
        refused = post(
            f"{server.url}/v1/completions",
            json=body | {"no_repeat_ngram_size": 2, "no_repeat_ngram_window": 1},
        )
        assert refused.status_code == 422
        assert "must be 0, for the whole text, or >= `no_repeat_ngram_size`" in refused.text
