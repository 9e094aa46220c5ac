"""Paths that other servers have: why nothing is served there, and what is instead.

Paths are those of vLLM, SGLang, llama.cpp, Ollama, text-embeddings-inference and OpenAI.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Final

_VECTORS: Final = (
    "this server writes text and makes no embeddings; a server of embedding models does"
)
_RANKS: Final = (
    "this server writes text and ranks none; a server of rerankers does, or compare "
    "log-probabilities (`prompt_logprobs`) at /v1/completions"
)
_CLASSES: Final = (
    "this server writes text and has no classifiers; `choice` in `structured_outputs` makes a "
    "chat's answer one of several texts"
)
_SOUND: Final = "a model that hears takes sounds at /v1/chat/completions, /v1/audio/transcriptions"
_SPEECH: Final = "this server writes text, and neither speaks nor draws"
_FILES: Final = "nothing is stored here; send each request by itself"
_BATCHES: Final = "nothing is stored here; `tgi-trio batch` asks a server the requests of a file"
_OLLAMA: Final = "Ollama's API is not served; use OpenAI's: /v1/chat/completions, /v1/models"
_TEXT: Final = "use /generate or /v1/completions"

# What has things of clients below it elsewhere: files, answers, threads.
_STORES: Final = (
    *("/v1/files", "/v1/batches", "/v1/assistants", "/v1/threads"),
    *("/v1/vector_stores", "/v1/fine_tuning/jobs", "/v1/messages/batches"),
)
_STORED: Final = (
    *_STORES,
    "/v1/chat/completions",
    "/v1/uploads",
    "/v1/containers",
)

_WHY: Final[Mapping[str, str]] = MappingProxyType(
    dict.fromkeys(
        (
            *("/v1/embeddings", "/embeddings", "/embedding", "/v1/embed", "/v2/embed", "/embed"),
            *("/embed_all", "/embed_sparse", "/similarity", "/encode", "/pooling", "/v1/pooling"),
        ),
        _VECTORS,
    )
    | dict.fromkeys(
        (
            *("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking"),
            *("/score", "/v1/score", "/generative_scoring", "/v1/generative_scoring"),
        ),
        _RANKS,
    )
    | dict.fromkeys(("/classify", "/v1/classify", "/predict", "/v1/moderations"), _CLASSES)
    | dict.fromkeys(("/v1/audio/translations", "/v1/realtime"), _SOUND)
    | dict.fromkeys(
        (
            *("/v1/audio/speech", "/v1/images/generations", "/v1/images/edits"),
            *("/v1/images/variations", "/v1/videos"),
        ),
        _SPEECH,
    )
    | dict.fromkeys(_STORES, _FILES)
    | {"/v1/batches": _BATCHES}
    | dict.fromkeys(
        ("/api/generate", "/api/chat", "/api/tags", "/api/show", "/api/embed", "/api/embeddings"),
        _OLLAMA,
    )
    | {"/completion": _TEXT, "/apply-template": "use /chat_tokenize"}
    | dict.fromkeys(("/props", "/slots", "/get_model_info", "/server_info"), "use /info")
)


def explain_path(path: str, served: Collection[str]) -> str:
    """Return why nothing is served at a path, or what may be meant; "" where that is unknown.

    `served`: the paths of routes.
    """
    plain = re.sub("//+", "/", path).rstrip("/") or "/"
    if plain in _WHY:
        return _WHY[plain]
    for meant in (plain, f"/v1{plain}", plain.removeprefix("/v1"), plain.removesuffix("/v1")):
        if meant != path and meant in served:
            return f"`{meant}` is"
    return _FILES if plain.startswith(tuple(f"{each}/" for each in _STORED)) else ""
