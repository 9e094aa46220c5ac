"""The table of layouts, by their names in `model.image_families`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from tgi_trio.router.media.layouts.canvas import (
    lay_out_aya,
    lay_out_cohere2,
    lay_out_internvl,
    lay_out_llama4,
    lay_out_perception_lm,
    lay_out_qianfan,
)
from tgi_trio.router.media.layouts.deepseek_ocr import (
    lay_out_deepseek_ocr,
    lay_out_deepseek_ocr2,
)
from tgi_trio.router.media.layouts.fixed import (
    lay_out_deepseek,
    lay_out_fast_vlm,
    lay_out_got_ocr2,
    lay_out_llava,
    lay_out_mllama,
    lay_out_paligemma,
)
from tgi_trio.router.media.layouts.gemma import (
    lay_out_gemma3,
    lay_out_gemma3n,
    lay_out_gemma4,
    lay_out_gemma4_unified,
)
from tgi_trio.router.media.layouts.granite_docling import lay_out_granite_docling
from tgi_trio.router.media.layouts.grid import (
    lay_out_compass,
    lay_out_exaone,
    lay_out_glm,
    lay_out_glm5,
    lay_out_hyperclovax,
    lay_out_kimi,
    lay_out_minimax_m3,
    lay_out_muse,
    lay_out_nemotron,
    lay_out_paddleocr,
    lay_out_qwen,
    lay_out_qwen2_5_omni,
)
from tgi_trio.router.media.layouts.hunyuan import lay_out_hunyuan
from tgi_trio.router.media.layouts.layout import ImageLayout, ImageSettings
from tgi_trio.router.media.layouts.lfm2 import lay_out_lfm2
from tgi_trio.router.media.layouts.minicpmv import lay_out_minicpm_ocr, lay_out_minicpmv
from tgi_trio.router.media.layouts.ovis2 import lay_out_ovis2
from tgi_trio.router.media.layouts.phi4 import lay_out_phi4
from tgi_trio.router.media.layouts.pinpoints import (
    lay_out_granite4,
    lay_out_llava_next,
    lay_out_llava_onevision,
)
from tgi_trio.router.media.layouts.rows import lay_out_lighton, lay_out_pixtral
from tgi_trio.router.media.layouts.step3p7 import lay_out_step3p7
from tgi_trio.router.media.layouts.tiles import (
    lay_out_idefics,
    lay_out_idefics2,
    lay_out_idefics3,
)

LAYOUTS: Final[dict[str, Callable[[ImageSettings], ImageLayout]]] = {
    "aya": lay_out_aya,
    "cohere2": lay_out_cohere2,
    "compass": lay_out_compass,
    "deepseek_ocr": lay_out_deepseek_ocr,
    "deepseek_ocr2": lay_out_deepseek_ocr2,
    "deepseek_vl": lay_out_deepseek,
    "exaone": lay_out_exaone,
    "fast_vlm": lay_out_fast_vlm,
    "gemma3": lay_out_gemma3,
    "gemma3n": lay_out_gemma3n,
    "gemma4": lay_out_gemma4,
    "gemma4_unified": lay_out_gemma4_unified,
    "glm": lay_out_glm,
    "glm5_next": lay_out_glm5,
    "got_ocr2": lay_out_got_ocr2,
    "granite_docling": lay_out_granite_docling,
    "granite4": lay_out_granite4,
    "hunyuan": lay_out_hunyuan,
    "hyperclovax": lay_out_hyperclovax,
    "idefics": lay_out_idefics,
    "idefics2": lay_out_idefics2,
    "idefics3": lay_out_idefics3,
    "internvl": lay_out_internvl,
    "kimi": lay_out_kimi,
    "lfm2": lay_out_lfm2,
    "lighton_ocr": lay_out_lighton,
    "llama4": lay_out_llama4,
    "llava": lay_out_llava,
    "llava_next": lay_out_llava_next,
    "llava_onevision": lay_out_llava_onevision,
    "minicpm_ocr": lay_out_minicpm_ocr,
    "minicpmv": lay_out_minicpmv,
    "minimax_m3": lay_out_minimax_m3,
    "mllama": lay_out_mllama,
    "muse": lay_out_muse,
    "nemotron": lay_out_nemotron,
    "ovis2": lay_out_ovis2,
    "paddleocr": lay_out_paddleocr,
    "paligemma": lay_out_paligemma,
    "perception_lm": lay_out_perception_lm,
    "pixtral": lay_out_pixtral,
    "qianfan": lay_out_qianfan,
    "qwen": lay_out_qwen,
    "qwen2_5_omni": lay_out_qwen2_5_omni,
    "phi4": lay_out_phi4,
    "step3p7": lay_out_step3p7,
}
