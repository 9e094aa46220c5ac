"""The kinds of tensors in PEFT's adapters, by their names; layouts are those of peft 0.21."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import Final


class Kind(Enum):
    """The role of an adapter's tensor in its module."""

    A = auto()  # [r, in]
    B = auto()  # [out, r]
    ADDED_BIAS = auto()  # [out], B's bias; s times it is added to the module's bias
    EMBEDDING_A = auto()  # [r, tokens]
    EMBEDDING_B = auto()  # [width, r]
    MAGNITUDE = auto()  # [out], or [width] of an embedding: m of DoRA
    ROWS = auto()  # [n, width]: whole rows of an embedding or head, from `trainable_token_indices`
    WEIGHT = auto()  # replaces the base's weight
    BIAS = auto()  # replaces the base's bias


_KINDS: Final[Sequence[tuple[Kind, str]]] = (
    (Kind.A, r"lora_A(?:\.default)?\.weight"),
    (Kind.B, r"lora_B(?:\.default)?\.weight"),
    (Kind.ADDED_BIAS, r"lora_B(?:\.default)?\.bias"),
    (Kind.EMBEDDING_A, r"lora_embedding_A(?:\.default)?"),
    (Kind.EMBEDDING_B, r"lora_embedding_B(?:\.default)?"),
    (Kind.MAGNITUDE, r"lora_magnitude_vector(?:\.default)?(?:\.weight)?"),
    (Kind.ROWS, r"token_adapter\.trainable_tokens_delta(?:\.default)?"),
    (Kind.WEIGHT, r"(?:base_layer\.)?weight"),
    (Kind.BIAS, r"(?:base_layer\.)?bias"),
)
_NAMES: Final = [
    (kind, re.compile(rf"(?:base_model\.model\.)?(.+?)\.{suffix}")) for kind, suffix in _KINDS
]


def find_kinds(name: str) -> Iterator[tuple[Kind, str]]:
    """Yield each kind that a tensor may be by its name, with its module, the likeliest first."""
    for kind, pattern in _NAMES:
        if (match := pattern.fullmatch(name)) is not None:
            yield kind, match[1]
