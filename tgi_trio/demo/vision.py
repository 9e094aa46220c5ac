"""`python -m tgi_trio.demo.vision FOLDER`: make a tiny model that sees, in seconds.

The embedded model gets an eye of LLaVA's kind, untrained at first, and both are taught on the spot
to name the colour of plain pictures. It can do nothing else, but the whole path of an image can be
tried with it: serve the folder, and show it something red.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tgi_trio.demo import model_path

if TYPE_CHECKING:
    from torch import Tensor

IMAGE: Final = "<image>"
QUESTION: Final = "What colour is it?"
COLOURS: Final[Mapping[str, tuple[int, int, int]]] = {
    "red": (220, 30, 30),
    "green": (30, 180, 40),
    "blue": (30, 60, 220),
    "yellow": (240, 220, 40),
    "black": (10, 10, 10),
    "white": (245, 245, 245),
}
SIDE: Final = 32  # pixels, of what the tower sees
_PATCH: Final = 16
_STEPS: Final = 60
_BATCH: Final = 12
_RATE: Final = 1e-3
_NOISE: Final = 12.0  # of each colour, so that its neighbours are known too
_MEAN: Final = (0.5, 0.5, 0.5)
_PART: Final = "{{- part['text'] | trim }}"  # of the embedded model's chat template


def make_vision_model(folder: Path, steps: int = _STEPS, side: int = SIDE) -> float:
    """Write a model that sees to `folder`, as `save_pretrained` does; return its last loss.

    `steps` of training; 0 leaves it blind. `side`: pixels that its tower sees, one feature for each
    16 x 16.
    """
    import torch

    torch.manual_seed(0)
    tokenizer = _make_tokenizer(folder)
    image_id = tokenizer.token_to_id(IMAGE)
    model = _make_model(image_id, side)
    with _one_thread():
        loss = _train(model, tokenizer, image_id, steps, side)
    model.save_pretrained(folder)
    shutil.copy(model_path() / "generation_config.json", folder)
    _write(folder / "preprocessor_config.json", _processor_settings(side))
    options = {
        "processor_class": "LlavaProcessor",
        "patch_size": _PATCH,
        "vision_feature_select_strategy": "default",
        "num_additional_image_tokens": 1,
    }
    _write(folder / "processor_config.json", options)
    return loss


@contextmanager
def _one_thread() -> Iterator[None]:
    """Have torch compute with one thread.

    Its matrices are too small to be divided, and on a busy machine threads that wait for each other
    take eight times as long.
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _make_tokenizer(folder: Path) -> Any:
    """Write the embedded model's tokenizer with a token for images; return it."""
    import tokenizers

    source = model_path()
    tokenizer = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    tokenizer.add_special_tokens([IMAGE])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((source / "tokenizer_config.json").read_text("utf-8"))
    shown = _PART + "{%- elif part['type'] == 'image' %}{{- '" + IMAGE + "' }}"
    config["chat_template"] = config["chat_template"].replace(_PART, shown)
    _write(folder / "tokenizer_config.json", config)
    return tokenizer


def _make_model(image_id: int, side: int) -> Any:
    """Return LLaVA around the embedded model, its tower and projector random."""
    from transformers import (
        AutoModelForCausalLM,
        CLIPVisionConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    text = AutoModelForCausalLM.from_pretrained(model_path())
    text.resize_token_embeddings(image_id + 1)
    vision = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=side,
        patch_size=_PATCH,
        projection_dim=32,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text.config,
        image_token_index=image_id,
        vision_feature_layer=-1,
        vision_feature_select_strategy="default",
        tie_word_embeddings=True,
    )
    model = LlavaForConditionalGeneration(config)
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    model.tie_weights()
    return model


def _train(model: Any, tokenizer: Any, image_id: int, steps: int, side: int) -> float:
    """Teach a model colours; return the loss of the last step, in nats a token of the answers."""
    import torch

    answers = [_answer(tokenizer, name, side) for name in COLOURS]
    longest = max(len(ids) for ids, _ in answers)
    inputs = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in answers])
    labels = torch.tensor(
        [[-100] * begin + ids[begin:] + [-100] * (longest - len(ids)) for ids, begin in answers]
    )
    optimizer = torch.optim.AdamW(model.parameters(), _RATE)
    model.train()
    loss = float("inf")
    for _ in range(steps):
        which = torch.randint(len(COLOURS), (_BATCH,))
        outputs = model(
            input_ids=inputs[which],
            attention_mask=(inputs[which] != 0).long(),
            pixel_values=_pictures(which, side),
            labels=labels[which],
        )
        optimizer.zero_grad()
        outputs.loss.backward()
        optimizer.step()
        loss = float(outputs.loss.detach())
    model.eval()
    return loss


def _answer(tokenizer: Any, colour: str, side: int) -> tuple[list[int], int]:
    """Return a chat about a picture of one colour, and where in it the answer begins."""
    features = IMAGE * (side // _PATCH) ** 2
    question = f"<|begin|><|user|>{features}{QUESTION}<|end|><|assistant|>"
    begin = len(tokenizer.encode(question, add_special_tokens=False).ids)
    whole = f"{question}It is {colour}.<|end|>"
    return list(tokenizer.encode(whole, add_special_tokens=False).ids), begin


def _pictures(which: Tensor, side: int) -> Tensor:
    """Return plain pictures, normalised: float32 [pictures, 3, side, side]."""
    import torch

    colours = torch.tensor([list(each) for each in COLOURS.values()], dtype=torch.float32)[which]
    noisy = (colours + _NOISE * torch.randn_like(colours)).clamp(0, 255) / 255
    return ((noisy - 0.5) / 0.5)[:, :, None, None].expand(-1, -1, side, side)


def _processor_settings(side: int) -> dict[str, Any]:
    return {
        "image_processor_type": "LlavaImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": side},
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(_MEAN),
        "image_std": list(_MEAN),
        "do_convert_rgb": True,
    }


def _write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def main(argv: Sequence[str]) -> int:
    """Make the model; returns the process's exit code."""
    if len(argv) != 1:
        print("usage: python -m tgi_trio.demo.vision FOLDER", file=sys.stderr)
        return 2
    folder = Path(argv[0])
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    print(f"teaching a tiny model to name {', '.join(COLOURS)} ...")
    loss = make_vision_model(folder)
    print(f"written to {folder} (loss {loss:.3f})")
    print(f"serve it: python -m tgi_trio {folder}")
    print(f"then show it a plain picture at /ui, and ask: {QUESTION}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
