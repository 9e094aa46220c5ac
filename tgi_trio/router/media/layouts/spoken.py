"""What the layouts of sounds have in common: features between two tokens, and their text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from tgi_trio.errors import ModelLoadError
from tgi_trio.media.sound import Sound
from tgi_trio.router.media.layouts.layout import (
    ImageSettings,
    Settings,
    Unmarked,
    find_token,
    read_int,
)

WHISPER_S: Final = 30  # seconds that Whisper's encoder hears
_NAMES: Final = ("audio_token", "boa_token", "eoa_token")


class AudioTokens(NamedTuple):
    """The tokens around a sound, and the one in whose places its features stand."""

    audio: str
    begin: str
    end: str

    def read(self, tokenizer_config: Settings, names: Sequence[str] = _NAMES) -> AudioTokens:
        """Return what tokenizer_config.json says instead of these, under these names."""
        pairs = zip(names, self, strict=True)
        return AudioTokens(*(find_token(tokenizer_config, name) or own for name, own in pairs))


class Transcription(NamedTuple):
    """How a model is asked for the text of a sound: in a chat, or by a prompt of its own.

    The instruction is GLM-ASR's; of others none is known that serves them better.
    """

    # In a chat, behind the sound. Empty: there is none, and what a client says instead of one is
    # context, which is told by the system.
    instruction: str = "Please transcribe this audio into text"
    begin: str = ""  # of a prompt of its own; empty: it is a chat
    end: str = ""
    mark: str = ""  # the token with which it ends
    asks_before: bool = False  # in a chat the instruction stands before the sound
    # Names of the languages that it can be told, by their codes, and with what an answer is begun
    # for it where one is told.
    languages: Mapping[str, str] = MappingProxyType({})
    forced: str = ""
    text_mark: str = ""  # in an answer that is not begun for it: its text begins behind this
    read: Callable[[str], str] = str.strip  # returns the text in a whole answer


@dataclass(frozen=True)
class SpokenLayout(Unmarked, ABC):
    """Features between two tokens."""

    tokens: AudioTokens
    around = ("", "")

    @property
    def transcription(self) -> Transcription:
        """How the model is asked for the text of a sound."""
        return Transcription()

    @property
    def placeholder(self) -> str:
        return self.tokens.audio

    @property
    def feature_token(self) -> str:
        return self.tokens.audio

    def expand(self, sound: Sound) -> str:
        tokens = self.tokens
        return f"{tokens.begin}{tokens.audio * self.count_features(sound)}{tokens.end}"

    @abstractmethod
    def count_features(self, sound: Sound) -> int: ...


@dataclass(frozen=True)
class EnclosedLayout(SpokenLayout):
    """Features between two tokens that templates write."""

    @property
    def around(self) -> tuple[str, str]:  # type: ignore[override]
        return self.tokens.begin, self.tokens.end

    def expand(self, sound: Sound) -> str:
        return self.tokens.audio * self.count_features(sound)


def read_whisper_hop(own: Settings, settings: ImageSettings, positions_name: str) -> int:
    """Return the samples between two windows; raises ModelLoadError if a tower reads others.

    `positions_name`: what config.json calls the rows of the tower.
    """
    rate, seconds = read_int(own, "sampling_rate", 16_000), read_int(own, "chunk_length", 30)
    if (rate, seconds) != (16_000, WHISPER_S):
        raise ModelLoadError(
            f"its feature extractor hears {seconds} s of {rate} samples in a second; served are "
            f"{WHISPER_S} s of 16000"
        )
    hop = read_int(own, "hop_length", 160)
    tower: Any = settings.config.get("audio_config")
    positions = read_int(tower if isinstance(tower, Mapping) else {}, positions_name, 1500)
    if seconds * rate // hop != 2 * positions:
        raise ModelLoadError(
            f"its feature extractor makes {seconds * rate // hop} frames (hop_length {hop}), and "
            f"its tower reads {2 * positions} ({positions_name} {positions})"
        )
    return hop
