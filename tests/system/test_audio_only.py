"""Models that hear and do not see, behind whole servers: ids and tokens of transformers.

The oracle is transformers' processor, and its model's greedy tokens; its feature extractor computes
as where torch is not installed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from tests.router.media.image_files import noise
from tests.router.media.sound_files import as_floats, audio_part, encode_sound, make_samples
from tests.shard.media.audio_models import make_folder
from tests.support.warm_children import home_of_hub
from tests.system.client import post
from tests.system.server import ServerProcess, serving
from tests.system.test_videos import MOST, ask
from tests.system.test_videos import part as image_part
from tgi_trio.testing.checkpoints import VOCAB_SIZE

WRONG = [
    (image_part(noise(8, 8)), "an image, and this model does not see images"),
    (audio_part(encode_sound(make_samples(0.02))), "it is too short for this model: 320"),
    (audio_part(encode_sound(make_samples(30.2))), "more than 30 s, which this model"),
]


class Oracle:
    """transformers' processor and model."""

    def __init__(self, folder: Path, processor: Any) -> None:
        from transformers import AutoModelForMultimodalLM

        self.processor = processor
        self.model: Any = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.eval().generation_config.eos_token_id = None

    def generate(self, *shown: Any) -> tuple[list[int], list[int]]:
        """Return ids and greedy tokens of a message of texts and samples."""
        sounds = [as_floats(each) for each in shown if not isinstance(each, str)]
        content = [
            {"type": "text", "text": each} if isinstance(each, str) else {"type": "audio"}
            for each in shown
        ]
        if type(self.processor).__name__ == "VoxtralProcessor":
            inputs = self._ask_voxtral(shown, sounds)
        else:
            text = self.processor.apply_chat_template(
                [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
            )
            inputs = self.processor(
                text=[text], audio=sounds, add_special_tokens=False, return_tensors="pt"
            )
        found = self.model.generate(**inputs, max_new_tokens=MOST, do_sample=False, pad_token_id=2)
        ids = inputs["input_ids"][0].tolist()
        return ids, found[0, len(ids) :].tolist()

    def _ask_voxtral(self, shown: tuple[Any, ...], sounds: list[Any]) -> dict[str, Any]:
        """Return what is generated from, whose ids `VoxtralProcessor` has of another package.

        `tests/router/text/test_tekken.py` holds ours to that.
        """
        given = dict(self.processor.audio_kwargs)
        pieces = given.pop("max_source_positions")
        features = self.processor._retrieve_input_features(sounds, pieces, **given)
        counts = []
        for sound in sounds:
            own = self.processor._retrieve_input_features([sound], pieces, **given)
            counts.append(len(self.model.get_audio_features(own, return_dict=True).pooler_output))
        left = iter(counts)
        parts = (
            each if isinstance(each, str) else "[BEGIN_AUDIO]" + "[AUDIO]" * next(left)
            for each in shown
        )
        text = f"<s>[INST]{''.join(parts)}[/INST]"
        ids = self.processor.tokenizer(text, add_special_tokens=False, return_tensors="pt")
        return {"input_ids": ids["input_ids"], "input_features": features}


def check_transcription(server: ServerProcess, oracle: Oracle, sound: Any) -> None:
    """What a model writes down is what transformers' processor asks it for."""
    processor, language = oracle.processor, {}
    if type(processor).__name__ == "VoxtralProcessor":
        inputs = oracle._ask_voxtral((sound,), [as_floats(sound)])
        more = processor.tokenizer("lang:en[TRANSCRIBE]", add_special_tokens=False)["input_ids"]
        ids = torch.cat((inputs["input_ids"], torch.tensor([more])), 1)
        inputs["input_ids"], language = ids, {"language": "en"}
        found = oracle.model.generate(
            **inputs, max_new_tokens=MOST, do_sample=False, pad_token_id=2
        )
        count, said = ids.shape[1], found[0, ids.shape[1] :].tolist()
    else:
        prompt, said = oracle.generate(sound, processor.default_transcription_prompt)
        count = len(prompt)
    expected = processor.tokenizer.decode(said, skip_special_tokens=True).strip()
    client: Any = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
    asked: dict[str, Any] = {
        **{"model": "tgi", "file": ("a.wav", encode_sound(sound)), **language},
        "extra_body": {"max_completion_tokens": MOST},
    }
    answer = client.audio.transcriptions.create(**asked)
    assert answer.text == expected
    assert answer.usage.type == "tokens" and answer.usage.input_tokens == count
    *deltas, done = client.audio.transcriptions.create(**asked, stream=True)
    assert (done.type, done.text) == ("transcript.text.done", expected)
    assert "".join(each.delta for each in deltas).strip() == expected
    text = client.audio.transcriptions.create(**asked, response_format="text")
    assert text.strip() == expected


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", ["qwen2_audio", "glmasr", "voxtral"])
def test_ids_and_tokens_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    """GLM-ASR takes one sound in a prompt there, of which it hears pieces of 30 s."""
    folder, processor = make_folder(tmp_path, family)
    oracle = Oracle(folder, processor)
    first, second = make_samples(0.71), make_samples(0.33, seed=1)
    shown: list[tuple[Any, ...]] = [(first, " and ", second, " so?")]
    if family == "glmasr":
        shown = [(first, " so?"), (make_samples(30.4), " so?")]
    if family == "voxtral":
        shown = [(make_samples(30.4), " and ", second, " so?")]
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HOME": home_of_hub(os.environ)}
    with serving("--model-id", str(folder), "--dtype", "float32", env=env) as server:
        for each in shown:
            ids, expected = oracle.generate(*each)
            assert ids.count(24 if family == "voxtral" else VOCAB_SIZE) > 8
            sent = [
                part if isinstance(part, str) else audio_part(encode_sound(part)) for part in each
            ]
            assert ask(server, *sent) == (ids, expected)
        assert server.metric("tgi_audio_count") == 2
        if family != "qwen2_audio":  # which has no words of its own for it
            check_transcription(server, oracle, first)
        for wrong, said in WRONG[: {"qwen2_audio": 3, "glmasr": 2}.get(family, 1)]:
            body = {"messages": [{"role": "user", "content": [wrong]}], "max_tokens": 2}
            answer = post(f"{server.url}/v1/chat/completions", json=body)
            assert answer.status_code == 422 and said in answer.text, answer.text
