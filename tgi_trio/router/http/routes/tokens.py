"""Routes that convert texts and chats to tokens, and tokens to text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

import numpy as np
import orjson

from tgi_trio.ipc.messages import IntArray
from tgi_trio.process.threads import run_in_thread
from tgi_trio.router.http.answer_fields import use_model, use_queried_model
from tgi_trio.router.http.call import Call, Reply, Route
from tgi_trio.router.http.call_validation import expand_images
from tgi_trio.router.http.dialects.chat import to_conversation
from tgi_trio.router.http.messages import token_schema
from tgi_trio.router.http.messages.body_reader import BodyReader, FirstFit
from tgi_trio.router.http.messages.render import NUMPY, text_json
from tgi_trio.router.http.rendering import render_prompt
from tgi_trio.router.media.image_prompt import Prompt
from tgi_trio.router.text.tokenizer import INLINE_CHARACTERS, Encoding

# In this order: a body with `inputs` is in TGI's form, whatever else it has.
_TOKENIZE = FirstFit(
    {
        "inputs": token_schema.TokenizeRequest,
        "messages": token_schema.TokenizeChatRequest,
        "prompt": token_schema.TokenizePromptRequest,
    },
    needs="needs `inputs`, `prompt` or `messages`",
)
_DETOKENIZE = BodyReader(token_schema.DetokenizeRequest)

_MANY: Final = 1024  # tokens: written in about a millisecond

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")

Result = TypeVar("Result")
_VllmForm = token_schema.TokenizePromptRequest | token_schema.TokenizeChatRequest


async def tokenize(call: Call) -> Reply:
    """POST /tokenize: the tokens of a text or a chat, in TGI's or vLLM's form."""
    request: token_schema.TokenizeRequest | _VllmForm = await call.read(_TOKENIZE)
    if isinstance(request, token_schema.TokenizeRequest):
        if request.parameters and request.parameters.adapter_id is not None:
            adapter = call.engine.adapters.find(request.parameters.adapter_id)
            call.own_text_processor = await call.engine.text_processors.find(adapter)
        return Reply(await write_tokens(call, request.inputs, add_special_tokens=True))
    await use_model(call, request.model)
    if isinstance(request, token_schema.TokenizeChatRequest):
        conversation = await call.make(partial(to_conversation, call, request))
        text = await expand_text(call, await render_prompt(call, conversation))
    else:
        text = request.prompt
    tokenizer, length = call.text_processor.tokenizer, call.engine.limits.max_total_tokens
    ids = await _tokenize(text, partial(tokenizer.encode_ids, text, request.add_special_tokens))

    def write() -> bytes:
        written = tokenizer.written(ids) if request.return_token_strs else None
        answer = {"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": written}
        return orjson.dumps(answer, option=NUMPY)

    return Reply(await call.compute(write, long=len(ids) >= _MANY))


async def detokenize(call: Call) -> Reply:
    """POST /detokenize: the text of tokens, including special ones. Raises ValidationError."""
    request: token_schema.DetokenizeRequest = await call.read(_DETOKENIZE)
    await use_model(call, request.model)
    ids = np.array(request.tokens, dtype=np.int32)
    call.engine.validator.check_ids(ids, "tokens")
    text = await text_of(call, ids, skip_special=False)
    answer = {"prompt": text}
    if request.model is None:  # llama.cpp's clients read `content`, and never name a model
        answer["content"] = text
    return Reply(orjson.dumps(answer))


async def tokenizer_info(call: Call) -> Reply:
    """GET /tokenizer_info, as in vLLM: for clients that render chats themselves.

    `?model=` names an adapter, of whose tokenizer, template and ends it tells then.
    """
    await use_queried_model(call)
    template = call.text_processor.chat_template
    special = call.text_processor.tokenizer.special_tokens
    return Reply(
        orjson.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",  # whatever the model's files were
                "model_max_length": call.engine.limits.max_total_tokens,
                **{name: special.get(name) for name in _SPECIAL},
                "chat_template": None if template is None else template.source() or None,
                "own_ends": list(call.text_processor.ends),  # not vLLM's
            }
        )
    )


async def expand_text(call: Call, prompt: Prompt) -> str:
    """Return a prompt as its tokenizer gets it, with images fetched and expanded."""
    return prompt if isinstance(prompt, str) else (await expand_images(call, prompt)).text


async def count_tokens(call: Call, prompt: str) -> int:
    """Return how many tokens a rendered prompt has.

    They are remembered as those of requests are: agents ask again with every turn, and then send
    it. Raises ValidationError.
    """
    return await call.engine.validator.count_tokens(prompt, call.text_processor.tokenizer)


async def write_tokens(call: Call, text: str, *, add_special_tokens: bool) -> bytes:
    """Return the tokens of a text as a list of `SimpleToken` in JSON.

    Many are written and freed beside the loop: each takes a microsecond. Raises ValidationError.
    """
    encode = call.text_processor.tokenizer.encode
    encoding = await _tokenize(text, partial(encode, text, add_special_tokens))
    long = len(encoding.ids) >= _MANY
    if long:
        call.made.append(encoding)
    return await call.compute(partial(simple_tokens_json, encoding), long=long)


async def _tokenize(text: str, encode: Callable[[], Result]) -> Result:
    """Return what `encode` makes of a text, in a thread if that is long."""
    return encode() if len(text) <= INLINE_CHARACTERS else await run_in_thread(encode)


async def text_of(call: Call, ids: IntArray, *, skip_special: bool = True) -> str:
    """Return the text of tokens, int32 [n]; many are decoded in a thread."""
    decode = call.text_processor.tokenizer.decode
    if len(ids) <= INLINE_CHARACTERS:
        return decode(ids, skip_special)
    return await run_in_thread(partial(decode, ids, skip_special))


def simple_tokens_json(encoding: Encoding) -> bytes:
    """Return a list of `SimpleToken`, with byte offsets as in TGI."""
    data = encoding.text.encode()
    pieces = []
    for id, (start, stop) in zip(encoding.ids.tolist(), encoding.byte_offsets(), strict=True):
        text = data[start:stop].decode(errors="replace")
        pieces.append(
            b'{"id":%d,"text":%b,"start":%d,"stop":%d}' % (id, text_json(text), start, stop)
        )
    return b"[%b]" % b",".join(pieces)


ROUTES = (
    Route("POST", "/tokenize", tokenize),
    Route("POST", "/detokenize", detokenize),
    Route("GET", "/tokenizer_info", tokenizer_info, protected=False),
)
