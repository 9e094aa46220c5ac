"""Sounds of Granite Speech and Phi-4-multimodal: templates write nothing around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.media.sound import Sound
from tgi_trio.router.media.layouts.layout import (
    ImageSettings,
    OtherLayout,
    Settings,
    find_token,
    read_int,
)
from tgi_trio.router.media.layouts.spoken import AudioTokens, SpokenLayout, Transcription

_TOKENS: Final = AudioTokens("<|audio|>", "", "")


@dataclass(frozen=True)
class WindowsLayout(SpokenLayout):
    """As many tokens for each begun window of frames, each of two windows of samples: Granite."""

    line_end = ""
    hop: int  # samples
    window: int  # frames
    features: int  # of one

    @property
    def transcription(self) -> Transcription:
        """The question of Granite Speech's model cards."""
        return Transcription("can you transcribe the speech into a written format?")

    def expand(self, sound: Sound) -> str:
        return self.tokens.audio * self.count_features(sound)

    def count_features(self, sound: Sound) -> int:
        frames = (sound.samples // self.hop + 1) // 2
        return self.features * -(-frames // self.window)


@dataclass(frozen=True)
class ReducedLayout(SpokenLayout):
    """A token for each so many windows that lie within the sound: Phi-4-multimodal."""

    line_end = ""
    minds_images = True
    window: int  # samples
    hop: int
    reduction: int  # windows

    @property
    def transcription(self) -> Transcription:
        """The question of its model card."""
        return Transcription("Transcribe the audio clip into text.")

    def expand(self, sound: Sound) -> str:
        return self.tokens.audio * self.count_features(sound)

    def count_features(self, sound: Sound) -> int:
        windows = (sound.samples - self.window) // self.hop + 1
        return -(-windows // self.reduction)


def lay_out_granite_speech(
    own: Settings, settings: ImageSettings, tokenizer_config: Settings
) -> OtherLayout:
    """Return the layout of a model; raises ModelLoadError."""
    pairs = (("window_size", 15), ("downsample_rate", 5))
    window, rate = (read_int(settings.config, name, default) for name, default in pairs)
    written = tuple(read_int(own, f"projector_{name}", default) for name, default in pairs)
    if written != (window, rate) or window % rate:
        raise ModelLoadError(
            f"its processor counts tokens by a projector_window_size of {written[0]} frames and a "
            f"projector_downsample_rate of {written[1]}, and config.json says window_size {window} "
            f"and downsample_rate {rate}: both have to be the same, and windows multiples of rates"
        )
    tokens = _TOKENS.read(settings.processor).read(tokenizer_config)
    return WindowsLayout(tokens, read_int(own, "hop_length", 160), window, window // rate)


def lay_out_phi4_audio(
    own: Settings, settings: ImageSettings, tokenizer_config: Settings
) -> OtherLayout:
    """Return the layout of a model; raises ModelLoadError."""
    tower: Any = settings.config.get("audio_config")
    pairs = (
        ("audio_compression_rate", 8, "time_reduction", 8),
        ("audio_downsample_rate", 1, "downsample_rate", 1),
        ("feature_size", 80, "input_size", 80),
    )
    for name, usual, name_of_tower, usual_of_tower in pairs:
        written, read = read_int(own, name, usual), read_int(tower, name_of_tower, usual_of_tower)
        if written != read:
            raise ModelLoadError(
                f"its feature extractor says {name} {written}, and config.json {name_of_tower} "
                f"{read}: both have to be the same"
            )
    if (stride := read_int(own, "audio_feat_stride", 1)) != 1:
        raise ModelLoadError(
            f"its feature extractor says audio_feat_stride {stride}; served is 1, of all such "
            "models"
        )
    reduction = read_int(own, "audio_compression_rate", 8)
    reduction *= read_int(own, "audio_downsample_rate", 1)
    window, hop = read_int(own, "win_length", 400), read_int(own, "hop_length", 160)
    number = read_int(tower, "audio_token_id", 200_011)
    token = find_token(tokenizer_config, "audio_token", number) or _TOKENS.audio
    return ReducedLayout(AudioTokens(token, "", ""), window, hop, reduction)
