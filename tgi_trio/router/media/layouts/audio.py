"""The tokens of a sound in a prompt, from what is known of it without its samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tgi_trio.errors import ModelLoadError
from tgi_trio.media.sound import Sound
from tgi_trio.router.media.layouts.conformers import lay_out_granite_speech, lay_out_phi4_audio
from tgi_trio.router.media.layouts.layout import (
    ImageSettings,
    OtherLayout,
    Settings,
    read_int,
)
from tgi_trio.router.media.layouts.qwen3_asr import lay_out_qwen3_asr
from tgi_trio.router.media.layouts.spoken import (
    WHISPER_S,
    AudioTokens,
    EnclosedLayout,
    SpokenLayout,
    Transcription,
    read_whisper_hop,
)
from tgi_trio.router.media.layouts.ultravox import lay_out_ultravox

_SUBSAMPLING: Final = 4  # frames of a token in Gemma 4's tower: two convolutions of stride 2
_QWEN2_NAMES: Final = ("audio_token", "audio_bos_token", "audio_eos_token")
_WINDOWS_S: Final = 100  # of a second, which Qwen3-Omni's encoder hears by itself at first
_OMNI_S: Final = 300  # that Qwen2.5-Omni hears
_GLM_S: Final = 655  # seconds, of which GLM-ASR hears whole pieces of 30


@dataclass(frozen=True)
class FixedAudioLayout(SpokenLayout):
    """As many tokens for any sound, and the mark at its end has features as well: Gemma 3n."""

    features: int

    @property
    def mark_tokens(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.tokens.end,)

    def expand(self, sound: Sound) -> str:
        tokens = self.tokens
        return f"\n\n{tokens.begin}{tokens.audio * self.features}{tokens.end}\n\n"

    def count_features(self, sound: Sound) -> int:
        return self.features + 1


@dataclass(frozen=True)
class FramesAudioLayout(SpokenLayout):
    """A token for each four windows that lie within the sound: Gemma 4."""

    window: int  # samples, with half of a window of silence before the first
    hop: int

    def count_features(self, sound: Sound) -> int:
        room = sound.samples + self.window // 2 - (self.window + 1)
        return -(-(room // self.hop + 1) // _SUBSAMPLING)


@dataclass(frozen=True)
class WaveLayout(SpokenLayout):
    """A token for so many samples: Gemma 4's unified model."""

    samples: int

    def count_features(self, sound: Sound) -> int:
        return -(-sound.samples // self.samples)


@dataclass(frozen=True)
class WhisperLayout(EnclosedLayout):
    """A token for so many windows that begin within the sound: Qwen2-Audio, GLM-ASR."""

    hop: int  # samples
    merge: int = 2  # rows of the tower, each of two windows, that become one token

    def count_features(self, sound: Sound) -> int:
        frames = -(-sound.samples // self.hop)
        convolved = (frames - 1) // 2 + 1  # with a stride of 2
        return convolved // self.merge


@dataclass(frozen=True)
class Qwen3OmniLayout(WhisperLayout):
    """Thirteen tokens for each second, and one for each eight windows of the last; no window that
    the end of the sound cuts off.
    """

    def count_features(self, sound: Sound) -> int:
        seconds, left = divmod(sound.samples // self.hop, _WINDOWS_S)
        return 13 * seconds + -(-left // 8)


@dataclass(frozen=True)
class PiecesLayout(EnclosedLayout):
    """As many tokens for each begun piece, silence behind the last one included: Voxtral.

    Templates write the token before it; there is none behind.
    """

    piece: int  # samples
    features: int  # of one

    @property
    def transcription(self) -> Transcription:
        """mistral-common's, which is no chat."""
        return Transcription(begin=f"[INST]{self.tokens.begin}", end="[/INST]", mark="[TRANSCRIBE]")

    def count_features(self, sound: Sound) -> int:
        return self.features * -(-sound.samples // self.piece)


_VOXTRAL: Final = AudioTokens("[AUDIO]", "[BEGIN_AUDIO]", "")
_GLM: Final = AudioTokens("<|pad|>", "<|begin_of_audio|>", "<|end_of_audio|>")
_QWEN2: Final = AudioTokens("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
_QWEN3_OMNI: Final = AudioTokens("<|audio_pad|>", "<|audio_start|>", "<|audio_end|>")
_GEMMA4: Final = AudioTokens("<|audio|>", "<|audio>", "<audio|>")
_GEMMA3N: Final = AudioTokens("<audio_soft_token>", "<start_of_audio>", "<end_of_audio>")


def lay_out_gemma3n_audio(
    own: Settings, settings: ImageSettings, tokenizer_config: Settings
) -> OtherLayout:
    """Return the layout of a model; raises ModelLoadError."""
    features = read_int(settings.processor, "audio_seq_length", 188)
    computed = read_int(settings.config, "audio_soft_tokens_per_image", 188)
    if features != computed:
        raise ModelLoadError(
            f"its processor writes audio_seq_length {features} tokens for a sound, and config.json "
            f"says audio_soft_tokens_per_image {computed}: both have to be the same"
        )
    return FixedAudioLayout(_GEMMA3N.read(tokenizer_config), features)


def lay_out_gemma4_audio(
    own: Settings, settings: ImageSettings, tokenizer_config: Settings
) -> OtherLayout:
    """Return the layout of a model; raises ModelLoadError."""
    rate = read_int(own, "sampling_rate", 16_000)
    lengths = (own.get("frame_length_ms", 20.0), own.get("hop_length_ms", 10.0))
    if not all(isinstance(each, int | float) and each > 0 for each in lengths):
        raise ModelLoadError(
            "the settings of its feature extractor need positive numbers: frame_length_ms, "
            "hop_length_ms"
        )
    window, hop = (round(rate * each / 1000) for each in lengths)
    return FramesAudioLayout(_GEMMA4.read(tokenizer_config), window, hop)


def lay_out_gemma4_unified_audio(
    own: Settings, settings: ImageSettings, tokenizer_config: Settings
) -> OtherLayout:
    """Return the layout of a model; raises ModelLoadError."""
    return WaveLayout(_GEMMA4.read(tokenizer_config), read_int(own, "audio_samples_per_token", 640))


def lay_out_qwen2_audio(
    own: Settings, settings: ImageSettings, tokenizer_config: Settings
) -> OtherLayout:
    """Return the layout of a model; raises ModelLoadError."""
    hop = read_whisper_hop(own, settings, "max_source_positions")
    tokens = _QWEN2.read(settings.processor, _QWEN2_NAMES).read(tokenizer_config, _QWEN2_NAMES)
    return WhisperLayout(tokens, hop)


def lay_out_qwen2_5_omni_audio(
    own: Settings, settings: ImageSettings, tokenizer_config: Settings
) -> OtherLayout:
    """Return the layout of a model; raises ModelLoadError."""
    if (seconds := read_int(own, "chunk_length", WHISPER_S)) != _OMNI_S:
        raise ModelLoadError(
            f"its feature extractor hears {seconds} s (chunk_length); served are {_OMNI_S}, of all "
            "such models"
        )
    return WhisperLayout(_QWEN2.read(tokenizer_config, _QWEN2_NAMES), _read_omni_hop(own))


def lay_out_qwen3_omni_audio(
    own: Settings, settings: ImageSettings, tokenizer_config: Settings
) -> OtherLayout:
    """Return the layout of a model; raises ModelLoadError."""
    tower: Any = settings.config.get("audio_config")
    window = read_int(tower if isinstance(tower, Mapping) else {}, "n_window", _WINDOWS_S // 2)
    if window != _WINDOWS_S // 2:
        raise ModelLoadError(
            f"config.json says n_window {window}; served is {_WINDOWS_S // 2}, of all such models"
        )
    return Qwen3OmniLayout(_QWEN3_OMNI.read(tokenizer_config, _QWEN2_NAMES), _read_omni_hop(own))


def _read_omni_hop(own: Settings) -> int:
    """Return the samples between two windows; raises ModelLoadError."""
    rate, hop = read_int(own, "sampling_rate", 16_000), read_int(own, "hop_length", 160)
    if (rate, hop) != (16_000, 160):
        raise ModelLoadError(
            f"its feature extractor hears {rate} samples in a second, and a window each {hop} "
            "(hop_length); served are 16000 and 160"
        )
    return hop


def lay_out_glmasr(
    own: Settings, settings: ImageSettings, tokenizer_config: Settings
) -> OtherLayout:
    """Return the layout of a model; raises ModelLoadError."""
    hop = read_whisper_hop(own, settings, "max_position_embeddings")
    longest = read_int(settings.processor, "max_audio_len", _GLM_S)
    if longest != _GLM_S:
        raise ModelLoadError(
            f"its processor says max_audio_len {longest}; served is {_GLM_S}, of all such models"
        )
    return WhisperLayout(_GLM.read(settings.processor), hop, merge=4)


def lay_out_voxtral(
    own: Settings, settings: ImageSettings, tokenizer_config: Settings
) -> OtherLayout:
    """Return the layout of a model; raises ModelLoadError."""
    read_whisper_hop(own, settings, "max_source_positions")
    tower: Any = settings.config.get("audio_config")
    told_of = tower if isinstance(tower, Mapping) else {}
    rows = read_int(told_of, "max_source_positions", 1500)
    whole = rows * read_int(told_of, "hidden_size", 1280)
    width = read_int(told_of, "intermediate_size", 5120)
    if whole % width:
        raise ModelLoadError(
            f"{rows} rows of its tower have {whole} numbers, no multiple of its intermediate_size "
            f"{width}"
        )
    return PiecesLayout(_VOXTRAL, WHISPER_S * 16_000, whole // width)


# Of the settings of a model's feature extractor, all of its settings, and its
# tokenizer_config.json.
AUDIO_LAYOUTS: Final[dict[str, Callable[[Settings, ImageSettings, Settings], OtherLayout]]] = {
    "gemma3n": lay_out_gemma3n_audio,
    "gemma4": lay_out_gemma4_audio,
    "gemma4_unified": lay_out_gemma4_unified_audio,
    "glmasr": lay_out_glmasr,
    "granite_speech": lay_out_granite_speech,
    "phi4": lay_out_phi4_audio,
    "qwen2_5_omni": lay_out_qwen2_5_omni_audio,
    "qwen2_audio": lay_out_qwen2_audio,
    "qwen3_asr": lay_out_qwen3_asr,
    "qwen3_omni": lay_out_qwen3_omni_audio,
    "ultravox": lay_out_ultravox,
    "voxtral": lay_out_voxtral,
}
