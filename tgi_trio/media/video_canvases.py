"""How the families of models that see videos choose and resize frames: one table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tgi_trio.media.frame_canvases import InternCanvas, SmolCanvas
from tgi_trio.media.omni_canvases import Qwen3OmniCanvas, Qwen25OmniCanvas
from tgi_trio.media.patch_canvases import Glm46Canvas, GlmCanvas, Qwen2Canvas, Qwen3Canvas
from tgi_trio.media.video_canvas import VideoCanvas

# By the names in `model.video_families`.
CANVASES: Final[Mapping[str, type[VideoCanvas]]] = {
    "glm46v": Glm46Canvas,
    "glm4v": GlmCanvas,
    "internvl": InternCanvas,
    "qwen2": Qwen2Canvas,
    "qwen2_5_omni": Qwen25OmniCanvas,
    "qwen3": Qwen3Canvas,
    "qwen3_omni": Qwen3OmniCanvas,
    "smolvlm": SmolCanvas,
}
