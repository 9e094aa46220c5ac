"""Routes that convert texts and chats to tokens, and tokens to text."""

from __future__ import annotations

from functools import partial

import numpy as np
import orjson

from tgi_trio.ipc.messages import IntArray
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
from tgi_trio.threads import run_in_thread

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

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")

_VllmForm = token_schema.TokenizePromptRequest | token_schema.TokenizeChatRequest


async def tokenize(call: Call) -> Reply:
    """POST /tokenize: the tokens of a text or a chat, in TGI's or vLLM's form."""
    request: token_schema.TokenizeRequest | _VllmForm = await call.read(_TOKENIZE)
    if isinstance(request, token_schema.TokenizeRequest):
        if request.parameters and request.parameters.adapter_id is not None:
            adapter = call.engine.adapters.find(request.parameters.adapter_id)
            call.own_text_processor = await call.engine.text_processors.find(adapter)
        return Reply(simple_tokens_json(await tokenize_text(call, request.inputs, True)))
    await use_model(call, request.model)
    if isinstance(request, token_schema.TokenizeChatRequest):
        conversation = await call.make(partial(to_conversation, call, request))
        text = await expand_text(call, await render_prompt(call, conversation))
    else:
        text = request.prompt
    ids = (await tokenize_text(call, text, request.add_special_tokens)).ids
    answer = {
        "count": len(ids),
        "max_model_len": call.engine.limits.max_total_tokens,
        "tokens": ids,
        "token_strs": call.text_processor.tokenizer.written(ids)
        if request.return_token_strs
        else None,
    }
    return Reply(orjson.dumps(answer, option=NUMPY))


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


async def tokenize_text(call: Call, text: str, add_special_tokens: bool) -> Encoding:
    """Return the tokens of `text`; a long text is tokenised in a thread. Raises ValidationError."""
    encode = call.text_processor.tokenizer.encode
    if len(text) <= INLINE_CHARACTERS:
        return encode(text, add_special_tokens)
    return await run_in_thread(partial(encode, text, add_special_tokens))


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
