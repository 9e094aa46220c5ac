"""Videos whose frames are seen as images, behind whole servers: ids and tokens of transformers."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

from tests.router.media.image_files import encode, noise
from tests.router.media.video_files import make_video, read_all
from tests.system.server import serving
from tests.system.test_videos import MOST, ask
from tgi_trio.router.media.layouts.spelled import spell_number
from tgi_trio.testing.checkpoints import VOCAB_SIZE
from tgi_trio.testing.wrapped_checkpoints import make_wrapped

pytestmark = pytest.mark.system

SIDE = 16  # pixels, of frames and of the towers
NORMAL: dict[str, Any] = {
    **{"do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True},
    **{"image_mean": [0.5, 0.4, 0.5], "image_std": [0.5, 0.4, 0.3]},
}
# Tokens, the first of which stand for features; settings of both processors; what beside them is
# the processor's; whether there is a batch around frames.
FAMILIES: dict[str, tuple[tuple[str, ...], dict[str, Any], dict[str, Any], bool]] = {
    "internvl": (
        ("<IMG_CONTEXT>", "<video>", "<img>", "</img>"),
        {"size": {"height": SIDE, "width": SIDE}, "max_patches": 1, "num_frames": 3},
        {"image_seq_length": 1, "start_image_token": "<img>", "end_image_token": "</img>"},
        False,
    ),
    "smolvlm": (
        ("<image>", "<video>", "<fake_token_around_image>", "<global-img>"),
        {
            **{"size": {"longest_edge": SIDE}, "max_image_size": {"longest_edge": SIDE}},
            **{"video_sampling": {"fps": 2, "max_frames": 9, "video_size": {"longest_edge": 99}}},
        },
        {
            **{"image_seq_len": 1, "global_image_token": "<global-img>"},
            **{"fake_image_token": "<fake_token_around_image>"},
        },
        True,
    ),
}
VIDEO = make_video(frames=23, height=SIDE, width=SIDE)
OTHER = make_video(frames=12, height=SIDE, width=SIDE, seed=1, kind="matroska")
TEMPLATE = (
    "<s>{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
    "{% elif p.type == 'image' %}IMAGE{% else %}<video>{% endif %}{% endfor %}{% endfor %}"
)


def make_folder(folder: Path, family: str) -> Path:
    tokens, pixels, options, _ = FAMILIES[family]
    make_wrapped(folder, family, image_token=VOCAB_SIZE, vocab_size=VOCAB_SIZE + len(tokens))
    file = str(folder / "tokenizer.json")
    tokenizer = tokenizers.Tokenizer.from_file(file)
    tokenizer.add_special_tokens(list(tokens))
    tokenizer.save(file)
    (folder / "preprocessor_config.json").write_text(json.dumps(NORMAL | pixels))
    (folder / "processor_config.json").write_text(json.dumps(options))
    told = json.loads((folder / "tokenizer_config.json").read_text())
    template = TEMPLATE.replace("IMAGE", tokens[0])
    (folder / "tokenizer_config.json").write_text(json.dumps(told | {"chat_template": template}))
    return folder


class Oracle:
    """transformers' texts of a video, and its model."""

    def __init__(self, folder: Path, family: str) -> None:
        from transformers import AutoModelForImageTextToText

        (token, *_), _, options, self.in_batch = FAMILIES[family]
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.family, self.processor = family, SimpleNamespace(image_token=token, **options)
        self.model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        self.model.eval().generation_config.eos_token_id = None

    def expand(self, frames: torch.Tensor, chosen: list[int], total: int) -> str:
        from transformers.video_utils import VideoMetadata

        name = f"transformers.models.{self.family}.processing_{self.family}"
        module = importlib.import_module(name)
        metadata = VideoMetadata(total, fps=10.0, duration=total / 10, frames_indices=chosen)
        given = {
            "video_metadata": [metadata],
            **dict.fromkeys(("pixel_values", "pixel_values_videos"), frames[None]),
        }
        kind = {"internvl": "InternVLProcessor", "smolvlm": "SmolVLMProcessor"}[self.family]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "num2words", spell_number, raising=False)
            text: str = getattr(module, kind).replace_video_token(self.processor, given, 0)
        return text

    def generate(
        self, text: str, videos: list[tuple[bytes, list[int]]]
    ) -> tuple[list[int], list[int]]:
        """Return ids and greedy tokens of a text with `<video>` for each of these, seen so."""
        mean, deviation = (
            np.array(NORMAL[f"image_{n}"], np.float32)[:, None, None] for n in ("mean", "std")
        )
        seen = []
        for data, chosen in videos:
            whole = read_all(data)
            frames = np.moveaxis(whole[chosen], 3, 1).astype(np.float32) / 255
            shown = torch.from_numpy((frames - mean) / deviation)
            seen.append(shown)
            text = text.replace("<video>", self.expand(shown, chosen, len(whole)), 1)
        pixels = torch.cat(seen)
        ids = self.tokenizer.encode("<s>" + text, add_special_tokens=False).ids
        found = self.model.generate(
            **{"input_ids": torch.tensor([ids]), "do_sample": False, "pad_token_id": 2},
            **{"attention_mask": torch.ones(1, len(ids), dtype=torch.int64)},
            pixel_values=pixels[None] if self.in_batch else pixels,
            max_new_tokens=MOST,
        )
        return ids, found[0, len(ids) :].tolist()


@pytest.mark.sampled(2, first=1)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_ids_and_tokens_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    folder = make_folder(tmp_path, family)
    oracle = Oracle(folder, family)
    flags = ("--dtype", "float32", "--max-batch-prefill-tokens", "64")
    # At two frames in a second of 2.3 s and 1.2 s; three from the middles of as many parts.
    usual = {"smolvlm": [[0, 5, 11, 16, 22], [0, 11]], "internvl": [[3, 11, 19], [2, 6, 10]]}
    first, second = usual[family]
    with serving("--model-id", str(folder), *flags) as server:
        expected = oracle.generate("Look: <video> so?", [(VIDEO, first)])
        assert ask(server, "Look: ", VIDEO, " so?") == expected
        expected = oracle.generate("So: <video> and <video>?", [(OTHER, second), (VIDEO, first)])
        assert ask(server, "So: ", OTHER, " and ", VIDEO, "?") == expected
        fps = [0, 3, 7, 11, 14, 18, 22] if family == "smolvlm" else [1, 5, 9, 13, 17, 21]
        expected = oracle.generate("Look: <video>", [(VIDEO, fps)])
        assert ask(server, "Look: ", VIDEO, mm_processor_kwargs={"fps": 3}) == expected
        # Beside an image, which is what a frame is to the tower.
        image = noise(SIDE, SIDE)
        alone = make_video_of(image)
        ids, said = ask(server, "Look: ", image, " and ", VIDEO, " so?")
        assert len(said) == MOST and ids.count(VOCAB_SIZE) == 1 + len(first)
        assert ask(server, "Look: ", alone)[0].count(VOCAB_SIZE) == 2


def make_video_of(image: Any) -> dict[str, Any]:
    """Return a part with a video of the same picture twice."""
    import base64

    text = base64.b64encode(encode(image)).decode()
    url = f"data:video/jpeg;base64,{text},{text}"
    return {"type": "video_url", "video_url": {"url": url}}
