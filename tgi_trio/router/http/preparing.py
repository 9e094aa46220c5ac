"""Prepares a conversation for generation: its prompt, its grammar, and how to parse the answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial

from tgi_trio.errors import GrammarError, ValidationError
from tgi_trio.router.http.call import Call
from tgi_trio.router.http.call_validation import Schedulable, validate_request
from tgi_trio.router.http.conversation import ChatTools, Conversation, choose_tools
from tgi_trio.router.http.messages.tool_calls import AnswerReader
from tgi_trio.router.http.rendering import render_with_tools, takes_long
from tgi_trio.router.media.image_prompt import Prompt
from tgi_trio.router.parameters import GenerationParameters
from tgi_trio.router.request import Request
from tgi_trio.router.text.answer import CallReader
from tgi_trio.router.text.answer_form import ReadForm, WithoutCalls
from tgi_trio.router.text.answer_grammar import form_grammar, free_grammar
from tgi_trio.router.text.thoughts.derive import Thoughts
from tgi_trio.router.text.thoughts.place import Place, find_place
from tgi_trio.router.text.thoughts.rules import ThoughtRules, Vocabulary
from tgi_trio.router.text.tools.call_parser import TextParser, call_reader
from tgi_trio.router.text.tools.functions import Function
from tgi_trio.router.text.tools.ids import make_ids

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A conversation prepared for generation."""

    prompt: Prompt
    parameters: GenerationParameters
    tools: ChatTools | None  # None: none may be called
    form: ReadForm | None  # how the answer is read
    # What it was made of.
    conversation: Conversation
    raw_parameters: GenerationParameters

    @property
    def plain(self) -> bool:
        """Whether the answer is plain text, which need not be parsed."""
        return self.form is None

    def reader(self) -> AnswerReader:
        """Return what tells of one answer."""
        return AnswerReader(show_thoughts=self.conversation.show_thoughts)

    async def validate(self, call: Call, body: Schedulable) -> Request:
        """Return the request; raises ValidationError, GrammarError, and ToolError for a tool."""
        try:
            request = await validate_request(
                call, self.prompt, self.parameters, body, add_special_tokens=False
            )
        except GrammarError:
            if self.tools is None:
                raise
            broken = await self.tools.check_each(call, self.conversation.loose)
            if not broken:
                raise
            log.info("no grammar holds a model to the parameters of %s", ", ".join(sorted(broken)))
            loosened = _loosen(self.conversation, broken)
            prepared = await prepare(call, loosened, self.raw_parameters)
            return await prepared.validate(call, body)
        return replace(request, answer=self.form)


def _loosen(conversation: Conversation, names: Collection[str]) -> Conversation:
    """Return the conversation with the arguments of these functions allowed to be any object."""
    functions = [
        Function(each.name, {"type": "object"}) if each.name in names else each
        for each in conversation.functions
    ]
    return replace(conversation, functions=functions, loose=())


async def prepare(
    call: Call, conversation: Conversation, parameters: GenerationParameters
) -> Prepared:
    """Return prompt, parameters and reader for a conversation, and nobody else's.

    The grammar of `parameters` is that of an answer without tools. Raises TemplateError, ToolError
    and ValidationError.
    """
    compute = partial(_prepare, call, conversation, parameters)
    return await call.make(compute, long=takes_long(call, conversation))


def _prepare(call: Call, conversation: Conversation, parameters: GenerationParameters) -> Prepared:
    """Do what `prepare` does, on this thread."""
    tools = choose_tools(call, conversation)
    prompt = render_with_tools(call, conversation, tools)
    thoughts = call.text_processor.thoughts
    place = (
        Place.CLOSED
        if thoughts is None
        else find_place(
            prompt if isinstance(prompt, str) else prompt.text, thoughts, _last_text(conversation)
        )
    )
    bound = _bound(call, conversation, parameters, tools, thoughts, place)
    called = tools if tools is not None and tools.use.functions else None
    form = _read_form(call, called, thoughts if conversation.read_thoughts else None, place)
    return Prepared(prompt, bound, called, form, conversation, parameters)


def _last_text(conversation: Conversation) -> str:
    """Return the text of the last turn, unless it is the model's."""
    last = conversation.turns[-1] if conversation.turns else None
    return "" if last is None or last.role == "assistant" else last.text or ""


def _bound(
    call: Call,
    conversation: Conversation,
    parameters: GenerationParameters,
    tools: ChatTools | None,
    thoughts: Thoughts | None,
    place: Place,
) -> GenerationParameters:
    """Return the parameters with a grammar of thought, calls and form; raises ValidationError."""
    tokenizer, budget = call.text_processor.tokenizer, conversation.budget
    rules = None
    if thoughts is not None and (place is not Place.CLOSED or thoughts.marks.opening):
        if budget is not None and not ThoughtRules.can_be_bounded(
            thoughts.marks, tokenizer.added_tokens
        ):
            if not conversation.budget_is_wish:
                raise ValidationError(
                    "a budget of a thought is not supported: this model ends its thoughts in words "
                    f"({thoughts.marks.end!r}), and may think them as well"
                )
            budget = None
        rules = ThoughtRules(
            thoughts.marks,
            place,
            Vocabulary(tokenizer.added_tokens, tokenizer.special_ids),
            budget=budget,
            trigger=None if tools is None else tools.trigger,
        )
    if tools is not None:
        most = call.engine.limits.max_grammar_bytes
        grammar: str | None = tools.grammar(
            most, rules, parameters.grammar, tagged=conversation.tagged
        )
    elif parameters.grammar is not None:
        grammar = form_grammar(parameters.grammar, rules)
    elif rules is not None and budget is not None and place is not Place.CLOSED:
        grammar = free_grammar(tokenizer.added_tokens, rules)
    else:
        return parameters
    return replace(parameters, grammar=grammar)


def _read_form(
    call: Call, tools: ChatTools | None, thoughts: Thoughts | None, place: Place
) -> ReadForm | None:
    """Return how to parse an answer; None if all of it is content.

    `tools`: None if none may be called.
    """
    if tools is None and thoughts is None:
        return None
    style = call.text_processor.call_style.format
    calls: Callable[[], CallReader] = TextParser
    if tools is not None:
        calls = tools.reader
    elif style.channels:  # on which there may be more than one thought and one answer
        calls = partial(WithoutCalls, partial(call_reader, style, (), make_ids(style, 0)))
    texts = style.texts if tools is not None or style.channels else ()
    marks = None if thoughts is None else thoughts.marks
    every = "".join((*texts, *(() if marks is None else marks.texts)))
    added = call.text_processor.tokenizer.added_tokens
    return ReadForm(
        thoughts=marks,
        inside=place is Place.INSIDE,
        calls=calls,
        opening=None if tools is None else tools.opening,
        marks={id: text for text, id in added.items() if text and text in every},
    )
