"""The kinds of tensors in PEFT's adapters, by their names; layouts are those of peft 0.21."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from enum import Enum, auto
from typing import Final


class TensorKind(Enum):
    """What an adapter's tensor is in its module."""

    A = auto()  # [r, in]
    B = auto()  # [out, r]
    ADDED_BIAS = auto()  # [out], B's bias; s times it is added to the module's bias
    EMBEDDING_A = auto()  # [r, tokens]
    EMBEDDING_B = auto()  # [width, r]
    MAGNITUDE = auto()  # [out], or [width] of an embedding: m of DoRA
    ROWS = auto()  # [n, width]: whole rows of an embedding or head, from `trainable_token_indices`
    WEIGHT = auto()  # replaces the base's weight
    BIAS = auto()  # replaces the base's bias


_KINDS: Final[Sequence[tuple[TensorKind, str]]] = (
    (TensorKind.A, r"lora_A(?:\.default)?\.weight"),
    (TensorKind.B, r"lora_B(?:\.default)?\.weight"),
    (TensorKind.ADDED_BIAS, r"lora_B(?:\.default)?\.bias"),
    (TensorKind.EMBEDDING_A, r"lora_embedding_A(?:\.default)?"),
    (TensorKind.EMBEDDING_B, r"lora_embedding_B(?:\.default)?"),
    (TensorKind.MAGNITUDE, r"lora_magnitude_vector(?:\.default)?(?:\.weight)?"),
    (TensorKind.ROWS, r"token_adapter\.trainable_tokens_delta(?:\.default)?"),
    (TensorKind.WEIGHT, r"(?:base_layer\.)?weight"),
    (TensorKind.BIAS, r"(?:token_adapter\.)?(?:base_layer\.)?bias"),
)
_NAMES: Final = [
    (kind, re.compile(rf"(?:base_model\.model\.)?(.+?)\.{suffix}")) for kind, suffix in _KINDS
]


# Embeddings and heads by the last parts of their names. PEFT writes them whole of its own accord
# where an adapter changes one of them, or its size.
WRITTEN_WHOLE: Final = (
    *("embed_tokens", "wte", "embed_in", "word_embeddings", "tokens_embed", "embeddings"),
    *("lm_head", "embed_out", "output_projection"),
)

# PEFT writes what is saved whole under these names as well, where the vocabulary has another size.
_REPEATED: Final = re.compile(r"(.+)\.(?:modules_to_save(?:\.default)?|original_module)\.weight")


def is_repeated(name: str, names: Container[str]) -> bool:
    """Return whether a tensor is that of a module which is saved whole, once more, or the base's.

    `names`: of all tensors, where it has its usual name too.
    """
    found = _REPEATED.fullmatch(name)
    return found is not None and f"{found[1]}.weight" in names


def find_kinds(name: str) -> Iterator[tuple[TensorKind, str]]:
    """Yield each kind that a tensor may be by its name, with its module, the likeliest first."""
    for kind, pattern in _NAMES:
        if (match := pattern.fullmatch(name)) is not None:
            yield kind, match[1]
