"""Conversations made shorter: their user's messages, and a summary of all else by the model.

OpenAI's models write what stands for the rest in a form that they alone read. Here it is a text,
encoded for the client to keep (`thought_codec.py`) and read back as the model's own words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from tgi_trio.errors import GenerationError, ValidationError
from tgi_trio.router.http.call import Call
from tgi_trio.router.http.conversation import Conversation
from tgi_trio.router.http.dialects.responses import replies, schema
from tgi_trio.router.http.dialects.responses.conversations import show_item
from tgi_trio.router.http.dialects.responses.history import History, name_item
from tgi_trio.router.http.dialects.responses.updates import KINDS
from tgi_trio.router.http.dialects.thought_codec import encode_thought
from tgi_trio.router.http.messages.problems import Refused
from tgi_trio.router.request import FinishReason, Outcome

_TASK: Final = (
    "Write a summary of this conversation for whoever goes on with it and has not read it: what "
    "was asked for, what was done and found out, what was decided and why, what is still to be "
    "done, and the names, paths and numbers that it takes. The user's messages will be there word "
    "for word, so leave them out. Answer with the summary alone, and call no tools."
)


def to_request(body: schema.CompactRequest) -> schema.ResponsesRequest:
    """Return the request whose answer is the summary, without the task itself.

    The likeliest tokens are taken, so that the same conversation has the same summary. Tools and
    what else shapes a prompt are those of the conversation. Raises ValidationError.
    """
    if not body.input and body.previous_response_id is None:
        raise ValidationError("`input` or `previous_response_id` must say what is to be compacted")
    return schema.ResponsesRequest(
        input=body.input or [],
        model=body.model,
        instructions=body.instructions,
        previous_response_id=body.previous_response_id,
        temperature=0.0,
        tools=body.tools,
        reasoning=body.reasoning,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def add_task(history: History) -> History:
    """Return a history that ends with the request for a summary."""
    task = schema.InputItem("message", role="user", content=_TASK)
    return replace(history, given=[*history.given, task])


def silence(conversation: Conversation) -> Conversation:
    """Return a conversation whose tools are shown, as in those before it, and never called.

    The prompt begins as theirs did, so that what is cached of them is found.
    """
    return replace(conversation, functions=(), loose=())


def check_summary(text: str, outcome: Outcome) -> str:
    """Return the summary; raises Refused and GenerationError for none that can stand for it all."""
    if outcome.reason is FinishReason.LENGTH:
        raise Refused(
            400,
            "The summary was cut off: behind this conversation there is room for "
            f"{outcome.generated_tokens} tokens. Compact it earlier, or leave out long results",
            "validation",
            code="context_length_exceeded",
        )
    if not text.strip():
        raise GenerationError("the model wrote no summary of this conversation")
    return text.strip()


def list_output(
    call: Call, items: Sequence[schema.InputItem], summary: str
) -> list[dict[str, Any]]:
    """Return what takes the place of a conversation: its user's messages, and the summary.

    What holds for the answers behind it stays as well.
    """
    staying = (each for each in items if _is_users(each) or each.type in KINDS)
    kept = [show_item(name_item(call, each)) for each in staying]
    id = f"cmp_{call.ids.randbytes(24).hex()}"
    return [*kept, msgspec.to_builtins(replies.CompactionItem(id, encode_thought(summary)))]


def _is_users(item: schema.InputItem) -> bool:
    return item.type in (None, "message") and item.role == "user"
