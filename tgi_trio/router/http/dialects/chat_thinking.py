"""How a chat asks for thoughts, under all the names that APIs have for it.

OpenAI has `reasoning_effort`, OpenRouter `reasoning`, DeepSeek, Z.ai and Kimi `thinking`, Qwen's
API `enable_thinking` and `thinking_budget`; vLLM, SGLang and llama.cpp have budgets of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from tgi_trio.errors import ValidationError, name_param
from tgi_trio.router.http.call import Call
from tgi_trio.router.http.messages.body_reader import choose_alias, read_variables
from tgi_trio.router.http.messages.schema import ChatReasoning, ChatRequest
from tgi_trio.router.text.chat_template import ChatTemplate

_SWITCHES: Final = ("enable_thinking", "thinking")  # template variables: whether to think


@dataclass(frozen=True, slots=True)
class RequestedThinking:
    """What is asked of thoughts, as `Conversation` has it. None: as the model does by itself."""

    effort: str | None
    thinking: bool | None
    budget: int | None  # most tokens of a thought
    shown: bool
    variables: Mapping[str, Any]  # of the template, the client's own


def read_thinking(call: Call, request: ChatRequest, *, tools: bool) -> RequestedThinking:
    """Return what a chat asks of thoughts; `tools`: whether functions may be called.

    Raises BodyRejected for names that contradict each other, and ValidationError for what this
    model cannot be told.
    """
    reasoning, thinking = request.reasoning or ChatReasoning(), request.thinking
    efforts = {"reasoning_effort": request.reasoning_effort, "reasoning.effort": reasoning.effort}
    switches = {
        "enable_thinking": request.enable_thinking,
        "reasoning.enabled": reasoning.enabled,
        "thinking.type": None if thinking is None else thinking.type,
    }
    budgets = {
        "thinking_token_budget": request.thinking_token_budget,
        "max_think_tokens": request.max_think_tokens,
        "thinking_budget_tokens": request.thinking_budget_tokens,
        "thinking_budget": request.thinking_budget,
        "reasoning.max_tokens": reasoning.max_tokens,
        "thinking.budget_tokens": None if thinking is None else thinking.budget_tokens,
    }
    shown = {"include_reasoning": request.include_reasoning, "reasoning.exclude": reasoning.exclude}
    effort = choose_alias(efforts)
    wanted = choose_alias(switches | efforts, _means_thought)
    budget = choose_alias(budgets)
    visible = choose_alias(shown, lambda name, value: value is (name == "include_reasoning"))
    switched = any(value is not None for value in switches.values())
    fields = (*(("reasoning_effort",) if effort is not None else ()), *(_SWITCHES * switched))
    variables = read_variables(request.chat_template_kwargs, *fields)
    template = call.text_processor.chat_template
    if template is not None and wanted is not None:
        with_tools = tools and template.uses("tools", tools=True)
        field = next(name for name, value in (switches | efforts).items() if value is not None)
        _check_template(call, template, with_tools, field, wanted, effort)
    return RequestedThinking(
        effort,
        wanted if switched else None,
        None if budget is None or budget < 0 else budget,
        visible is not False,
        variables,
    )


def _means_thought(name: str, value: object) -> bool:
    """Return whether a value of an effort or of a switch means that there is to be a thought."""
    return value not in ("none", "disabled", False)


def _check_template(
    call: Call, template: ChatTemplate, tools: bool, field: str, wanted: bool, effort: str | None
) -> None:
    """Raise ValidationError for a wish that the template cannot pass on, unless it is met anyway.

    `field`: the field that has it; `tools`: whether the template for tools is the one that is used.
    """
    thinks = call.text_processor.thoughts is not None
    if any(template.uses(name, tools=tools) for name in _SWITCHES):
        return
    if effort is not None:
        if template.uses("reasoning_effort", tools=tools) or (not wanted and not thinks):
            return
        text = f"`{field}` is not supported: the chat template of this model does not read it"
    elif wanted is thinks:
        return
    elif wanted:
        text = (
            f"`{field}` is not supported: this model is not known to think (--reasoning names its "
            "marks)"
        )
    else:
        text = (
            f"`{field}` is not supported: the chat template of this model has no switch for its "
            "thoughts"
        )
    raise name_param(ValidationError(text), field)
