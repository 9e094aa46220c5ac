"""Activation functions that the generic decoder computes, by the names config.json gives them.

No torch in this file: a start with another is refused before anything is loaded.
"""

from __future__ import annotations

from typing import Final

from tgi_trio.errors import ModelLoadError

PLAIN: Final = (
    *("gelu", "gelu_10", "gelu_bloom", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "quick_gelu"),
    *("relu", "relu2", "sigmoid", "silu", "swish", "tanh"),
)
LEARNED: Final = "xielu"  # whose numbers are in the checkpoint, by `Names.activation`


def check_activation(name: str, *, learned: bool) -> None:
    """Raise ModelLoadError for an activation that is not computed, or whose numbers are nowhere.

    `learned`: the family has places for them.
    """
    known = (LEARNED,) if learned else PLAIN
    if name not in known:
        raise ModelLoadError(f"Activation {name!r} is not known; known are {', '.join(known)}.")
