"""Families whose images take a fixed number of tokens, whatever their size."""

from __future__ import annotations

from dataclasses import dataclass

from tgi_trio.errors import ModelLoadError
from tgi_trio.router.media.layouts.layout import (
    ImageSettings,
    ImageSize,
    PlainFinish,
    read_int,
)


@dataclass(frozen=True)
class FixedLayout(PlainFinish):
    """A number of feature tokens, with a text before and after them."""

    placeholder: str
    feature_token: str
    features: int
    before: str = ""
    after: str = ""
    mark_tokens: tuple[str, ...] = ()
    around: tuple[str, str] = ("", "")

    def expand(self, size: ImageSize) -> str:
        return f"{self.before}{self.feature_token * self.features}{self.after}"

    def count_features(self, size: ImageSize) -> int:
        marks = self.before + self.after
        return self.features + sum(map(marks.count, self.mark_tokens))


@dataclass(frozen=True)
class PaligemmaLayout(FixedLayout):
    """Images first, then the BOS token, the text, and a newline at its end."""

    writes_bos = True

    def finish(self, text: str, bos: str) -> str:
        end = text.rfind(self.feature_token) + len(self.feature_token)
        if self.feature_token not in text:
            end = 0
        return f"{text[:end]}{bos}{text[end:]}\n"


@dataclass(frozen=True)
class MllamaLayout(FixedLayout):
    """The BOS token follows the images with which a text begins."""

    def finish(self, text: str, bos: str) -> str:
        if bos in text:
            return text
        begin = 0
        while text.startswith(self.feature_token, begin):
            begin += len(self.feature_token)
        return f"{text[:begin]}{bos}{text[begin:]}"


def lay_out_llava(settings: ImageSettings) -> FixedLayout:
    """LLaVA 1.5: the patches of the crop that the tower sees."""
    crop = settings.size("crop_size", {"height": 224, "width": 224})
    patch = patch_size(settings)
    side = crop.get("shortest_edge")
    height = read_int(crop, "height", side) // patch
    width = read_int(crop, "width", side) // patch
    return FixedLayout("<image>", "<image>", height * width + extra_features(settings))


def lay_out_fast_vlm(settings: ImageSettings) -> FixedLayout:
    """FastVLM: the same, of a tower without a class token."""
    crop, found = settings.size("crop_size", {"height": 224, "width": 224}), settings.processor
    patch, side = read_int(found, "patch_size"), crop.get("shortest_edge")
    patches = (read_int(crop, "height", side) // patch) * (read_int(crop, "width", side) // patch)
    dropped = 1 if found.get("vision_feature_select_strategy") == "default" else 0
    added = int(found.get("num_additional_image_tokens", 0))
    return FixedLayout("<image>", "<image>", patches + added - dropped)


def lay_out_paligemma(settings: ImageSettings) -> PaligemmaLayout:
    """PaliGemma: the tower's patches."""
    image, patch = read_int(settings.vision, "image_size"), read_int(settings.vision, "patch_size")
    found = read_int(settings.image_processor, "image_seq_length", (image // patch) ** 2)
    return PaligemmaLayout("<image>", "<image>", found)


def lay_out_mllama(settings: ImageSettings) -> MllamaLayout:
    """Llama 3.2 Vision: one token, from which on cross-attention layers see the image."""
    return MllamaLayout("<|image|>", "<|image|>", 1)


def lay_out_deepseek(settings: ImageSettings) -> FixedLayout:
    """DeepSeek-VL: the patches of the square to which the image is padded."""
    found = read_int(settings.processor, "num_image_tokens", 576)
    return FixedLayout("<image_placeholder>", "<image_placeholder>", found)


def lay_out_got_ocr2(settings: ImageSettings) -> FixedLayout:
    """GOT-OCR 2: the square that its tower sees, between marks that prompts write.

    Raises ModelLoadError where the image processor makes squares of another size.
    """
    size = settings.size("size", {"height": 384, "width": 384})
    side = read_int(settings.vision, "image_size", 1024)
    for name in ("height", "width"):
        if read_int(size, name) != side:
            raise ModelLoadError(
                f"the image processor's size has a {name} of {size[name]}, and image_size of "
                f"vision_config is {side}: both have to be the same"
            )
    features = (side // read_int(settings.vision, "patch_size", 16) // 4) ** 2
    around = ("<img>", "</img>")
    return FixedLayout("<imgpad>", "<imgpad>", features, around=around)


def patch_size(settings: ImageSettings) -> int:
    """Return the side of the tower's patches, in pixels."""
    return read_int(settings.processor, "patch_size", settings.vision.get("patch_size"))


def extra_features(settings: ImageSettings) -> int:
    """Return the features that the tower's class token adds to the patches: one, or none.

    `num_additional_image_tokens` counts it, and the strategy `default` drops the first feature. A
    processor with neither is for a tower with a class token, which is dropped.
    """
    strategy = settings.processor.get("vision_feature_select_strategy") or settings.config.get(
        "vision_feature_select_strategy", "default"
    )
    dropped = 1 if strategy == "default" else 0
    added = settings.processor.get("num_additional_image_tokens")
    return (int(added) if added is not None else 1) - dropped
