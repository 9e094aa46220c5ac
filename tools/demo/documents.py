"""Build the training documents: chats, plain text and prose, from the corpus and a seed.

Everything is drawn from one ``random.Random``, so that a seed names a corpus.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from tools.demo.entries import (
    Entry,
    load_entries,
    load_facts,
    load_prose,
    load_tools,
    load_unknown,
    load_words,
)
from tools.demo.markup import (
    BEGIN,
    END_OF_TEXT,
    HEAR,
    READ,
    SAY,
    Document,
    Passage,
    Turn,
    write_system,
    write_turn,
)
from tools.demo.phrasing import ask_about, bare, decorate, reword
from tools.demo.stories import write_story
from tools.demo.tool_use import OfferedTool, ask_for, force, make_name, offer, repeat_list

UNKNOWN = (
    "I am sorry, I only know about this server. "
    "Ask me about batching, streaming or the KV cache, for example."
)
NOTHING_MORE = "That is all I know about it. Is there anything else you would like to know?"
MORE_OF_WHAT = "I would like to help. What would you like to know about this server?"
NO_NAME = "You have not told me your name yet."

# What people say between questions more often than anything else.
COURTESIES = ("thanks", "good", "bye", "who-are-you", "hello", "what-can-you-do")

# Thoughts.
NOT_OURS = "This is not about the server. I do not know it."
MORE = "The user wants to hear more."

_MORE_QUESTIONS = (
    "Tell me more.",
    "Tell me more about it.",
    "More please.",
    "Can you say more?",
    "Can you tell me more about that?",
    "Go on.",
    "Please continue.",
    "Continue.",
    "Explain further.",
    "Give me more details.",
    "What else?",
    "Why is that?",
    "Why does that matter?",
    "Why is that useful?",
    "How does that work?",
    "How does it work?",
    "I want to know more.",
    "And what else?",
    "Could you explain that in more detail?",
    "Anything else?",
)
_REPEAT_QUESTIONS = (
    "Can you repeat that?",
    "Please repeat that.",
    "Say that again.",
    "Repeat your last answer.",
    "What did you say?",
    "Pardon?",
    "Once more, please.",
    "Can you say that again?",
)
_NAME_STATEMENTS = ("My name is {}.", "I am {}.", "I'm {}", "Hi, I am {}.", "Hello, my name is {}.")
_NAME_QUESTIONS = (
    "What is my name?",
    "Do you know my name?",
    "Who am I?",
    "Can you tell me my name?",
    "Do you remember my name?",
)


_LEADS = (
    "easy to explain.",
    "worth knowing.",
    "quickly explained.",
    "one of the things to know about this server.",
)


def think_of(entry: Entry) -> str:
    """Return the thought before the answer of an entry: what the question is about."""
    names = entry.singular + entry.plural
    return f"The question is about {names[0] if names else entry.slug.replace('-', ' ')}."


def _is_for(offered: OfferedTool, question: str) -> bool:
    """Return whether a question that no entry answers may be meant for a tool."""
    tool = offered.tool
    return tool.slug == "search" or any(word in question.lower() for word in tool.words)


class Corpus:
    """The documents a model is trained on; equal seeds give equal documents."""

    def __init__(self, seed: int, copying: float = 0.0) -> None:
        """`copying`: share of documents beside all others that are lists, said again and again."""
        self._copying = copying
        self.entries = load_entries()
        self._words = load_words()
        self._facts = load_facts()
        self._prose = load_prose()
        self._unknown = load_unknown()
        self._tools = load_tools()
        self._vocabulary = sorted({word for text in self._prose for word in text.split()})
        self._rng = random.Random(seed)
        self._deck: list[Entry] = []
        by_slug = {entry.slug: entry for entry in self.entries}
        self._courtesies = [by_slug[slug] for slug in COURTESIES]
        self._with_more = [entry for entry in self.entries if entry.more]

    def documents(self, count: int) -> Iterator[Document]:
        """Yield the next ``count`` documents."""
        for _ in range(count):
            if self._copying and self._rng.random() < self._copying:
                yield self._repeated_list()
                continue
            draw = self._rng.random()
            if draw < 0.34:
                yield self._chat([self._turn()])
            elif draw < 0.58:
                yield self._chat(self._conversation())
            elif draw < 0.88:
                yield self._chat_with_tools()
            elif draw < 0.95:
                yield self._plain_knowledge()
            else:
                yield self._plain_prose()

    # --- chats ---------------------------------------------------------------------------------

    def _chat(self, turns: list[Turn], tools: Sequence[OfferedTool] = ()) -> Document:
        rng = self._rng
        thinks = rng.random() < (0.4 if tools else 0.25)
        system = write_system(self._system(), [tool.line for tool in tools])
        pieces = [Passage(BEGIN + system, HEAR)]
        for turn in turns[:-1]:
            pieces += write_turn(turn, thinks=False)
        return (*pieces, *write_turn(turns[-1], thinks=thinks))

    def _system(self) -> str:
        draw = self._rng.random()
        if draw < 0.30:
            return self._rng.choice(self._words["systems"])
        if draw < 0.36:  # a system message that has nothing to do with the question
            return self._rng.choice(self._prose)
        return ""

    def _turn(self) -> Turn:
        draw = self._rng.random()
        if draw < 0.78:
            return self._known(self._next_entry())
        if draw < 0.92:
            return self._other(self._unknown_question())
        if draw < 0.97:
            return self._fact()
        question = decorate(self._rng.choice(_MORE_QUESTIONS), self._rng)
        return Turn(question, MORE_OF_WHAT, MORE)

    def _chat_with_tools(self) -> Document:
        rng = self._rng
        tools = offer(self._tools, rng)
        turns: list[Turn] = []
        while True:
            turns.append(self._turn_with_tools(tools))
            if len(turns) == 3 or rng.random() < 0.7:
                return self._chat(turns, tools)

    def _turn_with_tools(self, tools: Sequence[OfferedTool]) -> Turn:
        """Mostly a call; else a question that none of the tools is for."""
        rng = self._rng
        draw = rng.random()
        if draw < 0.66:
            return ask_for(rng.choice(tools), self._words, rng)
        if draw < 0.88:
            return self._known(self._next_entry())
        if draw < 0.94:
            entry = self._next_entry()
            names = entry.singular + entry.plural
            about = bare(names[0]) if names else entry.slug.replace("-", " ")
            turn = self._known(entry)
            return force(rng.choice(tools), turn.question, about, self._words, rng)
        question = self._unknown_question()
        if any(_is_for(offered, question) for offered in tools):
            return self._known(self._next_entry())
        return self._other(question)

    def _next_entry(self) -> Entry:
        """Deal entries as cards, so that none is seen much more often than another."""
        if not self._deck:
            self._deck = list(self.entries)
            self._rng.shuffle(self._deck)
        return self._deck.pop()

    def _known(self, entry: Entry) -> Turn:
        return Turn(decorate(self._question(entry), self._rng), entry.answer, think_of(entry))

    def _other(self, question: str) -> Turn:
        return Turn(decorate(question, self._rng), UNKNOWN, NOT_OURS)

    def _question(self, entry: Entry) -> str:
        rng = self._rng
        named = len(entry.singular) + len(entry.plural)
        if not named or (entry.questions and rng.random() < 0.4):
            return reword(rng.choice(entry.questions), rng)
        # The first name of each kind is the common one.
        if entry.singular and rng.random() < 0.35:
            return ask_about(entry.singular[0], False, rng)
        at = rng.randrange(named)
        plural = at >= len(entry.singular)
        return ask_about((entry.singular + entry.plural)[at], plural, rng)

    def _unknown_question(self) -> str:
        rng = self._rng
        words = self._words
        draw = rng.random()
        if draw < 0.30:
            name = rng.choice(words["topics"] + words["people"])
            return ask_about(name, False, rng)
        if draw < 0.45:
            return ask_about(self._nonsense(), False, rng)
        if draw < 0.52:
            return rng.choice(rng.choice(self._prose).split(". ")).strip()
        if draw < 0.56:
            return " ".join(self._nonsense() for _ in range(rng.randint(1, 4)))
        return rng.choice(self._unknown).format(
            dish=rng.choice(words["dishes"]),
            person=rng.choice(words["people"]),
            country=rng.choice(words["countries"]),
            topic=rng.choice(words["topics"]),
            topic2=rng.choice(words["topics"]),
            animal=rng.choice(words["animals"]),
            job=rng.choice(words["jobs"]),
            thing=rng.choice(words["things"]),
            place=rng.choice(words["places"]),
            name=rng.choice(words["names"]),
            attribute=rng.choice(words["attributes"]),
            superlative=rng.choice(words["superlatives"]),
            number=rng.randint(2, 999),
            number2=rng.randint(0, 20),
        )

    def _nonsense(self) -> str:
        return make_name(self._rng)

    def _fact(self) -> Turn:
        rng = self._rng
        kind, subject, value = rng.choice(self._facts)
        if kind == "capital":
            templates: tuple[str, ...] = (
                "What is the capital of {}?",
                "What's the capital of {}?",
                "Which city is the capital of {}?",
                "Name the capital of {}.",
                "Tell me the capital of {}.",
                "Do you know the capital of {}?",
                "capital of {}?",
            )
        else:
            templates = (
                "What is the opposite of {}?",
                "Name the opposite of {}.",
                "Tell me the opposite of {}.",
                "the opposite of {}?",
            )
        question = rng.choice(templates).format(subject)
        return Turn(
            decorate(question, rng),
            f"The {kind} of {subject} is {value}.",
            f"The question is about the {kind} of {subject}.",
        )

    def _conversation(self) -> list[Turn]:
        """Two to five turns, now and then many, with questions that refer to what was said."""
        rng = self._rng
        turns: list[Turn] = []
        name = ""
        length = rng.randint(8, 12) if rng.random() < 0.04 else rng.randint(2, 5)
        last: Entry | None = None  # what "tell me more" refers to
        while len(turns) < length:
            draw = rng.random()
            if turns and last is not None and draw < 0.35:
                answer = last.more or NOTHING_MORE
                turns.append(Turn(decorate(rng.choice(_MORE_QUESTIONS), rng), answer, MORE))
                last = None
            elif turns and draw < 0.42:
                question = decorate(rng.choice(_REPEAT_QUESTIONS), rng)
                turns.append(Turn(question, turns[-1].answer, "I repeat my last answer."))
            elif draw < 0.47 and not name:
                name = rng.choice(self._words["names"])
                statement = rng.choice(_NAME_STATEMENTS).format(name)
                answer = f"Nice to meet you, {name}! What would you like to know?"
                turns.append(Turn(statement, answer, "The user tells me a name."))
                last = None
            elif turns and draw < 0.52:
                answer = f"Your name is {name}." if name else NO_NAME
                question = decorate(rng.choice(_NAME_QUESTIONS), rng)
                turns.append(Turn(question, answer, "The user asks for the name."))
                last = None
            elif draw < 0.64:
                turns.append(self._known(self._courtesy()))
                last = None
            elif draw < 0.70:
                turns.append(self._turn())
                last = None
            else:
                last = rng.choice(self._with_more) if rng.random() < 0.4 else self._next_entry()
                turns.append(self._known(last))
        return turns

    def _courtesy(self) -> Entry:
        """Thanks are as frequent as all the others together."""
        thanks, *others = self._courtesies
        return thanks if self._rng.random() < 0.5 else self._rng.choice(others)

    # --- plain text ----------------------------------------------------------------------------

    def _plain_knowledge(self) -> Document:
        """The answers as ordinary text, as a prompt without a chat continues them."""
        rng = self._rng
        entry = self._next_entry()
        if rng.random() < 0.2:
            asked = self._known(entry)
            return (
                Passage(BEGIN + asked.question + "\n", HEAR),
                Passage(asked.answer + END_OF_TEXT, READ),
            )
        parts = [entry.answer]
        if (entry.singular or entry.plural) and rng.random() < 0.4:
            parts.insert(0, self._lead(entry))
        if entry.more and rng.random() < 0.7:
            parts.append(entry.more)
        for other in (self._next_entry() for _ in range(rng.choice((0, 0, 1, 2)))):
            parts.append(other.answer)
        return self._plain(" ".join(parts))

    def _lead(self, entry: Entry) -> str:
        """A sentence that begins with the name, for prompts that stop after "is"."""
        names, verb = (entry.singular, "is") if entry.singular else (entry.plural, "are")
        name = self._rng.choice(names[:2])
        return f"{name[0].upper()}{name[1:]} {verb} {self._rng.choice(_LEADS)}"

    def _plain_prose(self) -> Document:
        rng = self._rng
        if rng.random() < 0.5:
            return self._plain(rng.choice(self._prose))
        return self._plain(write_story(self._words, rng))

    def _repeated_list(self) -> Document:
        first, again = repeat_list(self._vocabulary, self._rng)
        return (Passage(BEGIN + first, HEAR), Passage(again + END_OF_TEXT, SAY))

    def _plain(self, text: str) -> Document:
        return (Passage(BEGIN, HEAR), Passage(text + END_OF_TEXT, READ))
