"""Phi-4-multimodal behind a whole server: with its adapter for images, that for sounds, or none.

The oracle is transformers' processor and model, with PEFT's adapters switched as the model card
does it: that for images where a prompt has some, that for sounds where it has these alone.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.router.media.image_files import noise
from tests.router.media.sound_files import as_floats, audio_part, encode_sound, make_samples
from tests.shard.media.phi4_models import Phi4Folder, make_phi4
from tests.system.client import post
from tests.system.server import serving
from tests.system.test_videos import MOST, ask
from tests.system.test_videos import part as image_part
from tgi_trio.testing.checkpoints import VOCAB_SIZE

# Which a random model would write, and transformers' then takes for what is to be replaced.
PLACEHOLDERS = (VOCAB_SIZE, VOCAB_SIZE + 1)
UNSAID = {"logit_bias": dict.fromkeys(map(str, PLACEHOLDERS), -100)}
Shown = str | Image.Image | NDArray[np.int16]
FIRST, SECOND = make_samples(0.71), make_samples(0.71, seed=1)
# None is resized, since Pillow and torchvision round otherwise: they fill a side of their crops.
SQUARE, WIDE, TALL = noise(448, 448), noise(200, 448), noise(896, 448, seed=1)
SHOWN: tuple[tuple[Shown, ...], ...] = (
    ("what is this?",),
    (SQUARE, "what is this?"),
    (FIRST, "what is this?"),
    ("first ", WIDE, " then ", TALL, " what is this?"),
    (WIDE, FIRST, "what is this?"),
    (FIRST, " and ", SECOND, " what is this?"),
)


def generate(
    made: Phi4Folder, shown: tuple[Shown, ...], adapter: str
) -> tuple[list[int], list[int]]:
    """Return ids and greedy tokens of a message; `adapter`: that is switched on, "" none."""
    images = [each for each in shown if isinstance(each, Image.Image)]
    sounds = [as_floats(each) for each in shown if isinstance(each, np.ndarray)]
    image, sound = made.processor.image_token, made.processor.audio_token
    content = "".join(
        each if isinstance(each, str) else image if isinstance(each, Image.Image) else sound
        for each in shown
    )
    text = made.processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    given: dict[str, Any] = {"images": images} if images else {}
    if sounds:
        given["audio"] = sounds
    inputs = made.processor(text=text, **given, add_special_tokens=False, return_tensors="pt")
    if adapter:
        made.adapted.set_adapter(adapter)
    with nullcontext() if adapter else made.adapted.disable_adapter():
        found = made.adapted.generate(
            **inputs,
            max_new_tokens=MOST,
            do_sample=False,
            pad_token_id=2,
            suppress_tokens=list(PLACEHOLDERS),
        )
    ids = inputs["input_ids"][0].tolist()
    return ids, found[0, len(ids) :].tolist()


def choose_adapter(shown: tuple[Shown, ...]) -> str:
    if any(isinstance(each, Image.Image) for each in shown):
        return "vision"
    return "speech" if any(isinstance(each, np.ndarray) for each in shown) else ""


def sent(shown: tuple[Shown, ...]) -> list[Any]:
    """Return the parts of a message."""
    return [
        audio_part(encode_sound(each)) if isinstance(each, np.ndarray) else image_part(each)
        for each in shown
    ]


@pytest.mark.parametrize(("backend", "first"), [("kernels", True), ("torch", False)])
def test_tokens_are_those_of_transformers_with_each_adapter_and_without(
    tmp_path: Path, backend: str, first: bool
) -> None:
    """Also in one batch; a sound beside an image is heard otherwise than by itself.

    `first`: of a folder as it was published first.
    """
    made = make_phi4(tmp_path, first=first)
    expected = [generate(made, shown, choose_adapter(shown)) for shown in SHOWN]
    for other in ("", "speech"):
        assert generate(made, SHOWN[1], other)[1] != expected[1][1]
    flags = [
        *("--dtype", "float32", "--cpu-backend", backend, "--payload-limit", "8000000"),
        *("--max-input-tokens", "3000", "--max-total-tokens", "3500"),
    ]
    with serving("--model-id", str(tmp_path), *flags) as server:
        assert [ask(server, *sent(shown), **UNSAID) for shown in SHOWN] == expected
        with ThreadPoolExecutor(len(SHOWN)) as pool:  # all in a batch
            assert (
                list(pool.map(lambda shown: ask(server, *sent(shown), **UNSAID), SHOWN)) == expected
            )
        assert server.metric("tgi_adapters_loaded") == 2
        instruction = "Transcribe the audio clip into text."  # of the model card
        prompt, said = generate(made, (FIRST, instruction), "speech")
        client: Any = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
        answer = client.audio.transcriptions.create(
            model="tgi",
            file=("a.wav", encode_sound(FIRST)),
            extra_body={"max_completion_tokens": MOST},
        )
        text = made.processor.tokenizer.decode(said, skip_special_tokens=True).strip()
        assert (answer.text, answer.usage.input_tokens) == (text, len(prompt))
        for wrong, why in (
            (image_part(noise(4000, 8)), "it would be of 5 x 2688 pixels"),
            (audio_part(encode_sound(make_samples(0.02))), "it is too short for this model: 320"),
        ):
            body = {"messages": [{"role": "user", "content": [wrong]}], "max_tokens": 2}
            refused = post(f"{server.url}/v1/chat/completions", json=body)
            assert refused.status_code == 422 and why in refused.text, refused.text
