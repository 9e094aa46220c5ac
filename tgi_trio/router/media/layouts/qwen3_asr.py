"""Qwen3-ASR: the tokens of a sound, how its text is asked for, and the text in what it answers.

Sources: transformers' processor of it, and QwenLM's package.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.media.sound import Sound
from tgi_trio.router.media.layouts.layout import (
    ImageSettings,
    OtherLayout,
    Settings,
    read_int,
)
from tgi_trio.router.media.layouts.spoken import (
    AudioTokens,
    EnclosedLayout,
    Transcription,
)

_TOKENS: Final = AudioTokens("<|audio_pad|>", "<|audio_start|>", "<|audio_end|>")
_NAMES: Final = ("audio_token", "audio_bos_token", "audio_eos_token")
_LEAST: Final = 8000  # samples: shorter sounds are filled up by silence that is heard
_WINDOWS_S: Final = 100  # of a second, which its encoder convolves by itself
# What its settings say, of all such models.
_SERVED: Final = {
    **{"sampling_rate": 16_000, "hop_length": 160, "n_fft": 400},
    **{"min_length": _LEAST, "n_window": _WINDOWS_S // 2},
}
MARK: Final = "<asr_text>"  # in an answer, between its language and its text
LANGUAGES: Final[Mapping[str, str]] = {
    **{"ar": "Arabic", "yue": "Cantonese", "zh": "Chinese", "cs": "Czech", "da": "Danish"},
    **{"nl": "Dutch", "en": "English", "fil": "Filipino", "fi": "Finnish", "fr": "French"},
    **{"de": "German", "el": "Greek", "hi": "Hindi", "hu": "Hungarian", "id": "Indonesian"},
    **{"it": "Italian", "ja": "Japanese", "ko": "Korean", "mk": "Macedonian", "ms": "Malay"},
    **{"fa": "Persian", "pl": "Polish", "pt": "Portuguese", "ro": "Romanian", "ru": "Russian"},
    **{"es": "Spanish", "sv": "Swedish", "th": "Thai", "tr": "Turkish", "vi": "Vietnamese"},
}
# What a model says over and over: a character more than 20 times, or up to 20 of them as often. A
# character of exactly as many stays at the end of a text, where its package looks no further.
_CHARACTER: Final = re.compile(r"(.)\1{20,}", re.DOTALL)
_PATTERN: Final = re.compile(r"(.)\1{19}(?=.{20})|(.{2,20}?)\2{19,}", re.DOTALL)


def read_transcript(answer: str) -> str:
    """Return the text of a sound in an answer: what follows its language, said once."""
    text = _CHARACTER.sub(r"\1", answer.strip())
    text = _PATTERN.sub(lambda found: found[1] or found[2], text)
    return text.partition(MARK)[2].strip() if MARK in text else text.strip()


_TRANSCRIPTION: Final = Transcription(
    instruction="",
    languages=LANGUAGES,
    forced=f"language {{}}{MARK}",
    text_mark=MARK,
    read=read_transcript,
)


@dataclass(frozen=True)
class Qwen3AsrLayout(EnclosedLayout):
    """Thirteen tokens for each second, and one for each eight windows of the last."""

    @property
    def transcription(self) -> Transcription:
        return _TRANSCRIPTION

    def count_features(self, sound: Sound) -> int:
        windows = max(sound.samples, _LEAST) // _SERVED["hop_length"]
        seconds, left = divmod(windows, _WINDOWS_S)
        return 13 * seconds + -(-left // 8)


def lay_out_qwen3_asr(
    own: Settings, settings: ImageSettings, tokenizer_config: Settings
) -> OtherLayout:
    """Return the layout of a model; raises ModelLoadError."""
    tower: Any = settings.config.get("audio_config")
    told_of = tower if isinstance(tower, Mapping) else {}
    window = read_int(told_of, "n_window", _WINDOWS_S // 2)
    for found in ({**_SERVED, **own}, {**_SERVED, "n_window": window}):
        for name, served in _SERVED.items():
            if found[name] != served:
                raise ModelLoadError(
                    f"its settings say {name} {found[name]!r}; served is {served}, of all such "
                    "models"
                )
    return Qwen3AsrLayout(_TOKENS.read(tokenizer_config, _NAMES))
