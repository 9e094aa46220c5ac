"""Parses an answer with tool calls as it arrives: pieces of text in, deltas out.

Streams and bodies share this parser: a body is the fold of the deltas that a stream would send, so
the two cannot differ, however the answer is cut into pieces. Pure: no I/O and no clock.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable

from tgi_trio.router.delta import CallDelta, Delta
from tgi_trio.router.text.tools.channels import ChannelReader
from tgi_trio.router.text.tools.format import ArgumentsReader, Format
from tgi_trio.router.text.tools.functions import Function
from tgi_trio.router.text.tools.matching import (
    PARTIAL,
    Match,
    find_text,
    match_text,
    overlap,
    split_text,
)


class TextParser:
    """Parses an answer without calls: all of it is content."""

    complete = False
    calls = 0

    def push(self, text: str) -> Delta:
        """Return the text as content."""
        return Delta(text)

    def finish(self) -> Delta:
        """Return an empty delta: nothing was held back."""
        return Delta()


class ParserState(enum.Enum):
    """What the next text belongs to."""

    CONTENT = "content"  # prose, in which a call may begin
    PROSE = "prose"  # prose to the end
    OPENING = "opening"
    NAME = "name"
    ARGUMENTS = "arguments"
    AFTER = "after"  # after complete arguments
    LOST = "lost"  # after calls, or after a malformed one; another may begin


class CallParser:
    """Parses one answer.

    Text is prose until the format's trigger is complete. White space before the trigger does not
    belong to the content. A call that is cut off by the end of the answer keeps its arguments so
    far; without a complete name it is not reported. Text that is neither prose, name nor arguments
    is dropped.
    """

    def __init__(
        self,
        form: Format,
        new_id: Callable[[str], str],
        functions: Iterable[Function] = (),
        *,
        required: bool = False,
    ) -> None:
        """`new_id` returns the id of a call, given its function's name.

        `required`: the answer consists of calls alone, so none of it is content.
        """
        self._form = form
        self._new_id = new_id
        self._functions = {function.name: function for function in functions}
        self._state = ParserState.CONTENT
        self._required = required
        self._text = ""  # not yet classified
        self._arguments: ArgumentsReader = form.arguments.reader(None)
        self.calls = 0  # begun so far
        self._delta = Delta()

    @property
    def complete(self) -> bool:
        """Whether there are calls, all of them complete."""
        return self.calls > 0 and self._state in (ParserState.AFTER, ParserState.LOST)

    def push(self, text: str) -> Delta:
        """Take more text; return what it makes certain."""
        self._text += text
        self._delta = Delta()
        while _STEPS[self._state](self):
            pass
        return self._delta

    def finish(self) -> Delta:
        """Return what was held back, now that the answer has ended."""
        self._delta = Delta()
        if self._state in (ParserState.CONTENT, ParserState.PROSE) and not self._required:
            self._delta.content = self._text
        self._text = ""
        return self._delta

    # Each consumes what is certain of the text, and returns whether the state changed.

    def _take_content(self) -> bool:
        trigger, text = self._form.trigger, self._text
        if self._form.anchored and not (text.startswith(trigger) or trigger.startswith(text)):
            self._state = ParserState.PROSE  # calls must begin the answer
            return True
        position = text.find(trigger)
        if position >= 0:
            self._add_content(text[:position].rstrip())
            self._text = text[position + len(trigger) :]
            self._state = ParserState.OPENING
            return True
        # The end of the text may be white space and the beginning of a trigger.
        certain = len(text[: len(text) - overlap(text, trigger)].rstrip())
        self._add_content(text[:certain])
        self._text = text[certain:]
        return False

    def _take_prose(self) -> bool:
        self._add_content(self._text)
        self._text = ""
        return False

    def _add_content(self, text: str) -> None:
        if not self._required:
            self._delta.content += text

    def _take_opening(self) -> bool:
        found = match_text(self._text, self._form.opening)
        if isinstance(found, Match):
            self._text, self._state = self._text[found.end :], ParserState.NAME
        elif found is None:
            self._state = ParserState.LOST
        else:
            self._squeeze()
        return found is not PARTIAL

    def _take_name(self) -> bool:
        if not split_text(self._form.middle):  # nothing but the name's last character ends it
            bare = _NAME.match(self._text)
            if bare is None:
                self._state = ParserState.LOST
                return True
            if bare.end() == len(self._text):
                return False
            middle = Match(bare.end(), bare.end())
        else:
            found = self._find_middle()
            # Whether more has come by now must make no difference.
            if len(self._text) >= _LONGEST_HEAD and (found is None or found.end > _LONGEST_HEAD):
                self._state = ParserState.LOST
                return True
            if found is None:
                return False
            middle = found
        name = self._text[: middle.start].strip()
        self._text = self._text[middle.end :]
        self._delta.calls.append(CallDelta(self.calls, self._new_id(name), name))
        self.calls += 1
        self._arguments = self._form.arguments.reader(self._functions.get(name))
        self._state = ParserState.ARGUMENTS
        return True

    def _find_middle(self) -> Match | None:
        """Return what ends the name, once that is certain."""
        texts = (self._form.middle, self._form.short_middle)
        matches = [find_text(self._text, text) for text in texts if text is not None]
        found = [match for match in matches if isinstance(match, Match)]
        # The first one to end is the one that would be found if the text came in smaller pieces.
        return min(found, key=lambda match: match.end, default=None)

    def _take_arguments(self) -> bool:
        written = self._arguments.push(self._text)
        self._text = ""
        if written:
            self._delta.last_call(self.calls - 1).arguments += written
        if self._arguments.ended:
            self._text, self._state = self._arguments.rest, ParserState.AFTER
        return self._arguments.ended

    def _take_next(self) -> bool:
        """Go on with the next call, or end the calls: the longer match decides."""
        following, closing = self._form.next, self._form.closing
        if not following:  # the format has one call at most
            self._text = ""
            return False
        found, end = match_text(self._text, following), match_text(self._text, closing)
        if found is PARTIAL or end is PARTIAL:
            self._squeeze()
            return False
        if isinstance(found, Match) and not (isinstance(end, Match) and end.end > found.end):
            self._text, self._state = self._text[found.end :], ParserState.NAME
        else:
            self._text = self._text[end.end if isinstance(end, Match) else 0 :]
            self._state = ParserState.LOST
        return True

    def _squeeze(self) -> None:
        """Keep one character of any white space between a format's texts, as good as all of it.

        A model may write nothing else any more, and all that is kept is looked at again each time.
        """
        self._text = _SPACES.sub(" ", self._text)

    def _find_trigger(self) -> bool:
        """Drop text up to the next trigger; an anchored trigger cannot come again."""
        trigger = self._form.trigger
        position = -1 if self._form.anchored else self._text.find(trigger)
        if position < 0:
            self._text = self._text[len(self._text) - overlap(self._text, trigger) :]
            return False
        self._text, self._state = self._text[position + len(trigger) :], ParserState.OPENING
        return True


_STEPS = {
    ParserState.CONTENT: CallParser._take_content,
    ParserState.PROSE: CallParser._take_prose,
    ParserState.OPENING: CallParser._take_opening,
    ParserState.NAME: CallParser._take_name,
    ParserState.ARGUMENTS: CallParser._take_arguments,
    ParserState.AFTER: CallParser._take_next,
    ParserState.LOST: CallParser._find_trigger,
}
_SPACES = re.compile(r"\s+")
_NAME = re.compile(r"\s*(?:[A-Za-z0-9_.:/-]+|\Z)")
_LONGEST_HEAD = 400  # most characters of a name and the text that ends it


def call_reader(
    form: Format,
    functions: Iterable[Function],
    new_id: Callable[[str], str],
    *,
    required: bool = False,
) -> CallParser | ChannelReader:
    """Return a parser for one answer; `functions`: those that may be called."""
    if form.channels:
        return ChannelReader(new_id, required=required)
    return CallParser(form, new_id, functions, required=required)
