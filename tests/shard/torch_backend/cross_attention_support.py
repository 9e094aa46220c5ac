"""Made-up images that layers attend to, and plans whose rows have some."""

from __future__ import annotations

import numpy as np
import torch

from tests.shard.torch_backend.models_support import plan, sequence
from tgi_trio.shard.contract import StepPlan
from tgi_trio.shard.media.features import CrossStates, ImageFeatures
from tgi_trio.shard.media.held_image import HeldImage

LAYERS, HEADS, DIM = 2, 4, 8
LENGTH = 9  # of a prompt
CPU = torch.device("cpu")


def states(number: int, tokens: int) -> CrossStates:
    """Return what layers read of an image, whose last token is of nothing if its number is odd."""
    draw = torch.Generator().manual_seed(number)
    size = (LAYERS, tokens, HEADS, DIM)
    keys, values = (tuple(torch.randn(size, generator=draw)) for _ in range(2))
    return CrossStates(keys, values, tokens, visible=tokens - number % 2, number=number)


def seeing(*rows: tuple[CrossStates, ...], computed: int = 0) -> StepPlan:
    """Return a plan of prompts that begin with their images, all that is left of each."""
    made = [sequence(i, list(range(LENGTH)), [1 + i], new=1) for i in range(len(rows))]
    for row, images in zip(made, rows, strict=True):
        row.computed = computed
        for at, each in enumerate(images):
            features = ImageFeatures(np.empty((0, 0), np.float32), states=each)
            row.images.append(HeldImage(np.array([at]), features))
    return plan(made, [LENGTH - computed] * len(made))
