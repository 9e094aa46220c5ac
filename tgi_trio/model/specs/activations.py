"""The activation functions that the generic decoder computes, by their names in config.json.

No torch in this file: a model with another one is refused before anything is loaded.
"""

from __future__ import annotations

from typing import Final

from tgi_trio.errors import ModelLoadError

PLAIN: Final = (
    *("gelu", "gelu_10", "gelu_bloom", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "quick_gelu"),
    *("relu", "relu2", "sigmoid", "silu", "swish", "tanh"),
)
LEARNED: Final = "xielu"  # whose parameters are in the checkpoint, see `Names.activation`


def check_activation(name: str, *, learned: bool) -> None:
    """Raise ModelLoadError for an unknown activation, or one whose parameters have no place.

    `learned`: checkpoints of the family store such parameters.
    """
    known = (LEARNED,) if learned else PLAIN
    if name not in known:
        raise ModelLoadError(f"Activation {name!r} is not known; known are {', '.join(known)}.")
