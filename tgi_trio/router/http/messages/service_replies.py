"""Bodies of replies about the server, its model and its tokens, as types.

See `replies.py`, which has those of generations.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType


class SimpleToken(Struct, forbid_unknown_fields=True):
    """A token of a text; `start` and `stop` are byte offsets."""

    id: int
    text: str
    start: int
    stop: int


class ChatTokenizeResponse(Struct, forbid_unknown_fields=True):
    """Answer of /chat_tokenize."""

    tokenize_response: list[SimpleToken]
    templated_text: str


class TokenizeResponse(Struct, forbid_unknown_fields=True):
    """Answer of /tokenize in vLLM's form."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None  # as the vocabulary writes them, if asked for


class DetokenizeResponse(Struct, forbid_unknown_fields=True):
    """Answer of /detokenize; `content` is the same text, if no model was named."""

    prompt: str
    content: str | UnsetType = UNSET


class TokenizerInfo(Struct, forbid_unknown_fields=True):
    """Answer of /tokenizer_info, in the words of tokenizer_config.json."""

    tokenizer_class: Literal["PreTrainedTokenizerFast"]
    model_max_length: int
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None  # the one for chats without tools
    own_ends: list[int]  # of an adapter: ids that end its answers beside the model's; ours


class ModelInfo(Struct, forbid_unknown_fields=True):
    """A served model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str  # the model's or adapter's own name
    parent: str | None  # of an adapter: the model
    max_model_len: int  # tokens of prompt and answer together


class ModelsInfo(Struct, forbid_unknown_fields=True):
    """Answer of /v1/models."""

    object: Literal["list"]
    data: list[ModelInfo]


class ReasoningMarks(Struct, forbid_unknown_fields=True):
    """The marks that separate the model's thoughts from its answers."""

    start: str
    end: str
    source: str  # where they were found


class Info(Struct, forbid_unknown_fields=True):
    """Answer of /info."""

    model_id: str
    model_sha: str | None
    model_pipeline_tag: str | None
    max_concurrent_requests: int
    max_best_of: int
    max_stop_sequences: int
    max_input_tokens: int
    max_total_tokens: int
    validation_workers: int
    max_client_batch_size: int
    router: str
    version: str
    sha: str | None
    docker_label: str | None
    adapters: list[str]  # names of LoRA adapters; ours, not TGI's
    reasoning: ReasoningMarks | None  # null if no thoughts are separated; ours, not TGI's
    settings: dict[str, Any]  # every resolved setting that is not a secret; ours, not TGI's


class Version(Struct, forbid_unknown_fields=True):
    """Answer of /version."""

    version: str


class Live(Struct, forbid_unknown_fields=True):
    """Whether the server answers, in KServe's protocol."""

    live: bool
    ready: bool | UnsetType = UNSET


class Metadata(Struct, forbid_unknown_fields=True):
    """A server or a model, in KServe's protocol."""

    name: str
    version: str
    extensions: list[str]
