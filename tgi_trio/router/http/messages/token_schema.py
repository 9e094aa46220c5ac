"""Bodies of the routes that count tokens, in TGI's and vLLM's forms, and of those for adapters."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import UNSET, Meta, Struct, UnsetType

from tgi_trio.router.http.messages.schema import ChatRequest, GenerateParameters
from tgi_trio.router.http.messages.unserved import TOKENIZED_CHAT

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]


class TokenizeRequest(Struct):
    """Body of /tokenize in TGI's form: that of /generate with one text."""

    inputs: str
    parameters: GenerateParameters | UnsetType = UNSET


class TokenizePromptRequest(Struct):
    """Body of /tokenize in vLLM's form, for a text."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatRequest):
    """Body of /tokenize in vLLM's form, for a chat; every field that affects the prompt is used."""

    unserved: ClassVar = TOKENIZED_CHAT

    add_special_tokens: bool = False  # the template writes them
    return_token_strs: bool | None = None


class LoadAdapterRequest(Struct):
    """Body of /v1/load_lora_adapter."""

    lora_name: str | None = None
    lora_path: str | None = None  # below --adapter-folder
    load_inplace: bool = False  # a name that is already served gets another adapter


class UnloadAdapterRequest(Struct):
    """Body of /v1/unload_lora_adapter."""

    lora_name: str | None = None


class DetokenizeRequest(Struct):
    """Body of /detokenize."""

    tokens: list[TokenId]
    model: str | None = None
