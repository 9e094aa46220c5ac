"""A sound without its samples, for who counts tokens and who makes features."""

from __future__ import annotations

from typing import NamedTuple


class Sound(NamedTuple):
    """What is known of a sound without its samples."""

    samples: int  # of one channel, at the model's rate
    sampling_rate: int  # samples in a second

    @property
    def seconds(self) -> float:
        return self.samples / self.sampling_rate
