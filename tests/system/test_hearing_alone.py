"""A model that hears and does not see, behind a whole server: ids and tokens of transformers.

The oracle is transformers' processor, and its model's greedy tokens; its feature extractor computes
as where torch is not installed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.router.images.image_files import noise
from tests.router.images.sound_files import as_floats, audio_part, encode_sound, make_samples
from tests.shard.images.hearing_models import make_folder
from tests.system.client import post
from tests.system.server import serving
from tests.system.test_videos import MOST, ask
from tests.system.test_videos import part as image_part
from tgi_trio.testing.checkpoints import VOCAB_SIZE

SAMPLES = [make_samples(0.71), make_samples(0.33, seed=1)]


def test_ids_and_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForMultimodalLM

    folder, processor = make_folder(tmp_path)
    model: Any = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    first, second = map(encode_sound, SAMPLES)
    shown = [audio_part(first), " and ", audio_part(second), " so?"]
    content = [
        {"type": "text", "text": each} if isinstance(each, str) else {"type": "audio"}
        for each in shown
    ]
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
    )
    inputs = processor(
        text=[text],
        audio=[as_floats(each) for each in SAMPLES],
        add_special_tokens=False,
        return_tensors="pt",
    )
    found = model.generate(**inputs, max_new_tokens=MOST, do_sample=False, pad_token_id=2)
    ids = inputs["input_ids"][0].tolist()
    assert ids.count(VOCAB_SIZE) > 20
    with serving("--model-id", str(folder), "--dtype", "float32") as server:
        assert ask(server, *shown) == (ids, found[0, len(ids) :].tolist())
        assert server.metric("tgi_audio_count") == 2
        for sent, said in [
            (image_part(noise(8, 8)), "an image, and this model does not see images"),
            (audio_part(encode_sound(make_samples(0.02))), "it is too short for this model: 320"),
            (audio_part(encode_sound(make_samples(30.2))), "more than 30 s, which this model"),
        ]:
            body = {"messages": [{"role": "user", "content": [sent]}], "max_tokens": 2}
            answer = post(f"{server.url}/v1/chat/completions", json=body)
            assert answer.status_code == 422 and said in answer.text, answer.text
