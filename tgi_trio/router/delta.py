"""News of an answer: what each piece of it brought, and what they come to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace


@dataclass(slots=True)
class CallDelta:
    """News of one call."""

    index: int
    id: str | None = None  # with the first delta of the call alone
    name: str | None = None  # the same
    arguments: str = ""


@dataclass(slots=True)
class Delta:
    """What one piece of text brought; empty where all of it was markup or is not certain yet."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)  # one per call that has news
    thought: str = ""  # what the model thinks before it answers

    def __bool__(self) -> bool:
        return bool(self.content or self.calls or self.thought)

    def last_call(self, index: int) -> CallDelta:
        """Return the news of the last call that has any, which is number `index`."""
        if not self.calls or self.calls[-1].index != index:
            self.calls.append(CallDelta(index))
        return self.calls[-1]


@dataclass(slots=True)
class Answer:
    """The fold of deltas: an answer as a whole, or as much of it as there is."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)  # each with id and name
    thought: str = ""

    def add(self, delta: Delta) -> None:
        """Put the next delta behind those before."""
        self.thought += delta.thought
        self.content += delta.content
        for news in delta.calls:
            if news.index == len(self.calls):
                self.calls.append(replace(news))
            else:
                self.calls[news.index].arguments += news.arguments
