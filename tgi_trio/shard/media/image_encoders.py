"""Features of images, by a model's tower, where its class has no `get_image_features` or wants more
of it than arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

# Returns features [N, hidden] in the order of an image's tokens, from a model and the arrays of the
# image's bundle, whose pixels are normalised, in float32; they are computed in the dtype.
EncodeImage = Callable[[Any, Mapping[str, torch.Tensor], torch.dtype], torch.Tensor]


def encode_phi4_image(
    model: Any, inputs: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """Return the features of an image's crops, and of the whole that they are of.

    The whole is made smaller as by `transformers`' processor, of what is normalised already.
    """
    crops, seen = inputs["pixel_values"], inputs["pixel_attention_mask"]
    side = crops.shape[-1]
    rows, columns = (int(each) // side for each in inputs["image_sizes"][0])
    picture = crops.reshape(rows, columns, *crops.shape[1:]).permute(2, 0, 3, 1, 4)
    picture = picture.reshape(1, -1, rows * side, columns * side)
    whole = torch.nn.functional.interpolate(picture, (side, side), mode="bicubic")
    pixels = torch.cat((whole, crops))[None].to(dtype)
    seen = torch.cat((torch.ones_like(seen[:1]), seen))[None]
    embed, config = model.embed_tokens_extend.image_embed, model.config
    read = seen[0, 1:, ::2, ::2]
    ends = read.reshape(rows, columns, *read.shape[1:])[:, 0, :, 0]
    fixed = embed.num_img_tokens + seen.shape[-1] // 2 + 1  # of the whole, and between both
    count = int(read.sum() + ends.sum()) + fixed
    ids = torch.full((1, count), config.vision_config.image_token_id, device=pixels.device)
    room = pixels.new_zeros(1, count, config.hidden_size)
    given = {"image_sizes": inputs["image_sizes"], "image_attention_mask": seen}
    found: torch.Tensor = embed(ids, room, image_pixel_values=pixels, **given)[0]
    return found


def unmask_phi4_patches(model: Any) -> None:
    """Have all patches of a crop see one another.

    In transformers 5.24 they see those before them alone if torch's own kernel computes and all of
    an image's crops are full; with another kernel, or beside an image that has less, they do not.
    """
    for layer in model.embed_tokens_extend.image_embed.img_processor.encoder.layers:
        layer.self_attn.is_causal = False


def encode_deepseek_ocr_image(
    model: Any, inputs: Mapping[str, torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """Return the features of an image's tiles, of its whole, and of the mark behind both.

    transformers' class wants its numbers of tiles as lists.
    """
    pixels, tiles = inputs["pixel_values"], inputs.get("pixel_values_local")
    given: dict[str, Any] = {"pixel_values": pixels.to(dtype)}
    if tiles is not None:
        shapes = [grid[::-1] for grid in inputs["grids"].tolist()]  # columns and rows
        counts = {"num_local_patches": inputs["num_local_patches"].tolist(), "patches_grid": shapes}
        given |= {"pixel_values_local": tiles.to(dtype), **counts}
    [found] = model.get_image_features(**given).pooler_output
    features: torch.Tensor = found
    return features


def set_nemotron_dtype(model: Any) -> None:
    """Have pixels be of the dtype that the tower has: its class takes that of config.json."""
    model.vision_model.config.dtype = next(model.vision_model.parameters()).dtype


def compute_radio_factor(model: Any, name: str) -> torch.Tensor | None:
    """Return the factors of a layer's output, which files of RADIO leave out: they are all alike.

    None for any other parameter.
    """
    if not name.endswith((".layer_scale1.lambda1", ".layer_scale2.lambda1")):
        return None
    vision = model.config.vision_config
    return torch.full((vision.hidden_size,), vision.layerscale_value)


# By `model_type`.
IMAGE_ENCODERS: Final[Mapping[str, EncodeImage]] = {
    "phi4_multimodal": encode_phi4_image,
    "unlimited_ocr": encode_deepseek_ocr_image,
}
# What is put right of a class before it computes; likewise.
AMENDS: Final[Mapping[str, Callable[[Any], None]]] = {
    "nemotron_h_omni": set_nemotron_dtype,
    "phi4_multimodal": unmask_phi4_patches,
}
# (the class, a parameter's name) -> its values where files lack it, None: they may not; likewise.
COMPUTES: Final[Mapping[str, Callable[[Any, str], torch.Tensor | None]]] = {
    "nemotron_h_omni": compute_radio_factor,
}
