"""Fields that change a generation at vLLM, SGLang, llama.cpp or TGI, but are not served here.

A client that sends one relies on its effect, so the request is refused with an explanation, unless
the value asks for what happens anyway. Unknown names are ignored, as clients of OpenAI's API
expect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, TypeAlias

import msgspec

from tgi_trio.errors import ValidationError


@dataclass(frozen=True, slots=True)
class Unserved:
    """The advice for a value that is not one of `neutral`; null is always neutral."""

    advice: str
    neutral: tuple[Any, ...] = ()


AnyBytes: TypeAlias = "bytes | bytearray | memoryview | msgspec.Raw"  # of JSON

_OFF = (0, False)
_EMPTY: tuple[Any, ...] = ([], {}, "")
_PROMPT = "send the prompt as it is to be read; /v1/completions takes token ids as well"
_DRAWN = "tokens are drawn by `temperature`, `top_k`, `top_p`, `typical_p` and `min_p`"
_LENGTH = "use `max_tokens` or `max_completion_tokens`"
_IMAGES = "images are parts of messages, and the model's settings say how they are processed"
_PENALTY = "use `repetition_penalty`, `frequency_penalty` or `presence_penalty`"
_STATE = "the state of a generation stays in this server"
_MODEL = "the server's command line says what is loaded; choose a model by `model`"
_CODE = "clients' code does not run in this server"
_TOOLS = "use `tools` and `tool_choice`"
_PLACED = "this server alone places a request among its ranks"
_CHATS = "use /v1/chat/completions"
MODERATION = "nothing here judges prompts and answers; have them judged elsewhere"

_ANYWHERE = {
    # Search and selection.
    "use_beam_search": Unserved("there is no beam search; use `n` or `best_of`", _OFF),
    "length_penalty": Unserved("it is for beam search, which is not served", (1,)),
    "early_stopping": Unserved("it is for beam search, which is not served", _OFF),
    # How tokens are drawn.
    "samplers": Unserved(_DRAWN, _EMPTY),
    "mirostat": Unserved(_DRAWN, _OFF),
    "dynatemp_range": Unserved(_DRAWN, _OFF),
    "top_n_sigma": Unserved(_DRAWN, (0, -1)),
    "tfs_z": Unserved(_DRAWN, (1,)),
    "typ_p": Unserved("use `typical_p`", (1,)),
    "top_a": Unserved(_DRAWN, _OFF),
    "xtc_probability": Unserved(_DRAWN, _OFF),
    "min_keep": Unserved(_DRAWN, _OFF),
    "do_sample": Unserved("`temperature: 0` takes the likeliest token", (True,)),
    "repeat_penalty": Unserved("use `repetition_penalty`", (1,)),
    "dry_multiplier": Unserved(_PENALTY, _OFF),
    "repetition_detection": Unserved(_PENALTY, _EMPTY),
    "logits_processors": Unserved(_CODE, _EMPTY),
    "logits_processor": Unserved(_CODE, _EMPTY),
    "custom_logit_processor": Unserved(_CODE, _EMPTY),
    "allowed_token_ids": Unserved("use `logit_bias`, or a grammar", _EMPTY),
    "bad_words": Unserved("use `logit_bias` with -100 for their tokens", _EMPTY),
    "watermark": Unserved("/generate marks texts", _OFF),
    "watermarking": Unserved("/generate marks texts", _OFF),
    "ngram_corpus_id": Unserved("what is drafted comes from the prompt (--speculate)", _EMPTY),
    # Where an answer ends, and what is seen of it.
    "n_predict": Unserved(_LENGTH, (-1,)),
    "max_new_tokens": Unserved(_LENGTH),
    "max_length": Unserved(_LENGTH),
    "min_new_tokens": Unserved("use `min_tokens`", _OFF),
    "t_max_predict_ms": Unserved("use `timeout`, in seconds", (0, -1)),
    "n_indent": Unserved("use `stop_regex`", _OFF),
    "skip_special_tokens": Unserved("special tokens have no text in answers", (True,)),
    "grammar_lazy": Unserved("a grammar holds from the first token on; use `tools`", _OFF),
    "grammar_triggers": Unserved("a grammar holds from the first token on; use `tools`", _EMPTY),
    "guided_whitespace_pattern": Unserved("JSON is written without whitespace"),
    "preserved_tokens": Unserved("special tokens have no text in answers", _EMPTY),
    "n_probs": Unserved("use `logprobs`", _OFF),
    "return_hidden_states": Unserved("they stay in the shard", _OFF),
    "return_routed_experts": Unserved("they stay in the shard", _OFF),
    "routed_experts_prompt_start": Unserved("experts of tokens stay in the shard", _OFF),
    "routed_experts_start_len": Unserved("experts of tokens stay in the shard", _OFF),
    "return_weight_versions": Unserved("weights are those of the start", _OFF),
    "return_token_offsets": Unserved("use `logprobs`, with `text_offset`, of completions", _OFF),
    "return_prompt_text": Unserved("use `return_token_ids`, or /chat_tokenize", _OFF),
    "return_prompt_token_ids": Unserved("use `return_token_ids`", _OFF),
    "return_meta_info": Unserved("use `usage`, and headers of the answer", _OFF),
    "return_cached_tokens_details": Unserved("`usage` has `cached_tokens`", _OFF),
    "return_mm_kwargs": Unserved(_IMAGES, _OFF),
    "logprob_token_ids": Unserved("use `top_logprobs`, or `logprobs` of completions", _EMPTY),
    # What is computed, and from what.
    "prompt_embeds": Unserved(_PROMPT),
    "input_embeds": Unserved(_PROMPT),
    "input_ids": Unserved(_PROMPT),
    "truncate": Unserved("/generate takes it", ()),
    "truncation_side": Unserved("prompts are cut at their beginning", ("left",)),
    "images_config": Unserved(_IMAGES, _EMPTY),
    "max_dynamic_patch": Unserved(_IMAGES),
    "min_dynamic_patch": Unserved(_IMAGES),
    "use_audio_in_video": Unserved("sounds are parts of messages of their own", _OFF),
    "extra_key": Unserved("use `cache_salt`, which keeps cached prefixes apart", _EMPTY),
    "multi_modal_data": Unserved(_IMAGES, _EMPTY),
    "media_io_kwargs": Unserved("use `mm_processor_kwargs`: `fps` or `num_frames`", _EMPTY),
    "lora": Unserved(_MODEL, _EMPTY),
    "lora_path": Unserved(_MODEL, _EMPTY),
    "lora_request": Unserved(_MODEL, _EMPTY),
    "adapter_id": Unserved("/generate takes it", _EMPTY),
    "kv_transfer_params": Unserved(_STATE, _EMPTY),
    "session_params": Unserved(_STATE, _EMPTY),
    "ec_transfer_params": Unserved(_STATE, _EMPTY),
    "id_slot": Unserved(_STATE, (-1,)),
    "bootstrap_host": Unserved(_STATE, _EMPTY),
    "bootstrap_port": Unserved(_STATE, _EMPTY),
    "bootstrap_room": Unserved(_STATE, _EMPTY),
    "data_parallel_rank": Unserved(_PLACED),
    "routed_dp_rank": Unserved(_PLACED),
    "disagg_prefill_dp_rank": Unserved(_PLACED),
    "custom_labels": Unserved("metrics have the server's labels alone", _EMPTY),
    "vllm_xargs": Unserved(_CODE, _EMPTY),
    "custom_params": Unserved(_CODE, _EMPTY),
}

_CHAT = {
    "best_of": Unserved("use `n`, or /v1/completions", (1,)),
    "echo": Unserved("/v1/completions repeats prompts", _OFF),
    "suffix": Unserved("an answer has nothing behind it", _EMPTY),
    "add_special_tokens": Unserved("the chat template writes them", (False,)),
    "chat_template": Unserved("the server has one (--chat-template)", _EMPTY),
    "functions": Unserved(_TOOLS, _EMPTY),
    "function_call": Unserved(_TOOLS, ("none", "auto")),
    "modalities": Unserved("answers are text", (["text"], [])),
    "audio": Unserved("answers are text"),
    "web_search_options": Unserved("this server searches nothing"),
    "moderation": Unserved(MODERATION),
    "stream_reasoning": Unserved("thoughts come as they are thought", (True,)),
    "task": Unserved("write its token behind the prompt, with /v1/completions"),
}

_COMPLETION = {
    "mm_processor_kwargs": Unserved(_IMAGES, _EMPTY),
    "add_special_tokens": Unserved("send `prompt` as token ids for one without", (True,)),
    "top_logprobs": Unserved("use `logprobs`, a number", _OFF),
    "max_completion_tokens": Unserved("use `max_tokens`"),
    "tools": Unserved("use /v1/chat/completions", _EMPTY),
    "thinking_token_budget": Unserved("use `max_tokens`, or /v1/chat/completions"),
    **dict.fromkeys(
        ("reasoning_effort", "reasoning", "thinking", "enable_thinking", "thinking_budget"),
        Unserved("it is for chat templates; use /v1/chat/completions"),
    ),
}

# What /v1/responses has at vLLM; the rest of what it takes is OpenAI's.
_RESPONSES = {
    "frequency_penalty": Unserved(_CHATS, _OFF),
    "presence_penalty": Unserved(_CHATS, _OFF),
    "repetition_penalty": Unserved(_CHATS, (1,)),
    "min_p": Unserved(_CHATS, _OFF),
    "logit_bias": Unserved(_CHATS, _EMPTY),
    "stop_token_ids": Unserved(_CHATS, _EMPTY),
    "ignore_eos": Unserved(_CHATS, _OFF),
    "no_repeat_ngram_size": Unserved(_CHATS, _OFF),
    "include_stop_str_in_output": Unserved(_CHATS, _OFF),
    "include_reasoning": Unserved(_CHATS, (True,)),
    "thinking": Unserved("use `reasoning`"),
    "enable_thinking": Unserved("use `reasoning`, or `chat_template_kwargs`"),
    "thinking_budget": Unserved(_CHATS),
    "structured_outputs": Unserved("use `text.format`"),
    "mm_processor_kwargs": Unserved(_CHATS, _EMPTY),
    "enable_response_messages": Unserved("`output` has all items, and no more is kept", _OFF),
    "previous_input_messages": Unserved("send the whole conversation as `input`", _EMPTY),
}

# What llama.cpp's /infill has beside what is served there; of others' fields, only these.
_SUFFIX = "/v1/completions takes it, with `suffix`"
_INFILL = {
    **{
        name: _ANYWHERE[name]
        for name in (
            *("mirostat", "dynatemp_range", "top_n_sigma", "xtc_probability", "min_keep"),
            *("dry_multiplier", "lora"),
        )
    },
    "repeat_penalty": Unserved("use `frequency_penalty` or `presence_penalty`", (1,)),
    "ignore_eos": Unserved(_SUFFIX, _OFF),
    "logit_bias": Unserved(_SUFFIX, _EMPTY),
    "grammar": Unserved(_SUFFIX, _EMPTY),
    "json_schema": Unserved(_SUFFIX, _EMPTY),
    "n_probs": Unserved("/v1/completions has `logprobs`, with `suffix`", _OFF),
    "n_cmpl": Unserved("/v1/completions has `n`, with `suffix`", (1,)),
    "timings_per_token": Unserved("the end of an answer has `timings`", _OFF),
    "return_progress": Unserved("the end of an answer has `timings`", _OFF),
}

CHAT: Mapping[str, Unserved] = MappingProxyType(_ANYWHERE | _CHAT)
# A chat that is only tokenised may choose its special tokens.
TOKENIZED_CHAT: Mapping[str, Unserved] = MappingProxyType(
    {name: each for name, each in CHAT.items() if name != "add_special_tokens"}
)
COMPLETION: Mapping[str, Unserved] = MappingProxyType(_ANYWHERE | _COMPLETION)
RESPONSES: Mapping[str, Unserved] = MappingProxyType(_ANYWHERE | _RESPONSES)
INFILL: Mapping[str, Unserved] = MappingProxyType(_INFILL)


class Shape(Protocol):
    """A msgspec struct that lists the fields that it does not serve."""

    unserved: ClassVar[Mapping[str, Unserved]]
    __struct_fields__: ClassVar[tuple[str, ...]]


class UnservedFields:
    """Finds fields that a type of body does not serve."""

    def __init__(self, shape: type[Shape]) -> None:
        if both := shape.unserved.keys() & set(shape.__struct_fields__):
            raise ValueError(f"served and unserved at the same time: {sorted(both)}")
        self._table = shape.unserved
        self._decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])

    def check(self, body: AnyBytes) -> None:
        """Raise ValidationError for a body, a JSON object, that sets one of the fields."""
        fields = self._decoder.decode(body)
        for name in self._table.keys() & fields.keys():
            value = msgspec.json.decode(fields[name])
            if value is None or value in self._table[name].neutral:
                continue
            shown = bytes(fields[name]).decode()
            given = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}..."
            raise ValidationError(
                f"`{name}` is not supported: {self._table[name].advice}. Given: {given}"
            )


_SHOWN = 60  # most characters of a value in its error
