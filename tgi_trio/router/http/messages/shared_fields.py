"""Fields of chats and completions that vLLM, SGLang and llama.cpp have, under their names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from tgi_trio.errors import ValidationError, name_param
from tgi_trio.router.http.messages.unserved import Unserved

Json = Any
I32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Count = Annotated[int, Meta(ge=-1, le=2**32 - 1)]  # -1: as many as there are
# OpenAI's seeds have a sign. The upper limit is checked as one is read: msgspec cannot do it.
Seed = Annotated[int, Meta(ge=-(2**63), extra_json_schema={"maximum": 2**64 - 1})]
# A key of cached prefixes, so its length is limited.
Salt = Annotated[str, Meta(min_length=1, max_length=256)]
# How much a model thinks, in the words of OpenAI's and Anthropic's APIs together.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
SchemaOrText = dict[str, Any] | str  # a JSON schema, or JSON text of one


def read_seed(given: int | None) -> int | None:
    """Return the seed that a field gives; None: a random one, which -1 asks for as well.

    vLLM and llama.cpp mean that by -1. Other negative ones are the numbers of the same 64 bits, as
    for torch. Raises ValidationError for one that has more bits.
    """
    if given is None or given == -1:
        return None
    if not -(2**63) <= given < 2**64:
        raise name_param(ValidationError("`seed` must be >= -2^63 and < 2^64"), "seed")
    return given % 2**64 if given < 0 else given


class StructuredOutputs(Struct, forbid_unknown_fields=True):
    """The form of an answer, as in vLLM: one of the first five fields."""

    json: SchemaOrText | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # GBNF (`::=`) or Lark (`:`)
    json_object: bool | None = None
    structural_tag: SchemaOrText | None = None  # or the text of one
    whitespace_pattern: str | None = None  # refused
    # True for every answer, whatever is given here.
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    disable_fallback: bool | None = None


class Scheduling(Struct, kw_only=True):
    """How a generation is scheduled, in all APIs."""

    unserved: ClassVar[Mapping[str, Unserved]] = MappingProxyType({})

    timeout: float | None = None  # seconds from the request's arrival
    priority: I32 | None = None  # lower is sooner
    # vLLM's: cached prefixes are shared only with requests that have the same salt.
    cache_salt: Salt | None = None


class SharedFields(Scheduling, kw_only=True):
    """Fields that chats and completions share."""

    # The form of the answer. vLLM:
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None  # GBNF (`::=`) or Lark (`:`)
    # SGLang; `json_schema` is llama.cpp's, too:
    json_schema: SchemaOrText | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: SchemaOrText | None = None  # or the text of one
    # llama.cpp:
    grammar: str | None = None  # GBNF
    # Where the answer ends.
    stop_regex: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None  # SGLang's name for the same
    # How tokens are sampled.
    typical_p: float | None = None
    # No n-gram of so many tokens comes again in the last ones, 0 for all; but these tokens may.
    no_repeat_ngram_size: Count | None = None
    no_repeat_ngram_window: Count | None = None
    no_repeat_ngram_whitelist: list[int] | None = None
    # What is reported about tokens, and how much of the prompt is used. vLLM:
    prompt_logprobs: Count | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Count | None = None
