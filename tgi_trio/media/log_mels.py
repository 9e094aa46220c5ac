"""Logarithms of mel spectra, of families whose feature extractors in transformers need torch.

What these compute with torch, and Granite's with torchaudio, is computed with numpy here, where a
sound is decoded: results differ by rounding. Sources: transformers' feature extractors of the two,
torchaudio's `MelSpectrogram`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from tgi_trio.errors import ModelLoadError

Floats = NDArray[np.float32]
_DEFAULTS: Final = (
    *(("sampling_rate", 16_000), ("n_fft", 512)),
    *(("win_length", 400), ("hop_length", 160)),
)
_AT_ONCE: Final = 4096  # windows whose spectra are in memory together: 17 MB


class LogMels(ABC):
    """Makes of a sound what its model's tower reads."""

    def __init__(self, settings: Mapping[str, Any], mels: str) -> None:
        """`settings`: the model's own; `mels`: which of them is how many numbers a window has.

        Raises ModelLoadError.
        """
        found = {name: settings.get(name, value) for name, value in (*_DEFAULTS, (mels, 80))}
        wrong = [name for name, value in found.items() if not _is_positive(value)]
        if wrong:
            raise ModelLoadError(
                "the settings of its feature extractor need positive whole numbers: "
                f"{', '.join(wrong)}"
            )
        self.sampling_rate = int(found["sampling_rate"])
        self._transformed, self._hop = int(found["n_fft"]), int(found["hop_length"])
        self._length, self._mels = int(found["win_length"]), int(found[mels])
        if self._length > self._transformed:
            raise ModelLoadError(
                f"its feature extractor has win_length {self._length}, which is more than n_fft "
                f"{self._transformed}"
            )
        self._filters = self._make_filters()

    @property
    def fewest(self) -> int:
        """Samples of the shortest sound that it takes."""
        return self._length

    @abstractmethod
    def extract(self, samples: Floats) -> Floats:
        """Return float32 [T, width], of `fewest` samples or more."""

    @abstractmethod
    def _make_filters(self) -> NDArray[np.float64]:
        """Return the filters, [n_fft // 2 + 1, mels]."""

    @abstractmethod
    def _prepare(self, windows: Floats) -> NDArray[np.float64]:
        """Return windows [N, samples] as they are transformed."""

    def _sum_mels(self, windows: Floats) -> NDArray[np.float64]:
        """Return the power of windows [N, samples] in each mel, [N, mels]."""
        found = []
        for first in range(0, len(windows), _AT_ONCE):
            prepared = self._prepare(windows[first : first + _AT_ONCE])
            spectra = np.fft.rfft(prepared, n=self._transformed)
            found.append((spectra.real**2 + spectra.imag**2) @ self._filters)
        return np.concatenate(found)


class GraniteMels(LogMels):
    """Granite Speech's: two windows are a frame, and the loudest sets the floor of all."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__(settings, "n_mels")
        bell = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(self._length) / self._length)
        before = (self._transformed - self._length) // 2
        self._bell = np.pad(bell, (before, self._transformed - self._length - before))

    @property
    def fewest(self) -> int:
        """As many as are mirrored at both ends, and one; and two windows."""
        return max(self._transformed // 2 + 1, self._hop)

    def extract(self, samples: Floats) -> Floats:
        mirrored = np.pad(samples, self._transformed // 2, mode="reflect")
        windows = sliding_window_view(mirrored, self._transformed)[:: self._hop]
        logs = np.log10(np.maximum(self._sum_mels(windows), 1e-10))
        logs = (np.maximum(logs, logs.max() - 8.0) / 4 + 1).astype(np.float32)
        frames: Floats = logs[: len(logs) // 2 * 2].reshape(-1, 2 * self._mels)
        return frames

    def _make_filters(self) -> NDArray[np.float64]:
        from transformers.audio_utils import mel_filter_bank

        bins, rate = self._transformed // 2 + 1, self.sampling_rate
        return mel_filter_bank(bins, self._mels, 0.0, rate / 2, rate, mel_scale="htk")

    def _prepare(self, windows: Floats) -> NDArray[np.float64]:
        return windows * self._bell


class Phi4Mels(LogMels):
    """Phi-4-multimodal's: a frame is a window that lies within the sound."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._emphasis = _read_number(settings, "preemphasis", 0.97)
        self._range = (
            _read_number(settings, "mel_min_frequency", 0.0),
            _read_number(settings, "mel_max_frequency", 7690.0),
        )
        super().__init__(settings, "feature_size")
        self._bell = np.hamming(self._length)

    def extract(self, samples: Floats) -> Floats:
        windows = sliding_window_view(samples, self._length)[:: self._hop]
        logs: Floats = np.log(np.maximum(self._sum_mels(windows), 1.0)).astype(np.float32)
        return logs

    def _make_filters(self) -> NDArray[np.float64]:
        from transformers.audio_utils import mel_filter_bank

        return mel_filter_bank(
            self._transformed // 2 + 1,
            self._mels,
            *self._range,
            self.sampling_rate,
            mel_scale="kaldi",
            triangularize_in_mel_space=True,
        )

    def _prepare(self, windows: Floats) -> NDArray[np.float64]:
        before = np.concatenate((windows[:, :1], windows[:, :-1]), axis=1)
        return (windows - self._emphasis * before) * 32768.0 * self._bell


def _read_number(settings: Mapping[str, Any], name: str, default: float) -> float:
    """Return a number from settings; raises ModelLoadError."""
    found = settings.get(name, default)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found < np.inf:
        raise ModelLoadError(
            f"the settings of its feature extractor need {name}, a number from 0 on, not {found!r}"
        )
    return float(found)


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
