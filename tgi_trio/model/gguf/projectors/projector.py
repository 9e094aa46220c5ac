"""What is known of a type of projectors, and what is read alike of all of them.

Sources: llama.cpp's converter (`MmprojModel` and its subclasses), the reader of its files
(`tools/mtmd/clip.cpp`), names of its package gguf.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from tgi_trio.model.gguf.files import GgufModel
from tgi_trio.model.gguf.stated import Values, read_count, read_number

# What the converter does to a parameter's numbers, beside its name.
#   frames:   a convolution over several frames is one of each: `v.patch_embd.weight`, `.weight.1`
#   pairs:    rows of a head that turn together are neighbours, and were half a head apart
#   plus_one: 1 is added
#   pixels:   patches' numbers [channel, row, column] lay pixel by pixel, as rows of a matrix
#   flat:     the same shape, as a matrix
Change = Literal["frames", "pairs", "plus_one", "pixels", "flat"]
# A module of the tower's class -> its name in the file, or those whose rows it joins. `{}` is a
# block's number. A parameter that has neither weight nor bias has its whole name here.
Names = Mapping[str, str | tuple[str, ...]]

LENGTH: Final = "vision.embedding_length"
FRAMES: Final = 2  # which a patch of a grid has: an image is shown twice
_MERGE: Final = 2  # patches along a side of what becomes one token, where files do not say it


@dataclass(frozen=True, slots=True)
class Kind:
    """A composite model that a text of some architecture and a projector make."""

    model_type: str
    text_type: str = ""  # of its text, where that is not the architecture's own


@dataclass(frozen=True, slots=True)
class Projector:
    """A type of projectors."""

    kinds: Mapping[str, Kind]  # by the architecture of the text
    # What config.json says beside the text: `vision_config`, and what belongs to the whole, its
    # type where it is another than the kind's; in `text_config`, what the tower adds to it.
    # (the projector, the text's values) -> values; raises ValueError.
    describe: Callable[[GgufModel, Values], Values]
    # preprocessor_config.json, without means and deviations; raises ValueError.
    process: Callable[[GgufModel], Values]
    names: Names
    output: tuple[str, int]  # a tensor, and its axis that is as long as the text's embeddings
    placeholder: str  # the token in whose places an image's features stand
    changes: Mapping[str, Change] = field(default_factory=dict)  # by module of the class
    # processor_config.json, where there is anything to say that is not in config.json.
    process_whole: Callable[[GgufModel], Values] | None = None
    # video_preprocessor_config.json, where it is not that of images.
    process_video: Callable[[GgufModel], Values] | None = None
    unread: tuple[str, ...] = ()  # tensors that the text's file has as well, or no tower reads


def read_tower(model: GgufModel) -> Values:
    """Return the sizes of a tower as most of transformers' classes call them."""
    return {
        "hidden_size": read_count(model, LENGTH),
        "intermediate_size": read_count(model, "vision.feed_forward_length"),
        "num_hidden_layers": count_blocks(model),
        "num_attention_heads": count_heads(model),
        "image_size": read_count(model, "vision.image_size"),
        "patch_size": read_count(model, "vision.patch_size"),
    }


def count_blocks(model: GgufModel) -> int:
    """Return how many blocks a tower has; raises ValueError for more than it has tensors."""
    blocks = read_count(model, "vision.block_count")
    if blocks > len(model.tensors):
        raise ValueError(f"its clip.vision.block_count is {blocks}: it has fewer tensors")
    return blocks


def find_deep_blocks(model: GgufModel) -> list[int]:
    """Return the numbers of blocks whose outputs are added behind layers of the text as well."""
    deep = model.get("vision.is_deepstack_layers") or []
    if not isinstance(deep, list) or len(deep) > count_blocks(model):
        raise ValueError(f"its clip.vision.is_deepstack_layers cannot be {deep!r}")
    return [index for index, each in enumerate(deep) if each]


def count_heads(model: GgufModel) -> int:
    """Return how many heads attention has in every block of a tower."""
    return read_count(model, "vision.attention.head_count")


def read_epsilon(model: GgufModel, default: float) -> float:
    """Return the epsilon of a tower's norms."""
    return read_number(model, "vision.attention.layer_norm_epsilon", default)


def read_activation(model: GgufModel, gelu: str) -> str:
    """Return how MLPs activate; `gelu`: which GELU the class has where the file says GELU."""
    if model.get("use_silu"):
        return "silu"
    return gelu if model.get("use_gelu") else "quick_gelu"


def read_shape(model: GgufModel, name: str, axes: int) -> tuple[int, ...]:
    """Return the shape of a tensor, without leading axes of 1; raises ValueError."""
    if name not in model.tensors:
        raise ValueError(f"it has no tensor {name!r}")
    shape = model.tensors[name][1].shape
    while len(shape) > axes and shape[0] == 1:
        shape = shape[1:]
    if len(shape) != axes:
        raise ValueError(f"its tensor {name!r} has the shape {list(shape)}")
    return shape


def read_pixels(model: GgufModel, least: int, most: int) -> Values:
    """Return the least and most pixels of an image: the file's, or those of published models."""
    return {
        "shortest_edge": read_count(model, "vision.image_min_pixels", default=least),
        "longest_edge": read_count(model, "vision.image_max_pixels", default=most),
    }


def read_merge(model: GgufModel) -> int:
    """Return how many patches along a side become one token of a grid."""
    return read_count(model, "vision.spatial_merge_size", default=_MERGE)


def read_scale(model: GgufModel, default: int) -> int:
    """Return how many features along a side the projector makes one token of."""
    return read_count(model, "vision.projector.scale_factor", default=default)


def read_patches(model: GgufModel) -> Values:
    """Return the settings of Qwen's image processor, and GLM's, that say what a patch is."""
    return {
        "patch_size": read_count(model, "vision.patch_size"),
        "temporal_patch_size": FRAMES,
        "merge_size": read_merge(model),
    }


def read_normal(model: GgufModel) -> Values:
    """Return mean and deviation of each channel; raises ValueError for anything but three."""
    found: Values = {}
    for ours, key in (("image_mean", "vision.image_mean"), ("image_std", "vision.image_std")):
        given: Any = model.get(key)
        if not isinstance(given, list) or len(given) != 3:
            raise ValueError(f"its clip.{key} is no list of three numbers")
        found[ours] = [float(each) for each in given]
    return found


def square(side: int) -> Values:
    return {"height": side, "width": side}
