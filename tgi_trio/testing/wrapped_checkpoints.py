"""Tiny random checkpoints of models that read images as well, complete with a tokenizer, for tests.

Like those of `checkpoints.py`, they are built and written by transformers, so their weights have
the names that they have on the hub. Vision towers are as small as possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tgi_trio.testing.checkpoints import fill_parameters, make_tokenizer
from tgi_trio.testing.tiny_families import ABSENT
from tgi_trio.testing.whole_options import BESIDE
from tgi_trio.testing.wrapped_families import FAMILIES, TEXT

_FLAT = ("idefics",)  # the options of `text_config` are the whole model's
# Names that transformers writes -> those of published files, where it reads them but does not write
# them.
_PUBLISHED = {
    "kimi_k25": (
        ("language_model.model.blocks.", "language_model.model.layers."),
        ("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed."),
        ("model.mm_projector.", "mm_projector."),
    ),
    "qianfan_ocr": (("language_model.model.encoder.layers.", "language_model.model.layers."),),
}
_TYPES = {"pixtral": "llava"}  # the whole model's type, if it is not the family's name
_GEMMA = ("gemma", "gemma2", "gemma3_text")
_MINUS_ONE_NORMS = (*_GEMMA, "minimax_m3_vl_text", "step3p5")  # types of text models
_SCALED_EMBEDDINGS = (
    *_GEMMA,
    "gemma3n_text",
    "gemma4_text",
    "gemma4_unified_text",
)  # by the square root of their width


def make_wrapped(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    image_token: int | None = None,
    whole: Any = None,
    **text: Any,
) -> Path:
    """Write a seeded random checkpoint of `family` (a model_type of transformers) to `folder`.

    "pixtral" is a llava with another tower. `image_token`: the id that transformers replaces by
    features; None: the family's default, which is beyond this vocabulary. `whole`, a dict, changes
    the configuration of the whole model, its tower's among it, and `text` that of the text model,
    including `model_type`. Float32, one file, with the tokenizer of `make_tokenizer`. Returns
    `folder`.
    """
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    inner, vision = FAMILIES[family]
    beside = BESIDE.get(family, {}) | (whole or {})
    if image_token is not None:
        beside = beside | {"image_token_id": image_token}
    options = TEXT | inner | text
    options = {name: value for name, value in options.items() if value is not ABSENT}
    config = AutoConfig.for_model(
        _TYPES.get(family, family),
        **{"vision_config": vision, **beside},
        **(options if family in _FLAT else {"text_config": options}),
    )
    model = AutoModelForImageTextToText.from_config(config)
    kind = config.get_text_config(decoder=True).model_type
    fill_parameters(model, seed, kind in _MINUS_ONE_NORMS)
    if getattr(config, "tie_word_embeddings", False):  # as in `make_checkpoint`
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(0.04 if kind in _SCALED_EMBEDDINGS else 0.3)
    model.save_pretrained(folder)
    _rename(folder / "model.safetensors", _PUBLISHED.get(family, ()))
    make_tokenizer(folder)
    return folder


def _rename(file: Path, names: Sequence[tuple[str, str]]) -> None:
    """Replace the beginnings of tensors' names in a file."""
    from safetensors.torch import load_file, save_file

    if not names:
        return
    found = {}
    for name, tensor in load_file(file).items():
        begun = ((old, new) for old, new in names if name.startswith(old))
        old, new = next(begun, ("", ""))
        found[new + name.removeprefix(old)] = tensor
    save_file(found, file, {"format": "pt"})
