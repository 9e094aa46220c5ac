"""Sounds of Ultravox: tokens for pieces of 30 seconds, in a message of texts alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.media.sound import Sound
from tgi_trio.router.media.layouts.layout import (
    ImageSettings,
    OtherLayout,
    Settings,
    find_token,
    read_int,
)
from tgi_trio.router.media.layouts.spoken import (
    AudioTokens,
    SpokenLayout,
    Transcription,
    read_whisper_hop,
)

_PLACEHOLDER: Final = "<|audio|>"
_HALVED: Final = 2  # frames of a row of Whisper's tower
_FEWEST: Final = 2  # frames: shorter sounds are filled up
# What its processor calls that: rows of frames, or in older files of samples.
_DOWNSAMPLED: Final = (_HALVED, 320)
_CONTEXT: Final = 3000  # frames of a piece


@dataclass(frozen=True)
class StackedLayout(SpokenLayout):
    """A token for so many rows of Whisper's tower in each piece of a sound.

    It stands in no template, and may be none that the model has an embedding of: features stand in
    the places of another one.
    """

    placeholder = _PLACEHOLDER
    line_end = ""
    apart = "\n"
    hop: int  # samples
    stack: int  # rows

    @property
    def transcription(self) -> Transcription:
        """What it was trained with."""
        return Transcription("Transcribe", asks_before=True)

    def expand(self, sound: Sound) -> str:
        return self.tokens.audio * self.count_features(sound)

    def count_features(self, sound: Sound) -> int:
        frames = max(_FEWEST, -(-sound.samples // self.hop))
        whole, left = divmod(frames, _CONTEXT)
        each = _HALVED * self.stack
        return whole * -(-_CONTEXT // each) + -(-left // each)


def lay_out_ultravox(
    own: Settings, settings: ImageSettings, tokenizer_config: Settings
) -> OtherLayout:
    """Return the layout of a model; raises ModelLoadError."""
    tower = settings.config.get("audio_config")
    told = tower if isinstance(tower, Mapping) else {}
    if (kind := told.get("model_type", "whisper")) != "whisper":
        raise ModelLoadError(f"its tower is of the type {kind!r}; served is 'whisper'")
    if (block := settings.config.get("audio_latency_block_size")) is not None:
        raise ModelLoadError(
            f"its tower hears in blocks (audio_latency_block_size {block!r}); served are towers "
            "that hear pieces as a whole"
        )
    hop = read_whisper_hop(own, settings, "max_source_positions")
    bins, made = read_int(told, "num_mel_bins", 80), read_int(own, "feature_size", 80)
    if bins != made:
        raise ModelLoadError(
            f"its feature extractor makes {made} numbers of a frame (feature_size), and its tower "
            f"reads {bins} (num_mel_bins)"
        )
    for name, served in (("encoder_ds_factor", _DOWNSAMPLED), ("audio_context_size", (_CONTEXT,))):
        said = settings.processor.get(name)
        if said is not None and said not in served:
            raise ModelLoadError(
                f"its processor says {name} {said!r}; served is {served[0]}, of all such models"
            )
    tokens = AudioTokens(_find_feature_token(settings.config, tokenizer_config), "", "")
    return StackedLayout(tokens, hop, read_int(settings.config, "stack_factor", 8))


def _find_feature_token(config: Settings, tokenizer_config: Settings) -> str:
    """Return the token in whose places features stand: the model's own, or as in its processor EOS.

    Its own is often behind the vocabulary, where it has no embedding. Raises ModelLoadError.
    """
    number = config.get("audio_token_index")
    if isinstance(number, int) and 0 <= number < read_int(config, "vocab_size"):
        own = find_token(tokenizer_config, "audio_token", number)
        if own == _PLACEHOLDER:
            return own
    end = find_token(tokenizer_config, "eos_token")
    if end is None:
        raise ModelLoadError("its tokenizer has no EOS token, in whose places features would stand")
    return end
