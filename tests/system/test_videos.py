"""Videos behind whole servers: ids of prompts and tokens are those of transformers.

The oracle is transformers' processor, with its own sampling of frames, and its model's greedy
tokens. Sizes need no resampling, of which there are two ways.
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
from PIL import Image

from tests.router.media.image_files import encode, noise
from tests.router.media.torchvision_processors import video_processor
from tests.router.media.video_files import make_video, read_all, video_url
from tests.system.client import post
from tests.system.server import ServerProcess, serving
from tgi_trio.testing.checkpoints import VOCAB_SIZE
from tgi_trio.testing.wrapped_checkpoints import make_wrapped

pytestmark = pytest.mark.system

MOST = 6  # tokens of an answer
TEMPLATE = (
    "<s>{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% else %}"
    "<|vision_start|><|{{ p.type }}_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}"
)
TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
# GLM's, in the same order, and those of a video behind them.
GLM_TOKENS = (
    *("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>"),
    *("<|begin_of_video|>", "<|end_of_video|>"),
)
NAMES = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
SCALED: dict[str, Any] = {"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
NORMAL = SCALED | {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.4, 0.5]}
PATCHES = NORMAL | {"patch_size": 4, "temporal_patch_size": 2, "merge_size": 2}
OF_FRAME: dict[str, Any] = {"min_pixels": 64, "max_pixels": 2048}
# Of all frames together; an image's limits stand beside.
OF_ALL = PATCHES | {"size": {"shortest_edge": 64, "longest_edge": 2048 * 64}}
OF_IMAGE = PATCHES | {"size": {"shortest_edge": 64, "longest_edge": 2048 * 64}}
VIDEO_PROCESSORS = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), ("qwen2_vl", "Qwen2VL")),
    "glm46v": ("glm46v", "Glm46V"),
    "glm4v": ("glm4v", "Glm4v"),
}
PROCESSORS = {
    "qwen2_vl": ("qwen2_vl", "Qwen2VLProcessor"),
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VLProcessor"),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5"), ("qwen3_vl", "Qwen3VLProcessor")),
    "glm46v": ("glm46v", "Glm46VProcessor"),
    "glm4v": ("glm4v", "Glm4vProcessor"),
}
SHOWN = "<|vision_start|><|video_pad|><|vision_end|>"
PROMPT = f"Look: {SHOWN} and <|vision_start|><|image_pad|><|vision_end|> and {SHOWN} so?"
VIDEO = make_video(frames=23, height=32, width=48)
OTHER = make_video(frames=12, height=48, width=32, seed=1, kind="matroska")
PICTURE = noise(32, 40)
RED = Image.new("RGB", (40, 32), (200, 30, 30))


def make_folder(folder: Path, family: str) -> Path:
    """Write a random model that sees, with its processors' settings and a template."""
    tokens = tokens_of(family)
    make_wrapped(folder, family, image_token=VOCAB_SIZE, vocab_size=VOCAB_SIZE + len(tokens))
    file = str(folder / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(file)
    tokenizer.add_special_tokens(list(tokens))
    tokenizer.save(file)
    config = json.loads((folder / "config.json").read_text())
    config |= {name: VOCAB_SIZE + i for i, name in enumerate(NAMES)}
    (folder / "config.json").write_text(json.dumps(config))
    pixels = OF_IMAGE if family.startswith("glm") else PATCHES | OF_FRAME
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels))
    if not is_early(family):
        (folder / "video_preprocessor_config.json").write_text(json.dumps(OF_ALL))
    told = json.loads((folder / "tokenizer_config.json").read_text())
    template = in_words_of(family, TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps(told | {"chat_template": template}))
    return folder


def tokens_of(family: str) -> tuple[str, ...]:
    return GLM_TOKENS if family.startswith("glm") else TOKENS


def in_words_of(family: str, text: str) -> str:
    """Return a text with Qwen's tokens, or a template that writes them, in a family's own."""
    if not family.startswith("glm"):
        return text
    text = text.replace(SHOWN, "<|begin_of_video|><|video|><|end_of_video|>")
    kind = "{{ p.type }}"
    theirs = f"<|begin_of_{kind}|><|{kind}|><|end_of_{kind}|>"
    text = text.replace(f"<|vision_start|><|{kind}_pad|><|vision_end|>", theirs)
    for old, new in zip(TOKENS, GLM_TOKENS, strict=False):
        text = text.replace(old, new)
    return text


def is_early(family: str) -> bool:
    """Whether its files know no videos of their own, and how many frames to see is ours to say."""
    return family in ("qwen2_vl", "qwen2_5_vl")


class Oracle:
    """transformers' processor and model of a folder."""

    def __init__(self, folder: Path, family: str) -> None:
        from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast
        from transformers.models.glm4v import image_processing_pil_glm4v as glm4v
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"),
            **{"bos_token": "<s>", "pad_token": "</s>"},
            extra_special_tokens=dict(
                zip(("image_token", "video_token"), tokens_of(family), strict=False)
            ),
        )
        early = is_early(family)
        kind = VIDEO_PROCESSORS.get(family, ("qwen3_vl", "Qwen3VL"))
        settings: dict[str, Any] = PATCHES | OF_FRAME if early else OF_ALL
        videos = video_processor(*kind, **settings)
        module, name = PROCESSORS[family]
        whole = getattr(
            importlib.import_module(f"transformers.models.{module}.processing_{module}"), name
        )
        whole.check_argument_for_proper_class = lambda self, name, value: type(value)
        images: Any = Qwen2VLImageProcessorPil(**PATCHES, **OF_FRAME)
        if family.startswith("glm"):
            images = glm4v.Glm4vImageProcessorPil(**OF_IMAGE)
        self.processor = whole(image_processor=images, tokenizer=tokenizer, video_processor=videos)
        self.family = family
        self.sampling: dict[str, Any] = {"do_sample_frames": True, "fps": 2}
        self.model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self.model.eval().generation_config.eos_token_id = None

    def generate(self, text: str, videos: list[bytes], **sampling: Any) -> tuple[Any, list[int]]:
        """Return what the model is given, and its greedy tokens."""
        from transformers.video_utils import VideoMetadata

        frames = [torch.from_numpy(read_all(each)) for each in videos]
        text = in_words_of(self.family, text)
        inputs = self.processor(
            text=[text],
            images=[PICTURE] * text.count(tokens_of(self.family)[0]) or None,
            videos=frames,
            video_metadata=[VideoMetadata(len(f), fps=10.0, duration=len(f) / 10) for f in frames],
            **(self.sampling | sampling),
            return_tensors="pt",
        )
        given = {name: value for name, value in inputs.items() if name != "video_metadata"}
        found = self.model.generate(**given, max_new_tokens=MOST, do_sample=False, pad_token_id=2)
        return inputs, found[0, inputs["input_ids"].shape[1] :].tolist()


def part(shown: bytes | str | Image.Image) -> dict[str, Any]:
    if isinstance(shown, str):
        return {"type": "text", "text": shown}
    if isinstance(shown, bytes):
        return {"type": "video_url", "video_url": {"url": video_url(shown)}}
    url = f"data:image/png;base64,{base64.b64encode(encode(shown)).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def ask(server: ServerProcess, *content: Any, **fields: Any) -> tuple[list[int], list[int]]:
    """Return the ids of a prompt, and those of an answer."""
    parts = [each if isinstance(each, dict) else part(each) for each in content]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": MOST}
    fields = {"temperature": 0, "return_token_ids": True, "ignore_eos": True, **fields}
    answer = post(f"{server.url}/v1/chat/completions", json=body | fields)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    choice = found["choices"][0]
    ids = found.get("prompt_token_ids") or choice["prompt_token_ids"]
    assert found["usage"]["prompt_tokens"] == len(ids)
    return ids, choice["token_ids"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("family", sorted(PROCESSORS))
def test_ids_and_tokens_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    folder = make_folder(tmp_path, family)
    oracle = Oracle(folder, family)
    backend = ("--cpu-backend", "torch") if family == "qwen2_vl" else ()
    flags = ("--dtype", "float32", "--max-batch-prefill-tokens", "64", *backend)
    with serving("--model-id", str(folder), *flags) as server:
        # With an image beside it, GLM's class takes a video's tokens for the image's, and fails.
        mixed = PROMPT, ("Look: ", VIDEO, " and ", PICTURE, " and ", OTHER, " so?")
        both = f"Look: {SHOWN} and {SHOWN} so?", ("Look: ", VIDEO, " and ", OTHER, " so?")
        several = both if family.startswith("glm") else mixed
        for (text, content), videos in (
            ((f"Look: {SHOWN} so?", ("Look: ", VIDEO, " so?")), [VIDEO]),
            (several, [VIDEO, OTHER]),
        ):
            inputs, tokens = oracle.generate(text, videos)
            assert ask(server, *content) == (inputs["input_ids"][0].tolist(), tokens)
        if family.startswith("glm"):
            shown = [ask(server, VIDEO, each, " so?") for each in (PICTURE, RED)]
            assert shown[0][0] == shown[1][0] and shown[0][1] != shown[1][1]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, ServerProcess]]:
    folder = make_folder(tmp_path_factory.mktemp("videos"), "qwen2_vl")
    flags = ("--dtype", "float32", "--max-video-frames", "8", "--payload-limit", "1000000")
    with serving("--model-id", str(folder), *flags, "--max-image-pixels", "4096") as server:
        yield folder, server


def test_frames_that_a_client_asks_for(served: tuple[Path, ServerProcess]) -> None:
    folder, server = served
    oracle = Oracle(folder, "qwen2_vl")
    text, content = f"Look: {SHOWN} so?", ("Look: ", VIDEO, " so?")
    for how in ({"fps": 3}, {"num_frames": 8}):
        inputs, tokens = oracle.generate(text, [VIDEO], **({"fps": None} | how))
        assert inputs["video_grid_thw"][0, 0] > 2
        assert ask(server, *content, mm_processor_kwargs=how) == (
            inputs["input_ids"][0].tolist(),
            tokens,
        )


def test_a_video_that_is_known_is_neither_decoded_nor_computed_anew(
    served: tuple[Path, ServerProcess],
) -> None:
    """Its prompt's prefix is found by its content; frames that were asked for belong to that."""
    _, server = served
    video = make_video(frames=30, seed=7)

    def count(*names: str) -> list[float]:
        return [server.metric(name) for name in names]

    names = ("tgi_image_cache_hits", "tgi_image_decode_duration_count", "tgi_video_count")
    before = count(*names)
    first = ask(server, "Look: ", video, " so?")
    cached = server.metric("tgi_prefix_cache_hit_tokens")
    assert ask(server, "Look: ", video, " so?") == first
    assert server.metric("tgi_prefix_cache_hit_tokens") > cached
    assert [now - old for now, old in zip(count(*names), before, strict=True)] == [1, 1, 2]
    other = ask(server, "Look: ", video, " so?", mm_processor_kwargs={"num_frames": 8})
    assert len(other[0]) > len(first[0])
    assert server.metric("tgi_image_decode_duration_count") == before[1] + 2


def test_pictures_one_after_the_other_are_a_video(served: tuple[Path, ServerProcess]) -> None:
    """As vLLM takes them, small and large: those are cut out of the body as they come."""
    _, server = served
    for side in (32, 64):
        frames = [noise(side, side, seed=i) for i in range(4)]
        texts = [base64.b64encode(encode(each)).decode() for each in frames]
        url = f"data:video/jpeg;base64,{','.join(texts)}"
        assert (len(url) > 2**15) == (side == 64)
        ids, said = ask(server, "So: ", {"type": "video_url", "video_url": {"url": url}})
        assert ids.count(VOCAB_SIZE + 1) == 2 * (side // 8) ** 2 or side == 64
        assert len(said) == MOST


def test_a_video_is_counted_without_a_generation(served: tuple[Path, ServerProcess]) -> None:
    _, server = served
    body = {"messages": [{"role": "user", "content": [part("Look: "), part(VIDEO)]}]}
    ids, _ = ask(server, "Look: ", VIDEO)
    answer = post(f"{server.url}/chat_tokenize", json=body)
    assert [each["id"] for each in answer.json()["tokenize_response"]] == ids


@pytest.mark.parametrize(
    ("url", "fields", "said"),
    [
        (video_url(b"no video"), {}, "invalid video: it cannot be decoded"),
        (video_url(make_video(frames=1)), {}, "it has 1 frame, and this model sees 2 or more"),
        (video_url(make_video(height=64, width=80)), {}, "(--max-image-pixels)"),
        (video_url(VIDEO), {"num_frames": 9}, "9 frames are asked for, 8 are allowed"),
        (video_url(VIDEO), {"fps": 2, "num_frames": 4}, "exclude each other"),
        (video_url(VIDEO), {"size": 2}, "`size` is not read, only `fps` and `num_frames`"),
        ("data:video/mp4,abc", {}, "invalid video content"),
        ("data:video/jpeg;base64,AAAA,AAAA", {}, "it is none of PNG"),
        (
            video_url(b"#EXTM3U\n#EXTINF:9,\nhttp://127.0.0.1/x.ts\n#EXT-X-ENDLIST\n"),
            {},
            "invalid video: it cannot be decoded",
        ),
    ],
)
def test_what_is_wrong_with_a_video_is_said(
    served: tuple[Path, ServerProcess], url: str, fields: dict[str, Any], said: str
) -> None:
    _, server = served
    content = [{"type": "video_url", "video_url": {"url": url}}]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "max_tokens": 2}
    answer = post(f"{server.url}/v1/chat/completions", json=body | {"mm_processor_kwargs": fields})
    assert answer.status_code == 422 and said in answer.text, answer.text


def test_a_lost_shard_sees_a_video_again(tmp_path: Path) -> None:
    """Where pixels have no room to stay, they are decoded again, in the manner that was asked."""
    folder = make_folder(tmp_path, "qwen3_vl")
    room = 40_000  # bytes: each of both takes 27,648
    flags = ("--dtype", "float32", "--image-memory", str(room), "--prefix-caching", "false")
    with serving("--model-id", str(folder), *flags, "--stall-timeout", "600") as server:
        how = {"mm_processor_kwargs": {"num_frames": 6}}
        before = [ask(server, "Look: ", video, **how) for video in (VIDEO, OTHER)]
        accepted, _ = server.books()
        (shard,) = server.shards()
        os.kill(shard, signal.SIGSTOP)  # so that both are under way when it dies
        with ThreadPoolExecutor(2) as pool:
            try:
                asked = [pool.submit(ask, server, "Look: ", v, **how) for v in (VIDEO, OTHER)]
                server.wait_metric("tgi_request_accepted", accepted + 2)
            finally:
                os.kill(shard, signal.SIGKILL)
            assert [each.result() for each in asked] == before
        assert len(before[0][0]) > len(ask(server, "Look: ", VIDEO)[0])
