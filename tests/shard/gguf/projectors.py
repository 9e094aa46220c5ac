"""What llama.cpp's converter makes of the tower of a model that sees: a projector's file.

Names are those of the `gguf` package, with those of older checkpoints that its table has. What else
is changed is written here as the converter's classes have it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from tests.shard.gguf.files import gguf

Array = np.ndarray[Any, Any]
Config = Mapping[str, Any]
Tensors = Iterator[tuple[str, Array]]

TYPES = {
    "gemma3": "gemma3",
    "gemma4": "gemma4v",
    "glm4v": "glm4v",
    "idefics3": "idefics3",
    "internvl": "internvl",
    "lfm2_vl": "lfm2",
    "llama4": "llama4",
    "llava": "pixtral",  # Pixtral 12B
    "mistral3": "pixtral",
    "qwen2_vl": "qwen2vl_merger",
    "qwen2_5_vl": "qwen2.5vl_merger",
    "qwen3_vl": "qwen3vl_merger",
    "qwen3_vl_moe": "qwen3vl_merger",
    "qwen3_5": "qwen3vl_merger",
    "qwen3_5_moe": "qwen3vl_merger",
    "smolvlm": "idefics3",
}
_TEXT = re.compile(r"(model\.)?(language_model|text_model|layers|embed_tokens|norm)\.|lm_head\.")
# How transformers calls a tensor now -> names in the `gguf` package's table.
_ALIASES = (
    ("vision_tower.", "vision_tower.vision_model."),
    ("vision_model.", "model.vision_model."),
    ("connector.", "model.connector."),
    ("vision_tower.", "model.vision_tower."),
    ("vision_tower.encoder.", "vision_model.model."),
    ("embed_vision.", "model.embed_vision."),
)
_ENDINGS = (".weight", ".bias", ".input_max", ".input_min", ".output_max", ".output_min")
_FRAMES = ("v.patch_embd.weight", "v.patch_embd.weight.1")


def write_projector(
    folder: Path,
    path: Path,
    dtype: str = "F16",
    said: Mapping[str, Any] | None = None,
    *,
    older: bool = False,
) -> Path:
    """Write the projector of a model in `folder`, as transformers has saved it. Returns the file.

    `dtype`: F32, F16, BF16 or Q8_0 of matrices; convolutions are F16 then. `said`: changes of the
    metadata; None takes a key out. `older`: as first versions of the converter wrote it, which
    called the halves of an MLP the other way around.
    """
    config = json.loads((folder / "config.json").read_text())
    pixels = json.loads((folder / "preprocessor_config.json").read_text())
    writer = gguf.GGUFWriter(path, "clip")
    for key, value in (describe(config, pixels) | dict(said or {})).items():
        if value is not None:
            _say(writer, key, value)
    for name, array in convert(folder, config):
        if older and (half := re.search("ffn_(up|down)", name)) is not None:
            name = name.replace(half[0], {"up": "ffn_down", "down": "ffn_up"}[half[1]])
        _add(writer, name, np.ascontiguousarray(array, np.float32), dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _say(writer: Any, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    add |= {str: writer.add_string, list: writer.add_array}
    add[type(value)](key, value)


def _add(writer: Any, name: str, array: Array, dtype: str) -> None:
    """Add a tensor: vectors, and what the converter forces to it, as float32."""
    whole = array.ndim < 2 or "position_embd" in name or dtype == "F32"
    if whole:
        writer.add_tensor(name, array)
        return
    kind = gguf.GGMLQuantizationType[dtype]
    if array.ndim > 2 or array.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        kind = gguf.GGMLQuantizationType.F16
    writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)


def describe(config: Config, pixels: Config) -> dict[str, Any]:
    """Return a file's metadata (`MmprojModel.set_gguf_parameters`, and its subclasses')."""
    tower, kind = dict(config["vision_config"]), config["model_type"]
    if kind == "qwen2_vl":  # as in `Qwen2VLVisionModel`
        tower |= {"intermediate_size": tower["hidden_size"], "hidden_size": tower["embed_dim"]}
    side = int(tower.get("num_position_embeddings", 1600) ** 0.5) * _one(tower["patch_size"])
    said = {
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.projector_type": TYPES[kind],
        "clip.vision.projection_dim": config["text_config"]["hidden_size"],
        "clip.vision.image_size": _one(tower.get("image_size", side)),
        "clip.vision.patch_size": _one(tower["patch_size"]),
        "clip.vision.embedding_length": tower["hidden_size"],
        "clip.vision.feed_forward_length": tower["intermediate_size"],
        "clip.vision.block_count": tower.get("num_hidden_layers", tower.get("depth")),
        "clip.vision.attention.head_count": tower.get(
            "num_attention_heads", tower.get("num_heads")
        ),
        "clip.vision.attention.layer_norm_epsilon": tower.get(
            "layer_norm_eps", tower.get("norm_eps", tower.get("rms_norm_eps", 1e-6))
        ),
        "clip.vision.image_mean": pixels.get("image_mean", [0.0, 0.0, 0.0]),
        "clip.vision.image_std": pixels.get("image_std", [1.0, 1.0, 1.0]),
    }
    activation = {"silu": "use_silu", "gelu": "use_gelu", "gelu_pytorch_tanh": "use_gelu"}
    if (own := activation.get(tower.get("hidden_act", ""))) is not None:
        said[f"clip.{own}"] = True
    return said | _OWN.get(TYPES[kind], _nothing)(config, pixels)


def _one(side: int | list[int]) -> int:
    return side[0] if isinstance(side, list) else side


def _nothing(config: Config, pixels: Config) -> dict[str, Any]:
    return {}


def _describe_qwen25(config: Config, pixels: Config) -> dict[str, Any]:
    return {"clip.vision.n_wa_pattern": config["vision_config"]["fullatt_block_indexes"][0] + 1}


def _describe_qwen3(config: Config, pixels: Config) -> dict[str, Any]:
    tower = config["vision_config"]
    return {
        "clip.vision.spatial_merge_size": tower["spatial_merge_size"],
        "clip.vision.is_deepstack_layers": [i in _deep(config) for i in range(tower["depth"])],
    }


def _deep(config: Config) -> list[int]:
    """Return the blocks with a merger of their own, which Qwen 3.5 has none of."""
    if config["model_type"].startswith("qwen3_5"):
        return []
    deep: list[int] = config["vision_config"]["deepstack_visual_indexes"]
    return deep


def _describe_gemma3(config: Config, pixels: Config) -> dict[str, Any]:
    tower = config["vision_config"]
    along = int(config["mm_tokens_per_image"] ** 0.5)
    return {
        "clip.vision.projector.scale_factor": tower["image_size"] // tower["patch_size"] // along
    }


def _describe_idefics3(config: Config, pixels: Config) -> dict[str, Any]:
    longest = pixels.get("size", {}).get("longest_edge", config["vision_config"]["image_size"])
    return {
        "clip.vision.projector.scale_factor": config["scale_factor"],
        "clip.vision.preproc_image_size": longest,
    }


def _describe_gemma4(config: Config, pixels: Config) -> dict[str, Any]:
    """A projector of two towers says which is which; here there is no other."""
    return {
        "clip.projector_type": None,
        "clip.vision.projector_type": "gemma4v",
        "clip.vision.projector.scale_factor": config["vision_config"]["pooling_kernel_size"],
    }


def _describe_ratio(config: Config, pixels: Config) -> dict[str, Any]:
    ratio = config.get("downsample_ratio") or config["vision_config"].get("pixel_shuffle_ratio")
    merge = config.get("downsample_factor") or int(1 / ratio)
    return {"clip.vision.projector.scale_factor": merge}


def _describe_pixtral(config: Config, pixels: Config) -> dict[str, Any]:
    merge = config.get("spatial_merge_size")
    return {} if merge is None else {"clip.vision.spatial_merge_size": merge}


_OWN: dict[str, Callable[[Config, Config], dict[str, Any]]] = {
    "gemma3": _describe_gemma3,
    "gemma4v": _describe_gemma4,
    "idefics3": _describe_idefics3,
    "internvl": _describe_ratio,
    "lfm2": _describe_ratio,
    "llama4": _describe_ratio,
    "pixtral": _describe_pixtral,
    "qwen2.5vl_merger": _describe_qwen25,
    "qwen3vl_merger": _describe_qwen3,
}


def convert(folder: Path, config: Config) -> Tensors:
    """Yield a tower's tensors under their names in a projector, as float32."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 64)
    for own, tensor in load_file(folder / "model.safetensors").items():
        if _TEXT.match(own) or ".head." in own:  # Gemma 3's tower has no use for its head
            continue
        array = tensor.float().numpy()
        for name, changed in _modify(own.removeprefix("model."), array, config):
            if name.startswith(("v.", "mm.")):
                yield name, changed
                continue
            tried = (name, *(name.replace(new, old, 1) for new, old in _ALIASES))
            found = (names.get_name(each, try_suffixes=_ENDINGS) for each in tried)
            yield next(filter(None, found)), changed
    if TYPES[config["model_type"]] == "pixtral":  # a row of the text's embeddings
        yield "v.token_embd.img_break", np.zeros(config["text_config"]["hidden_size"])


def _modify(name: str, array: Array, config: Config) -> Tensors:
    kind, tower = config["model_type"], config["vision_config"]
    deep = re.match(r"visual\.deepstack_merger_list\.(\d+)\.(?:linear_)?(\w+)\.(\w+)", name)
    merger = re.match(r"visual\.merger\.(linear_fc[12]|norm)\.(\w+)", name)
    if name == "visual.patch_embed.proj.weight":  # a convolution for each of two frames
        yield from zip(_FRAMES, (array[:, :, 0], array[:, :, 1]), strict=True)
    elif deep is not None:  # `Qwen3VLVisionModel`
        yield f"v.deepstack.{_deep(config)[int(deep[1])]}.{deep[2]}.{deep[3]}", array
    elif merger is not None:
        place = {"linear_fc1": "mm.0", "linear_fc2": "mm.2", "norm": "v.post_ln"}[merger[1]]
        yield f"{place}.{merger[2]}", array
    elif ".qkv." in name and kind in ("qwen2_vl", "qwen2_5_vl"):  # `Qwen2VLVisionModel`
        for part, rows in zip("qkv", np.split(array, 3), strict=True):
            yield name.replace("qkv", part), rows
    elif tower["model_type"] == "pixtral" and re.search(r"\.[qk]_proj\.", name):
        halves = array.reshape(tower["num_attention_heads"], 2, -1, *array.shape[1:])
        yield name, halves.swapaxes(1, 2).reshape(array.shape)  # `LlavaVisionModel`
    elif kind in _RENAMED:
        yield from _RENAMED[kind](name, array)
    elif "soft_emb_norm" in name:  # `Gemma3VisionModel`
        yield name, array + 1
    else:
        yield name.replace("_projection_weight", "_projection.weight"), array


def _rename_internvl(name: str, array: Array) -> Tensors:
    """`InternVisionModel`, of a checkpoint as transformers saves it."""
    places = {"layer_norm": "mm.model.mlp.0", "linear_1": "mm.model.mlp.1"}
    places["linear_2"] = "mm.model.mlp.3"
    found = re.fullmatch(r"multi_modal_projector\.(\w+)\.(weight|bias)", name)
    if found is not None:
        name = f"{places[found[1]]}.{found[2]}"
    whole = ".lambda_" in name or name.endswith("position_embeddings")
    yield f"{name}.weight" if whole else name, array


def _rename_gemma4(name: str, array: Array) -> Tensors:
    """`Gemma4VisionAudioModel`."""
    name = name.replace(".linear.weight", ".weight")
    if name.endswith("position_embedding_table"):
        name += ".weight"
    if name.endswith("patch_embedder.input_proj.weight"):
        array = _as_convolution(array)
    yield name, array


def _rename_lfm2(name: str, array: Array) -> Tensors:
    """`LFM2VLModel`."""
    yield name, _as_convolution(array) if name.endswith("patch_embedding.weight") else array


def _as_convolution(array: Array) -> Array:
    side = int((array.shape[1] // 3) ** 0.5)
    return np.moveaxis(array.reshape(-1, side, side, 3), -1, 1)


def _rename_llama4(name: str, array: Array) -> Tensors:
    """`Llama4VisionModel`; the package's table has Gemma 4's norm for one of its names."""
    if "positional_embedding_vlm" in name:
        name += ".weight"
    block = re.fullmatch(
        r"vision_model\.model\.layers\.(\d+)\.post_attention_layernorm\.(\w+)", name
    )
    if block is not None:
        name = f"v.blk.{block[1]}.ln2.{block[2]}"
    yield name.replace("multi_modal_projector.linear_1", "mm.model.fc"), array


_RENAMED: dict[str, Callable[[str, Array], Tensors]] = {
    "gemma4": _rename_gemma4,
    "internvl": _rename_internvl,
    "lfm2_vl": _rename_lfm2,
    "llama4": _rename_llama4,
}
