"""Replies of /v1/responses as types: written by `answer.py`, shown in the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from tgi_trio.router.http.messages.replies import ChatCompletionLogprob, StreamReceipt

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class ReasoningTextPart(Struct, tag="reasoning_text", forbid_unknown_fields=True):
    """The text of a thought."""

    text: str


class SummaryTextPart(Struct, tag="summary_text", forbid_unknown_fields=True):
    """The text of a thought for clients that ask for its summary."""

    text: str


class OutputTextPart(Struct, tag="output_text", forbid_unknown_fields=True):
    """A text of the answer."""

    text: str
    annotations: list[Any] = []
    logprobs: list[ChatCompletionLogprob] = []  # if they are asked for


class ReasoningItem(Struct, tag="reasoning", forbid_unknown_fields=True):
    """A thought."""

    id: str
    status: ItemStatus
    content: list[ReasoningTextPart]  # empty where a summary is asked for
    summary: list[SummaryTextPart] = []
    encrypted_content: str | UnsetType = UNSET  # if it is asked for


class MessageItem(Struct, tag="message", forbid_unknown_fields=True):
    """A text."""

    id: str
    status: ItemStatus
    content: list[OutputTextPart]
    role: Literal["assistant"] = "assistant"


class FunctionCallItem(Struct, tag="function_call", forbid_unknown_fields=True):
    """A call of a function."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class CustomToolCallItem(Struct, tag="custom_tool_call", forbid_unknown_fields=True):
    """A call of a tool that takes free text."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


class ShellAction(Struct, tag="exec", forbid_unknown_fields=True):
    """A command."""

    command: list[str]
    env: dict[str, str] = {}
    working_directory: str | None = None
    timeout_ms: int | None = None


class LocalShellCallItem(Struct, tag="local_shell_call", forbid_unknown_fields=True):
    """A command for the client's shell."""

    id: str
    status: ItemStatus
    call_id: str
    action: ShellAction


class ShellCommands(Struct, forbid_unknown_fields=True):
    """Commands, one after the other."""

    commands: list[str]
    max_output_length: int | None = None
    timeout_ms: int | None = None


class LocalEnvironment(Struct, tag="local", frozen=True, forbid_unknown_fields=True):
    """Where commands are run: by the client."""


class ShellCallItem(Struct, tag="shell_call", forbid_unknown_fields=True):
    """Commands for the client's shell."""

    id: str
    status: ItemStatus
    call_id: str
    action: ShellCommands
    environment: LocalEnvironment = LocalEnvironment()


class CreateFile(Struct, tag="create_file", forbid_unknown_fields=True):
    """A file to be created."""

    path: str
    diff: str


class UpdateFile(Struct, tag="update_file", forbid_unknown_fields=True):
    """A file to be changed."""

    path: str
    diff: str


class DeleteFile(Struct, tag="delete_file", forbid_unknown_fields=True):
    """A file to be deleted."""

    path: str


PatchOperation = CreateFile | UpdateFile | DeleteFile
PatchStatus = Literal["in_progress", "completed"]


class ApplyPatchCallItem(Struct, tag="apply_patch_call", forbid_unknown_fields=True):
    """A change of a file, for the client."""

    id: str
    status: PatchStatus
    call_id: str
    operation: PatchOperation


ClientCallItem = LocalShellCallItem | ShellCallItem | ApplyPatchCallItem
OutputItem = ReasoningItem | MessageItem | FunctionCallItem | CustomToolCallItem | ClientCallItem


class InputTokensDetails(Struct, forbid_unknown_fields=True):
    """Kinds of tokens of the prompt."""

    cached_tokens: int
    cache_write_tokens: int = 0  # always 0: caching has no price of its own


class OutputTokensDetails(Struct, forbid_unknown_fields=True):
    """Kinds of tokens of the answer."""

    reasoning_tokens: int


class ResponseUsage(Struct, forbid_unknown_fields=True):
    """Tokens of the prompt and of the answer."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(Struct, forbid_unknown_fields=True):
    """Why a response failed."""

    code: str
    message: str


class IncompleteDetails(Struct, forbid_unknown_fields=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class ConversationName(Struct, forbid_unknown_fields=True):
    """The conversation that a response belongs to."""

    id: str


class ConversationReply(Struct, forbid_unknown_fields=True, kw_only=True):
    """A conversation that is kept."""

    id: str
    object: Literal["conversation"] = "conversation"
    created_at: int
    metadata: dict[str, str]


class ConversationDeleted(Struct, forbid_unknown_fields=True):
    """A conversation that is forgotten."""

    id: str
    object: Literal["conversation.deleted"] = "conversation.deleted"
    deleted: Literal[True] = True


class ResponseSettings(Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields of a request that its response repeats."""

    model: str
    instructions: str | None
    max_output_tokens: int | None
    parallel_tool_calls: bool
    reasoning: dict[str, Any]
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float
    top_logprobs: int
    metadata: dict[str, Any]
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    background: bool = False
    conversation: ConversationName | None = None
    max_tool_calls: None = None
    previous_response_id: str | None = None
    service_tier: Literal["default"] = "default"
    store: bool = False
    truncation: Literal["disabled"] = "disabled"


class ResponseReply(ResponseSettings, forbid_unknown_fields=True, kw_only=True):
    """A response, complete or in progress."""

    id: str
    object: Literal["response"]
    created_at: int
    status: ResponseStatus
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem]
    usage: ResponseUsage | None
    completed_at: int | None


class InputTokenCount(Struct, forbid_unknown_fields=True):
    """Tokens of a prompt."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class CompactionItem(Struct, tag="compaction", forbid_unknown_fields=True):
    """What stands for the part of a conversation that is no message of its user."""

    id: str
    encrypted_content: str  # encoded, not encrypted


class CompactionReply(Struct, forbid_unknown_fields=True, kw_only=True):
    """A conversation made shorter: its user's messages, and a `CompactionItem`."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[dict[str, Any]]
    usage: ResponseUsage


class ResponseDeleted(Struct, forbid_unknown_fields=True):
    """A response that is forgotten."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputItemList(Struct, forbid_unknown_fields=True, kw_only=True):
    """A page of items: those that a response answers, or of a conversation."""

    object: Literal["list"] = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponsesError(Struct, forbid_unknown_fields=True):
    """What went wrong."""

    message: str
    type: str
    param: str | None  # path of the field that is wrong
    code: str | None


class ResponsesErrorResponse(Struct, forbid_unknown_fields=True):
    """Error of /v1/responses."""

    error: ResponsesError


# ---- events ------------------------------------------------------------------------------------


class ResponseEvent(Struct, forbid_unknown_fields=True):
    """An event; `type` decides which of the other fields it has."""

    type: str
    sequence_number: int
    response: ResponseReply | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: ReasoningTextPart | SummaryTextPart | OutputTextPart | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    summary_index: int | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[ChatCompletionLogprob] | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    input: str | UnsetType = UNSET
    code: str | UnsetType | None = UNSET  # of `error`, as the next three
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET
    error: ResponsesError | UnsetType = UNSET
    receipt: StreamReceipt | UnsetType = UNSET
