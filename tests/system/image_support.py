"""What tests of models that see share: questions of texts and pictures, and what answers tell."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from PIL import Image

from tests.router.media.image_files import encode
from tests.system.client import post
from tests.system.server import ServerProcess
from tgi_trio.testing.checkpoints import VOCAB_SIZE


def know_tokens(folder: Path, tokens: Sequence[str]) -> None:
    """Have the tokenizer of a folder know tokens behind those that its model says, in order."""
    file = str(folder / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(file)
    tokenizer.add_special_tokens(list(tokens))
    for place, token in enumerate(tokens):
        assert tokenizer.token_to_id(token) == VOCAB_SIZE + place
    tokenizer.save(file)


def interleave(texts: Sequence[str], shown: Sequence[str]) -> str:
    """Return texts with what is shown between them: as many, one more, or none."""
    return "".join(piece for pair in zip(texts, [*shown, ""], strict=False) for piece in pair)


def question(
    texts: Sequence[str], pictures: Sequence[Image.Image], **parameters: Any
) -> dict[str, Any]:
    """Return the body of a request in TGI's own API."""
    urls = [base64.b64encode(encode(each)).decode() for each in pictures]
    prompt = interleave(texts, [f"![](data:image/png;base64,{url})" for url in urls])
    asked = {"details": True, "decoder_input_details": True, **parameters}
    return {"inputs": prompt or "Well", "parameters": asked}


def ask(
    server: ServerProcess,
    texts: Sequence[str],
    pictures: Sequence[Image.Image],
    **parameters: Any,
) -> dict[str, Any]:
    """Return the details of an answer about pictures, its text among them."""
    answer = post(f"{server.url}/generate", json=question(texts, pictures, **parameters))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found["details"] | {"text": found["generated_text"]}


def told(details: dict[str, Any]) -> list[int]:
    """Return the ids of the tokens of an answer."""
    return [token["id"] for token in details["tokens"]]
