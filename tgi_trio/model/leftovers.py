"""Tensors of a checkpoint that a model does not read: which of them are harmless, and why."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.model.checkpoint_files import StoredTensor
from tgi_trio.model.config import ModelConfig
from tgi_trio.model.formats import refuse_pieces
from tgi_trio.model.parts import ULTRAVOX
from tgi_trio.model.phi4mm import PHI4

# Endings of names, for any model; dtypes do not matter.
_HARMLESS: Final = (
    (r"\.inv_freq|\.(cos|sin)_cached", "rotary frequencies: they follow from config.json"),
    (r"\battn\.(bias|masked_bias|causal_mask)", "the causal mask of GPT-2, GPT-J, CodeGen"),
    (r"\battention\.(bias|masked_bias)", "the causal mask of GPT-NeoX and GPT-Neo"),
    (r"\.(future_mask|alibi_mask)", "the mask of Baichuan"),
    (r"\bposition_ids", "0, 1, 2, ..."),
    (r"\bembed_positions\.weights", "a table of sines, which is computed"),
    (r"\.workspace", "locks of Marlin's threads"),
    (r"\bnum_batches_tracked", "a counter of training"),
    (r"\bdecoder\.version", "a format number of fairseq"),
)
# Beginnings of names, for any model.
_UNUSED_PARTS: Final = (
    (r"v_head\.", "the value head of reinforcement learning"),
    (r"(model\.)?mtp(_\w+)?\.", "layers that draft further tokens (multi-token prediction)"),
)
# Parts of Qwen-Omni that speak, by the beginnings of their tensors' names.
_SPEAKING: Final = ("talker", "token2wav", "code2wav")
# Beginnings of names in composite models, of which only the text is loaded.
_OTHER_SENSES: Final = (
    (r"(model\.)?(vision_\w+|visual|visual_embeddings_table|image_tower|video_tower)\.", "images"),
    (
        r"(model\.)?(high_res_vision_\w+|aligner|connector|merger|perceiver_resampler)(\.|$)",
        "images",
    ),
    (r"(model\.)?(multi_modal_projector|mm_projector|mlp1|projector|patch_\w+)\.", "images"),
    (r"(pre_mm_projector_norm|(model\.)?(layerwise|spatial)_projectors)\.", "images"),
    (r"(model\.)?(image_newline|image_attn_pool|visual_tokenizer|vte)(\.|$)", "images"),
    (r"(vit_large_projector|mlp_AR|(model\.)?vit)\.", "images"),
    (r"(model\.)?(density_router|sam_model|qwen2_model|view_sep[ae]rator)(\.|$)", "images"),
    (r"(model\.)?(vqmodel|generation_\w+)\.", "images that are drawn"),
    (rf"({'|'.join(_SPEAKING)})\.", "speech that is spoken"),
    (
        r"(model\.)?(audio_tower|audio_model|(?:sound|speech)_\w+|embed_audio|embed_vision)\.",
        "audio",
    ),
    (r"(model\.)?embed_tokens_extend\.image_embed\.", "images"),
    (r"(model\.)?embed_tokens_extend\.audio_embed\.", "audio"),
    (r"(model\.)?encoder\.(input_linear|layers|out|out_mid)\.", "audio"),
)
_IN_WHOLE: Final = r"(thinker\.)?"  # of a model that speaks as well
# Of Whisper, whose folders Ultravox names for its tower.
_WHISPER: Final = re.compile(r"(model\.)?(encoder|decoder)\.|proj_out\.")
# Adapters that Phi-4-multimodal has in folders of their own as well.
_BROUGHT: Final = re.compile(r"\.lora_[AB]\.(speech|vision)\.weight$")
_HEADS: Final = (r"(model\.)?medusa_heads?\.", "Medusa's heads, which `check_drafter` warns of")


_HARMLESS_END: Final = re.compile(f"(?:{'|'.join(end for end, _ in _HARMLESS)})$")
_UNUSED_BEGIN: Final = re.compile("|".join(begin for begin, _ in _UNUSED_PARTS))


def is_harmless(name: str, config: ModelConfig) -> bool:
    """Return whether a model is the same without this tensor."""
    if _HARMLESS_END.search(name) or _UNUSED_BEGIN.match(name) or _is_of_mtp(name, config):
        return True
    if config.model_type == PHI4 and _BROUGHT.search(name):
        return True
    if config.model_type == ULTRAVOX and _WHISPER.match(name):
        return True
    return bool(config.get("medusa_num_heads") and re.match(_HEADS[0], name))


def has_vision_tower(names: Iterable[str]) -> bool:
    """Return whether a composite model's tensors include those that images need."""
    towers = [begin for begin, sense in _OTHER_SENSES if sense == "images"]
    return any(re.match(f"{_IN_WHOLE}{begin}", name) for name in names for begin in towers)


def has_audio_tower(names: Iterable[str]) -> bool:
    """Return whether a composite model's tensors include those that sounds need."""
    ear = r"(model\.)?(audio_tower|embed_audio|encoder|embed_tokens_extend\.audio_embed)\."
    return any(re.match(f"{_IN_WHOLE}{ear}", name) for name in names)


def find_mute_parts(config: ModelConfig) -> list[str]:
    """Return a warning where a model also speaks, by config.json: its answers here are text."""
    found = [name for name in _SPEAKING if isinstance(config.get(f"{name}_config"), Mapping)]
    if not found:
        return []
    return [f"answers are text alone: what would speak them is not served ({', '.join(found)})"]


def refuse_leftovers(
    tensors: Mapping[str, StoredTensor],
    unread: Iterable[str],
    config: ModelConfig,
    *,
    text_only: bool = False,
) -> None:
    """Raise ModelLoadError unless every unread tensor is known to be harmless.

    `text_only`: the other parts of a composite model are harmless, too.
    """
    allowed = [begin for begin, _ in _OTHER_SENSES] if text_only else []
    unknown = [
        name
        for name in sorted(unread)
        if not is_harmless(name, config) and not any(re.match(begin, name) for begin in allowed)
    ]
    refuse_pieces(tensors, unknown)
    if unknown:
        more = f", as are {len(unknown) - 1} others" if len(unknown) > 1 else ""
        raise ModelLoadError(
            f"Tensor {unknown[0]!r} in {tensors[unknown[0]].file} is no part of a model of type "
            f"{config.model_type!r} as config.json describes it{more}: without it the answers "
            "would be another model's. Check that config.json and the weights belong together."
        )


def _is_of_mtp(name: str, config: ModelConfig) -> bool:
    """Return whether a tensor belongs to the layers for multi-token prediction.

    DeepSeek V3 and its relatives number them on from the model's own, and state how many there are.
    """
    extra, count = config.get("num_nextn_predict_layers"), config.get("num_hidden_layers")
    found = re.match(r"model\.layers\.(\d+)\.", name)
    if found is None or not isinstance(extra, int) or not isinstance(count, int):
        return False
    return count <= int(found[1]) < count + extra
