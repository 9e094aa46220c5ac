"""Qwen-Omni's thinkers behind whole servers: they see, hear and write as transformers' do.

The oracle is transformers' processor, and its model's greedy tokens. Frames have a size that needs
no resampling, and sounds the model's rate.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from tests.router.media.image_files import noise
from tests.router.media.sound_files import as_floats, audio_part, encode_sound, make_samples
from tests.router.media.torchvision_processors import video_processor
from tests.router.media.video_files import make_video, read_all
from tests.system.client import post
from tests.system.server import serving
from tests.system.test_videos import MOST, NORMAL, ask, part
from tgi_trio.testing.checkpoints import VOCAB_SIZE
from tgi_trio.testing.wrapped_checkpoints import make_wrapped

pytestmark = pytest.mark.system

KINDS = ("image", "video", "audio")
ENDS = ("vision_bos", "vision_eos", "audio_bos", "audio_eos")
# By family: tokens of `KINDS` and `ENDS`, the side of a patch, frames in a second that are asked
# for, and what the feature extractor says.
FAMILIES: dict[str, tuple[tuple[str, ...], int, float, dict[str, Any]]] = {
    "qwen2_5_omni": (
        ("<|IMAGE|>", "<|VIDEO|>", "<|AUDIO|>", *(f"<|{end}|>" for end in ENDS)),
        *(14, 2.4, {"chunk_length": 300}),
    ),
    "qwen3_omni_moe": (
        (
            *("<|image_pad|>", "<|video_pad|>", "<|audio_pad|>"),
            *("<|vision_start|>", "<|vision_end|>", "<|audio_start|>", "<|audio_end|>"),
        ),
        *(16, 1.0, {"chunk_length": 30, "dither": 0.0}),
    ),
}
SOUNDS = [make_samples(2.13), make_samples(2.13, seed=1)]


def write_template(tokens: tuple[str, ...]) -> str:
    """Return a template that writes what a family's own does around what is no text."""
    image, video, audio, *ends = tokens
    begin, end, begin_audio, end_audio = ends
    return (
        "<s>{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
        f"{{% elif p.type == 'image' %}}{begin}{image}{end}"
        f"{{% elif p.type == 'video' %}}{begin}{video}{end}"
        f"{{% else %}}{begin_audio}{audio}{end_audio}{{% endif %}}{{% endfor %}}{{% endfor %}}"
    )


def make_folder(folder: Path, family: str) -> Path:
    """Write a random thinker, with its processors' settings and a template."""
    tokens, patch, _, extractor = FAMILIES[family]
    named = ("image_token", "video_token", "audio_token", "vision_start_token")
    whole = {f"{name}_id": VOCAB_SIZE + i for i, name in enumerate(named) if i}
    whole |= {"audio_start_token_id": VOCAB_SIZE + 5}
    make_wrapped(
        folder,
        f"{family}_thinker",
        image_token=VOCAB_SIZE,
        whole=whole,
        vocab_size=VOCAB_SIZE + len(tokens),
        max_position_embeddings=2048,
    )
    file = str(folder / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(file)
    tokenizer.add_special_tokens(list(tokens))
    tokenizer.save(file)
    pixels = NORMAL | {"patch_size": patch, "temporal_patch_size": 2, "merge_size": 2}
    own = pixels | {"min_pixels": 64, "max_pixels": 64 * 64} | {"feature_size": 8} | extractor
    (folder / "preprocessor_config.json").write_text(json.dumps(own))
    told = json.loads((folder / "tokenizer_config.json").read_text())
    told |= {"chat_template": write_template(tokens)}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    return folder


def make_speaking(folder: Path, family: str) -> None:
    """Turn a thinker into a part of a model that also speaks, as it is published."""
    config = json.loads((folder / "config.json").read_text())
    whole = {"model_type": family, "thinker_config": config, "talker_config": {"vocab_size": 8}}
    (folder / "config.json").write_text(json.dumps(whole))
    file = folder / "model.safetensors"
    tensors = {f"thinker.{name}": each for name, each in load_file(file).items()}
    tensors["talker.model.embed_tokens.weight"] = torch.zeros(8, 4)
    save_file(tensors, file, {"format": "pt"})


class Oracle:
    """transformers' processor and model of a thinker's folder."""

    def __init__(self, folder: Path, family: str) -> None:
        from transformers import AutoModelForMultimodalLM, PreTrainedTokenizerFast
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )
        from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

        self.tokens, patch, self.fps, own = FAMILIES[family]
        names = [f"{kind}_token" for kind in KINDS] + [f"{end}_token" for end in ENDS]
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"),
            **{"bos_token": "<s>", "pad_token": "</s>"},
            extra_special_tokens=dict(zip(names, self.tokens, strict=True)),
        )
        sizes: dict[str, Any] = {"patch_size": patch, "temporal_patch_size": 2, "merge_size": 2}
        images = Qwen2VLImageProcessorPil(
            **NORMAL, **sizes, size={"shortest_edge": 64, "longest_edge": 64 * 64}
        )
        extractor: Any = WhisperFeatureExtractor(feature_size=8, **own)
        extractor._torch_extract_fbank_features = extractor._np_extract_fbank_features
        module = importlib.import_module(f"transformers.models.{family}.processing_{family}")
        (name,) = (name for name in module.__all__ if name.endswith("Processor"))
        whole = getattr(module, name)
        whole.check_argument_for_proper_class = lambda self, name, value: type(value)
        videos = video_processor("qwen2_vl", "Qwen2VL", **NORMAL, **sizes)
        self.processor = whole(images, videos, extractor, tokenizer)
        self.model: Any = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32)
        self.model.eval().generation_config.eos_token_id = None

    def generate(self, *shown: Any, fps: float | None = None) -> tuple[list[int], list[int]]:
        """Return ids and greedy tokens of a message of texts, pictures, videos and samples."""
        from transformers.video_utils import VideoMetadata

        image, video, audio, begin, end, begin_audio, end_audio = self.tokens
        text, given = "<s>", {kind: [] for kind in KINDS}  # type: ignore[var-annotated]
        for each in shown:
            if isinstance(each, str):
                text += each
            elif isinstance(each, bytes):
                text += begin + video + end
                given["video"].append(torch.from_numpy(read_all(each)))
            elif hasattr(each, "size") and isinstance(each.size, tuple):
                text += begin + image + end
                given["image"].append(each)
            else:
                text += begin_audio + audio + end_audio
                given["audio"].append(as_floats(each))
        frames = given["video"]
        moments = {
            "do_sample_frames": True,
            "fps": fps or 2.0,
            "video_metadata": [VideoMetadata(len(f), fps=10.0) for f in frames],
        }
        inputs = self.processor(
            text=[text],
            images=given["image"] or None,
            videos=frames or None,
            audio=given["audio"] or None,
            videos_kwargs=moments if frames else {},
            add_special_tokens=False,
            return_tensors="pt",
        )
        found = self.model.generate(**inputs, max_new_tokens=MOST, do_sample=False, pad_token_id=2)
        ids = inputs["input_ids"][0].tolist()
        return ids, found[0, len(ids) :].tolist()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_ids_and_tokens_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    """Also in steps that end within what is seen and heard, and of a published folder's form."""
    folder = make_folder(tmp_path, family)
    oracle = Oracle(folder, family)
    side = 8 * FAMILIES[family][1]
    picture, video = noise(56, 60), make_video(frames=26, height=2 * side, width=4 * side)
    first, second = SOUNDS
    shown: list[tuple[Any, ...]] = [
        ("Hear: ", first, " so?"),
        ("See: ", picture, " hear: ", first, " and ", second, " see: ", video, " so?"),
    ]
    expected = [oracle.generate(*each) for each in shown]
    quick = oracle.generate("See: ", video, " so?", fps=oracle.fps)
    assert expected[1][0].count(VOCAB_SIZE + 1) > 200 and quick[0] != expected[1][0]
    if family == "qwen2_5_omni":
        make_speaking(folder, family)
    flags = ("--dtype", "float32", "--max-batch-prefill-tokens", "96")
    with serving("--model-id", str(folder), *flags, "--payload-limit", "4000000") as server:
        for each, said in zip(shown, expected, strict=True):
            sent = [
                audio_part(encode_sound(one)) if any(one is sound for sound in SOUNDS) else one
                for one in each
            ]
            assert ask(server, *sent) == said
        asked = {"mm_processor_kwargs": {"fps": oracle.fps}}
        assert ask(server, "See: ", video, " so?", **asked) == quick
        assert server.metric("tgi_audio_count") == 3
        for wrong, why in (
            ({"num_frames": 4}, "not chosen by `num_frames`"),
            ({"use_audio_in_video": True}, "`use_audio_in_video` is not read"),
            *([({"fps": 3}, "lie between")] if family == "qwen3_omni_moe" else []),
        ):
            content = [{"role": "user", "content": [part(video)]}]
            body = {"messages": content, "max_tokens": 2, "mm_processor_kwargs": wrong}
            answer = post(f"{server.url}/v1/chat/completions", json=body)
            assert answer.status_code == 422 and why in answer.text, answer.text
