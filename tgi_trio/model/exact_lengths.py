"""Models of which only sequences up to a length are computed here as their own code does.

MiniCPM 4 (OpenBMB 2025) attends to chosen blocks of longer sequences (InfLLM-v2), where its
config.json has a `sparse_config`; up to that length, and without it, attention is plain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tgi_trio.errors import ModelLoadError


def exact_length(values: Mapping[str, Any]) -> int | None:
    """Return the longest sequence in tokens, None if any is exact.

    `values`: of config.json. Raises ModelLoadError if none is.
    """
    sparse = values.get("sparse_config")
    if values.get("model_type") != "minicpm" or not sparse:
        return None
    dense = sparse.get("dense_len", 8192) if isinstance(sparse, Mapping) else None
    if not isinstance(dense, int) or isinstance(dense, bool) or dense < 2:
        raise ModelLoadError(
            f"sparse_config of config.json says dense_len {dense!r}: attention is sparse in every "
            "sequence, which is not computed here. Without its sparse_config the model attends to "
            "every token."
        )
    return dense - 1


def find_shortened(values: Mapping[str, Any]) -> list[str]:
    """Return a warning, a sentence, for a model of which only shorter sequences are served."""
    length, stated = exact_length(values), values.get("max_position_embeddings")
    if length is None or not isinstance(stated, int) or stated <= length:
        return []
    return [
        f"sequences have {length} tokens at most instead of {stated}: beyond, attention would be "
        "sparse by sparse_config of config.json (InfLLM-v2), which is not computed here. Without "
        "that section the model attends to every token, and sequences may be as long as it says"
    ]
