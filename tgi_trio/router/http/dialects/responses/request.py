"""Converts requests of OpenAI's Responses into conversations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tgi_trio.errors import ToolError, ValidationError, naming_param
from tgi_trio.router.http.conversation import Conversation
from tgi_trio.router.http.dialects.responses import schema
from tgi_trio.router.http.dialects.responses.client_tools import CLIENT_TOOLS
from tgi_trio.router.http.dialects.responses.history import History
from tgi_trio.router.http.dialects.responses.items import to_turns
from tgi_trio.router.http.dialects.responses.tools import Toolbox, ToolList, model_name
from tgi_trio.router.http.dialects.responses.updates import AnswerFormat, Updates, read_updates
from tgi_trio.router.http.messages.body_reader import invalid_value, read_variables
from tgi_trio.router.http.messages.shared_fields import read_seed
from tgi_trio.router.http.messages.tool_schema import MODES
from tgi_trio.router.http.messages.unserved import MODERATION
from tgi_trio.router.parameters import GenerationParameters
from tgi_trio.router.text import grammars
from tgi_trio.router.text.turns import Turn

_MODES: Final = ("auto", "none", "required")


def check_served(request: schema.ResponsesRequest, *, kept: bool) -> None:
    """Raise ValidationError for fields that are not served; `kept`: whether responses can be.

    Only fields are refused that change what a client gets, or what it pays for.
    """
    for name, advice in (
        ("prompt", "no prompts are stored here, send its text as `instructions` or `input`"),
        ("moderation", MODERATION),
    ):
        if getattr(request, name):
            raise ValidationError(f"`{name}` is not supported: {advice}")
    if request.prompt_cache_options is not None and request.prompt_cache_options.prewarm:
        raise ValidationError(
            "`prompt_cache_options.prewarm` is not supported: every prompt is cached once it is "
            "computed, so ask for one token"
        )
    if request.image is not None and request.image.context_compression == "enabled":
        raise ValidationError(
            "`image.context_compression` cannot be `enabled`: every image has the tokens that its "
            "model gives it"
        )
    if request.conversation is not None and request.previous_response_id is not None:
        raise ValidationError(
            "`conversation` and `previous_response_id` exclude one another: both say what was said "
            "before"
        )
    if request.background and (request.store is False or not kept):
        how = "--response-store-bytes is 0" if not kept else "`store` is false"
        raise ValidationError(f"`background` needs the response to be kept, and {how}")
    if not request.input:
        raise ValidationError("`input` cannot be empty")


def to_conversation(
    request: schema.ResponsesRequest, history: History, most: int
) -> tuple[Conversation, Toolbox, Updates]:
    """Return the conversation of a body, without sampling parameters, and its tools.

    And what its items, `history`, say beside. `most`: bytes of a tool's grammar.

    Raises BodyRejected, Refused and ToolError.
    """
    thinking, updates = request.reasoning, read_updates(history)
    mode, names, named = _choice(request.tool_choice)
    lists = [ToolList("tools", request.tools or []), *updates.tools]
    box = Toolbox() if mode == "none" else Toolbox.of(lists, most)
    if names is not None:
        hosted = _hosted(lists) - box.tools.keys()
        names = [name for name in names if name not in hosted]
        if named and not names:
            mode, names, named = "auto", None, False
    if names is not None and mode != "none":
        box = box.select(names)
    if mode == "required" and not box.tools:
        raise ToolError("`tool_choice` is `required`, and there are no tools")
    turns = [] if request.instructions is None else [Turn("system", request.instructions)]
    turns += to_turns(history.kept + history.given, len(history.kept))
    if not turns:
        raise ValidationError("`input` holds no message, call or result that is read here")
    conversation = Conversation(
        turns=turns,
        tools=box.listed,
        functions=box.functions,
        choice=names[0] if named and names else None if mode == "none" else mode,
        named=named,
        loose=box.loose,
        parallel=request.parallel_tool_calls is not False,
        continues=False,
        variables=read_variables(request.chat_template_kwargs),
        effort=updates.effort or (None if thinking is None else thinking.effort),
    )
    return conversation, box, updates


def _hosted(lists: Sequence[ToolList]) -> set[str]:
    """Return the types of tools that clients run, unless they are defined for OpenAI to run."""
    tools = (each for given in lists for each in given.tools)
    return {str(each.get("type")) for each in tools if isinstance(each, Mapping)} & {*CLIENT_TOOLS}


def _choice(given: str | dict[str, Any] | None) -> tuple[str, list[str] | None, bool]:
    """Return `auto`, `none` or `required`, the tools that may be called (None: all), and whether
    it is the one that must be."""
    if given is None or isinstance(given, str):
        if given not in (None, *_MODES):
            modes = ", ".join(f"`{each}`" for each in _MODES)
            raise invalid_value("tool_choice", f"`{given}` is none of {modes}")
        return given or "auto", None, False
    match given.get("type"):
        case "function" | "custom":
            return "required", [_tool_name(given)], True
        case str(kind) if kind in CLIENT_TOOLS:
            return "required", [kind], True
        case "allowed_tools":
            mode, tools = given.get("mode"), given.get("tools")
            if mode not in MODES:
                modes = ", ".join(f"`{each}`" for each in MODES)
                raise invalid_value("tool_choice.mode", f"expected one of {modes}")
            if not isinstance(tools, list) or not all(isinstance(each, dict) for each in tools):
                raise invalid_value("tool_choice.tools", "expected a list of tools")
            # Those that OpenAI runs have no names, and are ignored here as among `tools`.
            known = (_find_name(each) for each in tools)
            return mode, [name for name in known if name is not None], False
    return "auto", None, False  # one of OpenAI's own tools


def _find_name(tool: dict[str, Any]) -> str | None:
    """Return the model's name for a tool that may be called; None: OpenAI runs it."""
    if "name" in tool:
        return _tool_name(tool)
    kind = str(tool.get("type"))
    return kind if kind in CLIENT_TOOLS else None


def _tool_name(tool: dict[str, Any]) -> str:
    name = tool.get("name")
    if not isinstance(name, str):
        raise invalid_value("tool_choice", "missing field `name`")
    return model_name(tool.get("namespace"), name)


def to_parameters(
    request: schema.ResponsesRequest,
    most: int,
    top: int | None,
    updated: AnswerFormat | None = None,
) -> GenerationParameters:
    """Return the sampling and stopping parameters; `most`: bytes of a schema.

    `top`: number of alternatives reported for each token. `updated`: the form of the answer that
    the items say, which counts instead of that of the request.

    Raises ValidationError and BodyRejected.
    """
    greedy, stop = request.temperature == 0, request.stop
    return GenerationParameters(
        temperature=None if greedy else request.temperature,
        do_sample=not greedy,
        top_p=None if greedy else request.top_p,
        top_k=None if greedy or request.top_k in (0, -1) else request.top_k,
        max_new_tokens=request.max_output_tokens,
        stop=tuple([stop] if isinstance(stop, str) else stop or ()),
        seed=read_seed(request.seed),
        grammar=_grammar(updated or _form(request), most),
        keep_stop=False,
        accept_neutral=True,
        clip_max_new_tokens=True,
        top_n_tokens=top,
        top_n_allowed=top or 0,  # already checked by the caller
    )


def _form(request: schema.ResponsesRequest) -> AnswerFormat | None:
    form = None if request.text is None else request.text.format
    return None if form is None else AnswerFormat("text.format", form)


def _grammar(given: AnswerFormat | None, most: int) -> str | None:
    """Return the grammar for the answer's form, if it has one."""
    if given is None or given.format.type == "text":
        return None
    path, form = given
    if form.type == "json_object":
        return grammars.json_object()
    if form.type != "json_schema":
        types = "`text`, `json_object` and `json_schema` are"
        raise invalid_value(path, f"`{form.type}` is no type: {types}")
    if not isinstance(form.schema, dict):
        raise invalid_value(path, "missing field `schema`")
    with naming_param(path):
        grammars.check_size(form.schema, most)
        return grammars.json_schema(form.schema)
