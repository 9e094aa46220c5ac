"""A tower hears on a device, over the stand-in, what it hears on a CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tgi_trio.shard.checkpoint.numbers import Floats
from tgi_trio.shard.media.features import Bundle
from tgi_trio.shard.media.tower import load_tower
from tgi_trio.testing.stand_in_device import StandInDevice


def check_on_device(folder: Path, family: str, bundle: Bundle, expected: Floats) -> None:
    """Compare the features of a sound with `expected`, float32 [N, hidden] of the CPU's tower."""
    with StandInDevice():
        with torch.inference_mode():  # the stand-in makes no views of parameters there
            device = torch.device("cuda:0")
            tower = load_tower(folder, family, device, torch.float32, hears=True)
        found = tower.encode(bundle).rows
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
