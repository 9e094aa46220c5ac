"""Features of sounds, by a model's tower for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from tgi_trio.shard.media.ultravox import encode_ultravox

# Returns features [N, hidden] in the order of a sound's tokens, from a model, `input_features`
# [1, T, width], of Whisper's extractor [pieces, width, T], and which of these T are of the sound
# (bool [1, T] or [pieces, T]).
EncodeAudio = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


def encode_gemma3n_audio(model: Any, features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return as many features as any sound has, and that of the mark behind them.

    What the sound is too short for has the last row of the tower's vocabulary. Raises ValueError
    for a sound of more features.
    """
    found = model.get_audio_features(features, ~mask, return_dict=True)
    rows = found.pooler_output[0]
    count = model.config.audio_soft_tokens_per_image
    if len(rows) > count:
        raise ValueError(f"{len(rows)} features of a sound, where {count} are the most")
    ids = torch.tensor([model.vocab_size - 1, model.config.eoa_token_id], device=rows.device)
    padding, end = model.embed_audio(input_ids=ids[None])[0].split(1)
    rows = torch.where(found.audio_mel_mask[0, :, None], padding, rows)
    return torch.cat((rows, padding.expand(count - len(rows), -1), end))


def encode_gemma4_audio(model: Any, features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the features of a sound without those of silence behind it."""
    found = model.get_audio_features(features, mask, return_dict=True)
    rows: torch.Tensor = found.pooler_output[found.attention_mask]
    return rows


def encode_qwen2_audio(model: Any, features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the features of a sound without those of silence behind it, which it does not see.

    As in the class's `forward`, which has no `get_audio_features`.
    """
    from transformers.masking_utils import create_bidirectional_mask

    tower = model.audio_tower
    frames, counts = tower._get_feat_extract_output_lengths(mask.sum(-1))
    most = tower.config.max_source_positions
    within = torch.arange(most, device=mask.device)[None] < frames[:, None]
    seen = create_bidirectional_mask(
        config=tower.config,
        inputs_embeds=features.new_zeros(1, most, 1),
        attention_mask=within.long(),
    )
    heard = tower(features, attention_mask=seen).last_hidden_state
    rows: torch.Tensor = model.multi_modal_projector(heard)[0]
    return rows[: int(counts)]


def encode_glmasr(model: Any, features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the features of a sound's pieces without those of silence behind it."""
    rows: torch.Tensor = model.get_audio_features(features, mask, return_dict=True).pooler_output
    return rows


def encode_granite_speech(model: Any, features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the features of a sound, of whole windows: what the last one lacks is silence."""
    rows: torch.Tensor = model.get_audio_features(features, return_dict=True).pooler_output[0]
    return rows


def encode_omni_audio(model: Any, features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the features of a sound by Qwen-Omni's thinker."""
    found = model.get_audio_features(features, feature_attention_mask=mask, return_dict=True)
    rows: torch.Tensor = found.last_hidden_state
    return rows


def encode_phi4_audio(model: Any, features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the features of a sound by Phi-4-multimodal."""
    return _project_phi4(model, features, "speech")


def encode_phi4_audio_beside_images(
    model: Any, features: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """Do the same for a prompt with images, which are projected by other weights."""
    return _project_phi4(model, features, "vision")


def _project_phi4(model: Any, features: torch.Tensor, mode: str) -> torch.Tensor:
    """Return what the class puts in the places of a sound's tokens."""
    embed = model.embed_tokens_extend.audio_embed
    count = -(-features.shape[1] // model.config.audio_config.time_reduction)
    token = model.config.audio_config.audio_token_id
    ids = torch.full((1, count), token, device=features.device)
    room = features.new_zeros(1, count, model.config.hidden_size)
    given = {"audio_embed_sizes": [count], "audio_projection_mode": mode}
    rows: torch.Tensor = embed(ids, room, audio_input_features=features, **given)[0]
    return rows


def encode_qwen3_asr(model: Any, features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the features of a sound, whose last second is filled up by what is not heard."""
    second = 2 * model.config.audio_config.n_window  # windows
    missing = -features.shape[-1] % second
    given = (torch.nn.functional.pad(each, (0, missing)) for each in (features, mask))
    rows: torch.Tensor = model.get_audio_features(*given, return_dict=True).pooler_output
    return rows


def encode_voxtral(model: Any, features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the features of a sound's pieces, of the silence behind it as well."""
    rows: torch.Tensor = model.get_audio_features(features, return_dict=True).pooler_output
    return rows


# By `model_type`.
AUDIO_ENCODERS: Final[Mapping[str, EncodeAudio]] = {
    "gemma3n": encode_gemma3n_audio,
    "gemma4": encode_gemma4_audio,
    "gemma4_unified": encode_gemma4_audio,
    "glmasr": encode_glmasr,
    "granite_speech": encode_granite_speech,
    "granite_speech_plus": encode_granite_speech,
    "phi4_multimodal": encode_phi4_audio,
    "qwen2_5_omni_thinker": encode_omni_audio,
    "qwen2_audio": encode_qwen2_audio,
    "qwen3_asr": encode_qwen3_asr,
    "qwen3_omni_moe_thinker": encode_omni_audio,
    "ultravox": encode_ultravox,
    "voxtral": encode_voxtral,
}
# Likewise, of those that hear otherwise where a prompt has images.
BESIDE: Final[Mapping[str, EncodeAudio]] = {"phi4_multimodal": encode_phi4_audio_beside_images}
