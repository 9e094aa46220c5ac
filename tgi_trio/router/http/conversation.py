"""A conversation, independent of the API: its turns, its tools, and how to answer it.

A dialect (`dialects/`) converts a body into a `Conversation` and knows the API's names of fields;
`preparing.prepare` prepares it for generation.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tgi_trio.errors import GrammarError, ToolError
from tgi_trio.router.http.call import Call
from tgi_trio.router.text import grammars
from tgi_trio.router.text.answer import CallOpening, CallReader
from tgi_trio.router.text.answer_grammar import form_grammar, silent_grammar, tool_grammar
from tgi_trio.router.text.thoughts.rules import ThoughtRules, Trigger
from tgi_trio.router.text.tools.call_formats import Format
from tgi_trio.router.text.tools.call_parser import call_reader
from tgi_trio.router.text.tools.functions import Function, ToolUse, tool_use
from tgi_trio.router.text.tools.ids import make_ids
from tgi_trio.router.text.turns import Turn


@dataclass(frozen=True, slots=True)
class Conversation:
    """What an answer is to be found for."""

    turns: Sequence[Turn]
    # Tools, each as OpenAI's chats have them, which is how templates show them; and, in the same
    # order, those that may be called. Where some may not (`allowed_tools`), or none (summaries),
    # they are shown all the same: the prompt stays, and with it what is cached of its prefix.
    tools: Sequence[Mapping[str, Any]] = ()
    functions: Sequence[Function] = ()
    custom: Collection[str] = ()  # of chats: names of custom tools, whose calls are one text
    choice: str | None = None  # auto (or None), required, or a name
    named: bool = False  # `choice` can only be a name
    # Functions whose arguments need not fit their schema where no grammar can hold a model to it:
    # agents bring tools of strangers, and one of them must not end a session.
    loose: Collection[str] = ()
    parallel: bool = True
    tagged: bool = (
        False  # of chats: the answer's form is a structural tag, which says where to call
    )
    tool_prompt: str | None = None  # of the client's own, behind the tools
    # How the template is to write it.
    begins: bool | None = None  # whether a new turn of the assistant begins
    continues: bool | None = None  # whether the answer goes on with the last turn
    documents: Sequence[Mapping[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the client's own
    # How the model is to think. None: as it does by itself.
    effort: str | None = None
    thinking: bool | None = None
    budget: int | None = None  # tokens of a thought
    budget_is_wish: bool = False  # one that this model cannot be held to is passed over
    read_thoughts: bool = True  # told apart from the answer; False: the answer is what is written
    show_thoughts: bool = True  # or left out; they count all the same


@dataclass(frozen=True, slots=True)
class ChatTools:
    """The tools of one conversation: those that are shown, and those that its answer may call."""

    use: ToolUse
    format: Format
    listed: Sequence[Mapping[str, Any]]  # as the template shows them
    added: Mapping[str, int]  # the tokenizer's added tokens, special or not: text -> id
    past: int  # calls in the conversation before the answer
    source: random.Random  # where the ids of calls come from

    def grammar(
        self, most: int, thought: ThoughtRules | None, otherwise: str | None, *, tagged: bool
    ) -> str:
        """Return what the answer must look like, for the shard; `otherwise`: one without calls.

        `tagged`: as `tool_grammar` has it.

        Raises GrammarError where the schemas of the tools are more than `most` bytes together.
        """
        if not self.use.functions:
            if otherwise is not None:
                return form_grammar(otherwise, thought)
            return silent_grammar(self.format, self.added, thought)
        grammars.check_size([function.schema for function in self.use.functions], most)
        return tool_grammar(self.format, self.use, self.added, thought, otherwise, tagged=tagged)

    @property
    def trigger(self) -> Trigger | None:
        """Return what begins calls, where there must be some."""
        if not self.use.required or self.format.anchored:
            return None
        return Trigger(self.format.trigger, self.format.beginning[len(self.format.trigger) :])

    @property
    def opening(self) -> CallOpening | None:
        """Return how a call begins where a thought has not ended; None: it cannot be told."""
        form = self.format
        if form.anchored:
            return None
        names = tuple(form.introduce(function.name) for function in self.use.functions)
        # The grammar keeps this token out of thoughts where calls are forced.
        certain = form.trigger if self.use.required and form.trigger in self.added else ""
        return CallOpening(form.beginning, names, certain)

    def reader(self) -> CallReader:
        """Return what reads content and calls of one answer."""
        return call_reader(
            self.format,
            self.use.functions,
            make_ids(self.format, self.past, self.source),
            required=self.use.required,
        )

    async def check_each(self, call: Call, loose: Collection[str]) -> set[str]:
        """Return the `loose` tools whose arguments have no grammar; raises ToolError for another.

        Verdicts are remembered: asking again costs nothing.
        """
        found: set[str] = set()
        for function in self.use.functions:
            try:
                grammar = grammars.json_schema(function.schema)
                await call.engine.validator.check_grammar(grammar, call.own_text_processor)
            except GrammarError as error:
                if function.name not in loose:
                    text = f"the `{function.part}` of `{function.name}`: {error}"
                    raise ToolError(text) from error
                found.add(function.name)
        return found


def choose_tools(call: Call, conversation: Conversation) -> ChatTools | None:
    """Return the tools of a conversation; None where there are none. Raises ToolError."""
    use = tool_use(
        conversation.functions,
        conversation.choice,
        named=conversation.named,
        parallel=conversation.parallel,
    )
    shown = conversation.tools
    if use is None and not shown:
        return None
    use = use or ToolUse((), required=False, most=0)
    if len(use.functions) < len(conversation.functions):  # one is named: TGI shows that one alone
        names = {function.name for function in use.functions}
        shown = [tool for tool in shown if tool["function"]["name"] in names]
    return ChatTools(
        use=use,
        format=call.text_processor.call_style.format,
        listed=shown,
        added=call.text_processor.tokenizer.added_tokens,
        past=sum(len(turn.calls or ()) for turn in conversation.turns),
        source=call.ids,
    )
