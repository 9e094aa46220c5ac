"""Qwen3-ASR behind whole servers: chats, and transcriptions as its own processor asks for them.

The oracle is transformers' processor and its model's greedy tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from tests.router.media.sound_files import as_floats, audio_part, encode_sound, make_samples
from tests.shard.media.qwen3_asr_models import EXTRACTOR, make_qwen3_asr
from tests.system.client import post
from tests.system.server import serving
from tests.system.test_videos import MOST, ask
from tgi_trio.media.feature_extractors import FeatureExtractor
from tgi_trio.shard.media.tower import load_tower

pytestmark = pytest.mark.system

# Of less than half a second, of parts of a second, and of several windows of its encoder.
SHORT, FIRST, LONG = make_samples(0.21), make_samples(1.37, seed=1), make_samples(7.2, seed=2)
END = 1  # id of the end of a text


class Oracle:
    def __init__(self, processor: Any, model: Any) -> None:
        self.processor, self.model = processor, model

    def generate(
        self, text: str, *sounds: Any, end: int | None = None
    ) -> tuple[list[int], list[int]]:
        """Return ids and greedy tokens of a prompt with a placeholder for each of these."""
        given = {"text": text, "audio": [as_floats(each) for each in sounds]}
        inputs = self.processor(**given, add_special_tokens=False)
        found = self.model.generate(
            **inputs,
            **{"max_new_tokens": MOST, "do_sample": False, "pad_token_id": 2},
            eos_token_id=end,
        )
        ids = inputs["input_ids"][0].tolist()
        return ids, found[0, len(ids) :].tolist()

    def transcribe(self, sound: Any, **asked: str) -> tuple[int, str]:
        """Return how many ids a request has, and the text that is read of its answer."""
        (text,) = self.processor.apply_transcription_request(
            [as_floats(sound)], tokenize=False, **asked
        )
        ids, said = self.generate(text, sound, end=END)
        tokenizer = self.processor.tokenizer
        answer = tokenizer.decode(said, skip_special_tokens=True)
        return len(ids), self.processor.extract_transcription(answer)


@pytest.mark.parametrize(
    ("first", "flags"), [(True, ("--num-shard", "2")), (False, ("--cpu-backend", "torch"))]
)
def test_ids_and_tokens_are_those_of_transformers(
    tmp_path: Path, first: bool, flags: tuple[str, ...]
) -> None:
    """`first`: of a folder as it was published first, whose template knows no answers."""
    oracle = Oracle(*make_qwen3_asr(tmp_path, first=first))
    mark, system = "<|audio_start|><|audio_pad|><|audio_end|>", "<|im_start|>system\n"
    begin, end = "<|im_end|>\n<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    with serving("--model-id", str(tmp_path), "--dtype", "float32", *flags) as server:
        for sound in (SHORT, FIRST, LONG):
            expected = oracle.generate(f"{system}{begin}{mark}{end}", sound)
            assert ask(server, audio_part(encode_sound(sound))) == expected
        client: Any = openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0)
        for sound, asked in (
            (FIRST, {}),
            (LONG, {"language": "en"}),
            (FIRST, {"language": "chinese", "prompt": "Names: Ada"}),
            (SHORT, {"prompt": "Names: Ada"}),
        ):
            count, text = oracle.transcribe(sound, **asked)
            given: dict[str, Any] = {
                **{"model": "tgi", "file": ("a.wav", encode_sound(sound)), **asked},
                "extra_body": {"max_completion_tokens": MOST},
            }
            answer = client.audio.transcriptions.create(**given)
            assert (answer.usage.input_tokens, answer.text) == (count, text)
            *deltas, done = client.audio.transcriptions.create(**given, stream=True)
            assert done.text == text == "".join(each.delta for each in deltas).strip()
        body = {"messages": [{"role": "user", "content": [audio_part(b"none")]}]}
        answer = post(f"{server.url}/v1/chat/completions", json=body)
        assert answer.status_code == 422 and "it is none of WAV" in answer.text
        with pytest.raises(openai.UnprocessableEntityError, match=r"zh \(Chinese\), cs"):
            client.audio.transcriptions.create(**given | {"language": "Klingon"})


def test_its_encoder_hears_as_the_whole_model(tmp_path: Path) -> None:
    _, model = make_qwen3_asr(tmp_path, first=True)
    tower = load_tower(tmp_path, "qwen3_asr", torch.device("cpu"), torch.float32, hears=True)
    bundle = FeatureExtractor("qwen3_asr", EXTRACTOR).extract(as_floats(FIRST))
    features = torch.from_numpy(bundle["input_features"])
    padded = torch.nn.functional.pad(features, (0, -features.shape[-1] % 100))
    mask = (torch.arange(padded.shape[-1]) < features.shape[-1])[None].long()
    with torch.no_grad():
        expected = model.model.get_audio_features(padded, mask).pooler_output
    assert torch.equal(torch.from_numpy(tower.encode(bundle).rows), expected)
