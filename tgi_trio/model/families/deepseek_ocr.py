"""Texts of models that read pages: DeepSeek-OCR 2, and Unlimited-OCR without its window.

Both are DeepSeekMoE's, with other defaults. As they are published, DeepSeek-OCR 1 and 2 say so
(`model/deepseek_ocr.py`), and need none of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.families.mixtures import deepseek
from tgi_trio.model.specs.decoder import DecoderSpec

_EXPERTS: Final = {"n_routed_experts": 64, "n_shared_experts": 2}
_UNLIMITED: Final = {
    **{"num_experts_per_tok": 6, "moe_intermediate_size": 896, "first_k_dense_replace": 1},
}


def deepseek_ocr2(config: ModelConfig) -> DecoderSpec | None:
    """DeepSeek-OCR 2 (DeepSeek 2026)."""
    return _spec(config, _EXPERTS)


def unlimited_ocr(config: ModelConfig) -> DecoderSpec | None:
    """Unlimited-OCR (Baidu 2026), if none of its layers has a window.

    Raises ModelLoadError for one that has: it is of the answer's tokens and not of the prompt's.
    """
    kinds = config.get("layer_types") or ["reference_sliding_attention"]
    if windowed := set(kinds) - {"full_attention"}:
        raise ModelLoadError(
            f"The text of {config.folder} has layers of {', '.join(sorted(windowed))}, whose "
            "window is of an answer's tokens and leaves the prompt's: they are not computed here. "
            "Served are layers of full_attention, as those of DeepSeek-OCR."
        )
    return _spec(config, _EXPERTS | _UNLIMITED)


def _spec(config: ModelConfig, defaults: Mapping[str, Any]) -> DecoderSpec | None:
    """Return the spec, None for experts that are chosen by groups."""
    if config.get("topk_method", "greedy") != "greedy":
        return None
    return deepseek(replace(config, values={**defaults, **config.values}))
