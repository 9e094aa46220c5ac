"""Ultravox, whose text and tower lie in folders of their own, behind whole servers.

The oracle is of transformers' Whisper and text models; see `ultravox_models.py`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.router.media.sound_files import as_floats, audio_part, encode_sound, make_samples
from tests.shard.media.ultravox_models import Ultravox, make_ultravox
from tests.support.warm_children import home_of_hub
from tests.system.server import ServerProcess, serving
from tests.system.test_videos import MOST, ask

FIRST, SECOND, LONG = make_samples(0.71), make_samples(0.33, seed=1), make_samples(30.4)
# Texts and sounds, and the text of their message, in which a sound has a line of its own.
MESSAGES: list[tuple[list[Any], str]] = [
    ([FIRST], "<|audio|>"),
    (
        ["Hear ", FIRST, " and\n", SECOND, SECOND, "so?"],
        "Hear \n<|audio|>\n and\n<|audio|>\n<|audio|>\nso?",
    ),
    ([LONG, " so?"], "<|audio|>\n so?"),
    (["Hi"], "Hi"),
]


def send(parts: list[Any]) -> list[Any]:
    """Return the parts of a message of texts and samples."""
    return [each if isinstance(each, str) else audio_part(encode_sound(each)) for each in parts]


def check_transcription(server: ServerProcess, made: Ultravox) -> None:
    """It is asked as it was trained, the sound at the end."""
    ids, said = made.generate("Transcribe\n<|audio|>", as_floats(FIRST), most=MOST)
    client: Any = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
    answer = client.audio.transcriptions.create(
        model="tgi",
        file=("a.wav", encode_sound(FIRST)),
        extra_body={"max_completion_tokens": MOST},
    )
    assert answer.text == made.tokenizer.decode(said, skip_special_tokens=True).strip()
    assert answer.usage.input_tokens == len(ids)


@pytest.mark.parametrize(
    ("version", "text", "own_tower"),
    [("0.4", "llama", False), ("0.5", "qwen3", True), ("0.7", "glm4_moe", False)],
)
def test_ids_and_tokens_are_those_of_its_parts(
    tmp_path: Path, version: str, text: str, own_tower: bool
) -> None:
    made = make_ultravox(tmp_path, version, text=text, own_tower=own_tower)
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HOME": home_of_hub(os.environ)}
    flags = ("--dtype", "float32", "--max-batch-prefill-tokens", "64")
    with serving("--model-id", str(made.folder), *flags, env=env) as server:
        for parts, content in MESSAGES:
            sounds = [as_floats(each) for each in parts if not isinstance(each, str)]
            assert ask(server, *send(parts)) == made.generate(content, *sounds, most=MOST)
        check_transcription(server, made)
        typed, _ = ask(server, "<|audio|>", *send([FIRST]))
        heard, _ = made.generate("<|audio|>", as_floats(FIRST), most=MOST)
        assert typed.count(1) == heard.count(1)  # what is typed is text
