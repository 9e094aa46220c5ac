"""Sounds behind whole servers: ids of prompts and tokens are those of transformers.

The oracle is transformers' processor, and its model's greedy tokens. Sounds have the model's rate,
and pictures need no resampling, of which there are several ways.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from tests.router.media.image_files import noise
from tests.router.media.sound_files import (
    as_floats,
    audio_part,
    encode_sound,
    make_samples,
    make_sound,
)
from tests.router.media.torchvision_processors import inherited_processor
from tests.system.client import post
from tests.system.server import ServerProcess, serving
from tests.system.test_videos import MOST, ask
from tgi_trio.testing.checkpoints import VOCAB_SIZE
from tgi_trio.testing.wrapped_checkpoints import make_wrapped

pytestmark = pytest.mark.system

NAMES = ("image_token", "boi_token", "eoi_token", "audio_token", "boa_token", "eoa_token")
TOKENS = ("<|image|>", "<|image>", "<image|>", "<|audio|>", "<|audio>", "<audio|>")
AUDIO = VOCAB_SIZE + TOKENS.index("<|audio|>")
PIXELS = {
    **{"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": False},
    **{"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
}
# By family: the tower of sounds, and its feature extractor.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma4": (
        {
            **{"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"subsampling_conv_channels": [8, 4], "output_proj_dims": 16},
            **{"attention_chunk_size": 4, "attention_context_left": 5},
        },
        {"feature_size": 8},
    ),
    "gemma4_unified": (
        {"audio_embed_dim": 640},
        {"audio_samples_per_token": 640, "feature_size": 640},
    ),
}
TEMPLATE = (
    "<s>{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
    "{% else %}<|{{ p.type }}|>{% endif %}{% endfor %}{% endfor %}"
)
SAMPLES = [make_samples(0.71), make_samples(0.33, seed=1)]
FIRST, SECOND = map(encode_sound, SAMPLES)
PICTURE = noise(64, 64)


def make_folder(folder: Path, family: str) -> Path:
    """Write a random model that sees and hears, with its processors' settings and a template."""
    tower, extractor = FAMILIES[family]
    size = VOCAB_SIZE + len(TOKENS)
    text: dict[str, Any] = {"vocab_size_per_layer_input": size}
    if family == "gemma4_unified":
        text = {"sliding_window": 96}  # at least an image
    make_wrapped(
        folder,
        family,
        image_token=VOCAB_SIZE,
        whole={"audio_config": tower, "audio_token_id": AUDIO},
        vocab_size=size,
        **text,
    )
    file = str(folder / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(file)
    tokenizer.add_special_tokens(list(TOKENS))
    tokenizer.save(file)
    (folder / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    (folder / "processor_config.json").write_text(json.dumps({"feature_extractor": extractor}))
    told = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(told | {"chat_template": TEMPLATE}))
    return folder


class Oracle:
    """transformers' processor and model of a folder."""

    def __init__(self, folder: Path, family: str) -> None:
        from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"),
            **{"bos_token": "<s>", "pad_token": "</s>"},
            extra_special_tokens=dict(zip(NAMES, TOKENS, strict=True)),
        )
        stem = "".join(word.capitalize() for word in family.split("_"))
        if family == "gemma4":
            pixels = _class(f"{family}.image_processing_pil_{family}", f"{stem}ImageProcessorPil")(
                **PIXELS
            )
        else:
            sizes = {key: PIXELS[key] for key in PIXELS if not key.startswith(("do_", "rescale"))}
            pixels = inherited_processor(family, stem, **sizes)
            pixels.do_rescale, pixels.rescale_factor = True, 1 / 255
        name = f"{family}.feature_extraction_{family}"
        extractor = _class(name, f"{stem}AudioFeatureExtractor")(**FAMILIES[family][1])
        whole = _class(f"{family}.processing_{family}", f"{stem}Processor")
        whole.check_argument_for_proper_class = lambda self, name, value: type(value)
        self.processor: Any = whole(extractor, pixels, tokenizer, None)
        self.model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self.model.eval().generation_config.eos_token_id = None

    def generate(self, text: str, *sounds: Any) -> tuple[list[int], list[int]]:
        """Return ids and greedy tokens of a text with marks for these, and for the picture."""
        inputs = self.processor(
            text=[f"<s>{text}"],
            images=[[PICTURE]] if "<|image|>" in text else None,
            audio=[as_floats(each) for each in sounds],
            add_special_tokens=False,
            return_tensors="pt",
        )
        found = self.model.generate(**inputs, max_new_tokens=MOST, do_sample=False, pad_token_id=2)
        ids = inputs["input_ids"][0].tolist()
        return ids, found[0, len(ids) :].tolist()


def _class(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"transformers.models.{module}"), name)


def url_part(data: bytes) -> dict[str, Any]:
    """Return the part of a message in vLLM's shape."""
    url = f"data:audio/wav;base64,{base64.b64encode(data).decode()}"
    return {"type": "audio_url", "audio_url": {"url": url}}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_ids_and_tokens_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    """Beside others in small steps as well; tokens of a unified model's image see one another."""
    folder = make_folder(tmp_path, family)
    oracle = Oracle(folder, family)
    flags = ("--dtype", "float32", "--max-batch-prefill-tokens", "96")
    with serving("--model-id", str(folder), *flags) as server:
        expected = oracle.generate("Hear: <|audio|> so?", SAMPLES[0])
        assert ask(server, "Hear: ", audio_part(FIRST), " so?") == expected
        mixed = "Hear: <|audio|> see: <|image|> and <|audio|>?"
        expected = oracle.generate(mixed, *SAMPLES)
        shown = ("Hear: ", audio_part(FIRST), " see: ", PICTURE, " and ", url_part(SECOND), "?")
        assert ask(server, *shown) == expected
        assert server.metric("tgi_audio_count") == 3
        others = oracle.generate("Hear: <|audio|> so?", SAMPLES[1])
        assert ask(server, "Hear: ", audio_part(SECOND), " so?") == others


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = make_folder(tmp_path_factory.mktemp("audio"), "gemma4")
    flags = ("--dtype", "float32", "--max-audio-seconds", "2", "--payload-limit", "1000000")
    with serving("--model-id", str(folder), *flags, "--stall-timeout", "600") as server:
        yield server


def test_what_is_known_is_heard_once_and_a_lost_shard_hears_again(served: ServerProcess) -> None:
    sound = make_sound(1.2, seed=7)
    assert len(audio_part(sound)["input_audio"]["data"]) > 2**15, "it is cut out of the body"
    decoded = served.metric("tgi_image_decode_duration_count")
    first = ask(served, "Hear: ", audio_part(sound), " so?")
    cached = served.metric("tgi_prefix_cache_hit_tokens")
    assert ask(served, "Hear: ", url_part(sound), " so?") == first
    assert served.metric("tgi_prefix_cache_hit_tokens") > cached
    assert served.metric("tgi_image_decode_duration_count") == decoded + 1
    other = ask(served, "Hear: ", audio_part(make_sound(1.2, seed=8)), " so?")
    assert other[0] == first[0] and other[1] != first[1]
    accepted, _ = served.books()
    (shard,) = served.shards()
    os.kill(shard, signal.SIGSTOP)  # so that it is under way when it dies
    with ThreadPoolExecutor(1) as pool:
        try:
            asked = pool.submit(ask, served, "Hear: ", audio_part(sound), " so?")
            served.wait_metric("tgi_request_accepted", accepted + 1)
        finally:
            os.kill(shard, signal.SIGKILL)
        assert asked.result() == first


def test_responses_have_the_same_prompt(served: ServerProcess) -> None:
    ids, _ = ask(served, "Hear: ", audio_part(FIRST))
    content = [{"type": "input_text", "text": "Hear: "}, audio_part(FIRST)]
    body = {"input": [{"role": "user", "content": content}], "max_output_tokens": 2}
    answer = post(f"{served.url}/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    assert abs(answer.json()["usage"]["input_tokens"] - len(ids)) <= 2  # a break between parts


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (audio_part(b"no sound"), "invalid audio: it is none of WAV, MP3"),
        (audio_part(make_sound(2.5)), "more than 2 s, which are allowed (--max-audio-seconds)"),
        (audio_part(make_sound(0.01)), "invalid audio: it is too short for this model: 160"),
        (audio_part(FIRST) | {"input_audio": {"data": "###"}}, "base64 encoding is invalid"),
        ({"type": "audio_url", "audio_url": {"url": "data:audio,abc"}}, "invalid audio content"),
        ({"type": "input_audio"}, "audio needs `input_audio`"),
    ],
)
def test_what_is_wrong_with_a_sound_is_said(
    served: ServerProcess, sent: dict[str, Any], said: str
) -> None:
    body = {"messages": [{"role": "user", "content": [sent]}], "max_tokens": 2}
    answer = post(f"{served.url}/v1/chat/completions", json=body)
    assert answer.status_code == 422 and said in answer.text, answer.text
